// GGUF's blocks of quantized values (llama.cpp): where codes and scales are in them. Types that few files have are
// unpacked in Python.
//
// A block holds 32 values, or 256 of the K types, whose 8 or 16 groups have scales (and minimums) of 6 or 8 bits.
#pragma once
#include <cstdint>

#include "cpu/quantized.h"

namespace as {

struct BlockKind {
  int values, bytes;  // of a block
  int bits;           // of a code
  int group;          // values that share a scale
  int scale, offset;  // bytes before the block's float16 scale and offset; -1: there is none
  bool nested;        // they are those of a super-group
};
const BlockKind& block_kind(Packing packing);

constexpr int kUnpacked = 32;  // values, a byte each, that unpack_block() gives

// Values [32 * i, 32 * (i + 1)) of a row of blocks.
void unpack_block(Packing packing, const uint8_t* row, int64_t i, uint8_t* out);

// The groups' scales, and minimums where there are some, of block b of a row of a K type.
void unpack_scales(Packing packing, const uint8_t* row, int64_t b, int8_t* scales, int8_t* minimums);

// Rows of blocks, `stride` bytes apart.
StoredRows block_rows(Packing packing, const uint8_t* data, int64_t stride, int64_t columns);

}  // namespace as
