// GGUF's blocks of quantized values (llama.cpp) as plain rows of codes and scales: what quantized.h takes.
#pragma once
#include <cstdint>
#include <string>

namespace as {

// Types that are unpacked here; those that few files have are unpacked in Python.
struct BlockKind {
  int values, bytes;  // of a block
  int bits;           // of a code: of 4, two in a byte
  int scales;         // of a block, 8 bits each; 0: float16 alone, which is read in place
  bool minimums;
};

// std::invalid_argument for a type that is not unpacked here.
const BlockKind& block_kind_of(const std::string& name);

// `blocks` blocks: codes [blocks * values * bits / 8], scales and minimums [blocks * scales] where there are some.
void unpack_blocks(const BlockKind& kind, const uint8_t* data, int64_t blocks, uint8_t* codes, int8_t* scales,
                   int8_t* minimums);

}  // namespace as
