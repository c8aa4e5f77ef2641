// CRC-32 as zlib has it (reflected, polynomial 0xedb88320), fast enough to check files while they are loaded.
#pragma once
#include <cstddef>
#include <cstdint>

namespace as {

// The CRC of `bytes` bytes, continuing from `crc` (0 at the beginning).
uint32_t crc32(const void* data, size_t bytes, uint32_t crc = 0);

}  // namespace as
