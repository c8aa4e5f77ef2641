// GGUF's blocks of quantized values (llama.cpp): where quantized values and scales are in them. Python unpacks the less
// common types.
//
// A block holds 32 values, or 256 for the K types, whose 8 or 16 groups have scales (and minimums) of 6 or 8 bits.
#pragma once
#include <cstdint>

#include "cpu/quantized.h"

namespace as {

struct BlockKind {
  int values, bytes;  // of a block
  int bits;           // of a quantized value
  int group;          // values that share a scale
  int scale, offset;  // byte offsets of the block's float16 scale and offset; -1: none
  bool nested;        // they belong to a super-group
};
const BlockKind& block_kind(Packing packing);

constexpr int kUnpacked = 32;  // values, a byte each, that unpack_block() returns

// Unpacks values [32 * i, 32 * (i + 1)) of a row of blocks.
void unpack_block(Packing packing, const uint8_t* row, int64_t i, uint8_t* out);

// Unpacks the groups' scales, and minimums if any, of block b of a row of a K type.
void unpack_scales(Packing packing, const uint8_t* row, int64_t b, int8_t* scales, int8_t* minimums);

// Rows of blocks, `stride` bytes apart.
StoredRows block_rows(Packing packing, const uint8_t* data, int64_t stride, int64_t columns);

}  // namespace as
