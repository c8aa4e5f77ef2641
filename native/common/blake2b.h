// BLAKE2b (RFC 7693) without a key, as hashlib.blake2b has it.
#pragma once
#include <cstddef>

namespace as {

// Writes the hash of `bytes` bytes to `digest`, which has `digest_bytes` (1 to 64) bytes.
void blake2b(const void* data, size_t bytes, void* digest, size_t digest_bytes);

}  // namespace as
