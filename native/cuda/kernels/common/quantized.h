// Layout of quantized matrices in GPU memory. A value is scale * (q - middle) + offset, middle = 2^(bits - 1), as in
// the CPU backend (cpu/kernels/format.h); each group of columns of a row has a scale and an offset in bfloat16.
//
// Quantized values: blocks of 64 rows x 64 columns, all blocks of a block row first (tiles.h). A block consists of four
// tiles of 16 rows, a tile of 16 bytes for each lane of a warp (8 bits: 2 x 16 bytes, columns 0 to 31 first), in the
// order of mma.sync's first operand: lane 4 r + t has rows r and r + 8 of the tile, and of each 16 columns 2 t, 2 t +
// 1, 2 t + 8 and 2 t + 9. A word belongs to one row. 4 bits: its pairs of columns are four bits apart, the odd column
// 16 bits above the even one; 8 bits: four bytes in the columns' order.
//
// 8-bit values for 8-bit activations: words have the same columns, and wgmma reads them from shared memory. A block has
// rows of 64 bytes in four chunks of 16 columns; chunk c of row r is stored at c ^ (r % 8 / 2), which is wgmma's
// 64-byte swizzle.
//
// Scales: 64 words for each block row and group, scale in the low half and offset in the high half, tile by tile, row r
// + 8 beside row r. Padding rows have zeros, and so the value zero; padding columns may have any value.
//
// Small floats (Codes): words as of 4 bits. A group has no offset, and two scales: the low half of its word is the
// scale of the first half of its columns, the high half that of the second. So NVFP4, with a scale for each 16 columns,
// has groups of 32, and MXFP4 groups of 64. Halves of NF4's groups have the same scale. Scales of e2m1 values are
// stored kMxLarger times larger, and their bits are placed as mx_bits() does; nibble 2 j + i of a word of NF4 is column
// 8 j + i.
//
// MXFP4 of experts: tiles and words as of 4 bits, with values in e2m1 and a power of two as the scale of each 32
// columns, which are a word. Behind its words a tile has the scales: four bytes for rows r and r + 8, of which each has
// those of its two words. So a block is one copy. A scale is stored as the exponent of kMxLarger times smaller a
// bfloat16: see MxQuants (quantize/quantized.cuh), which also says why bits are placed as mx_bits() does. All padding
// is zero.
#pragma once
#include "cuda/kernels/common/tiles.h"

namespace as::cuda {

constexpr int kTileRows = 16;
constexpr int kScaleWords = kBlock;                                               // words of a block row and a group
AS_BOTH constexpr int quant_words(int bits) { return kBlockValues * bits / 32; }  // words of a block
AS_BOTH constexpr int quant_bytes(int bits) { return 4 * quant_words(bits); }

// What quantized values stand for: integers, e2m1 with a scale for each 32 or 16 columns, or the table of NF4.
enum class Codes : uint8_t { integers, mxfp4, nvfp4, nf4 };
AS_BOTH constexpr bool is_e2m1(Codes codes) { return codes == Codes::mxfp4 || codes == Codes::nvfp4; }

// The quantized values of a matrix [n, k].
struct Quants {
  Codes codes = Codes::integers;
  int bits = 0;               // 4 or 8; 0: the matrix is not quantized
  int group = 0, groups = 0;  // columns of a group (the last may have fewer); groups of a row
  bool floats = false;        // values are e4m3; a row, or each group of it, has a float32 scale and no offset
  bool in_rows = false;       // layout for 8-bit activations
  bool mx = false;            // MXFP4, with scales among the words
  uint32_t* words = nullptr;
  uint32_t* scales = nullptr;
  bool in_blocks = false;  // e4m3 in groups with the same scales in all rows of a block; see has_block_scales()

  // Whether scales change within a block.
  AS_BOTH bool fine() const { return codes == Codes::nvfp4 || (groups > 1 && group < kBlock); }
  // Columns from a group's first one to the first that has the scale in the high half of its word; 0: all have one.
  AS_BOTH int half() const { return is_e2m1(codes) ? group / 2 : 0; }
};

constexpr int kFloatGroup = 128;  // columns of a group of e4m3 values

// MXFP4. kMxBias: the stored scale of 2^x is x + 127 + kMxBias; it fits a byte if the scale is at most 2.
constexpr int kMxGroup = 32, kMxBias = 126, kMxMost = 128;
constexpr float kMxLarger = 0x1p126f, kMxTooLarge = 4;  // of scales in 16 bits
constexpr int kMxTileBytes = kTileRows * kBlock / 2 + 2 * kTileRows, kMxBlockBytes = kBlock / kTileRows * kMxTileBytes;
// Offset in bytes of the tile of a row and a column, and in that tile of the row's scale.
AS_BOTH inline size_t mx_tile(int row, int column, int column_blocks) {
  return ((size_t)(row / kBlock) * column_blocks + column / kBlock) * kMxBlockBytes +
         row % kBlock / kTileRows * kMxTileBytes;
}
AS_BOTH constexpr int mx_scale(int row, int column) {
  return kTileRows * kBlock / 2 + row % 8 * 4 + row % kTileRows / 8 * 2 + column % kBlock / kMxGroup;
}
// A word of e2m1 values: pair j = column % 32 / 8 has its even column in the lower half, the odd one in the upper half.
// mx_bits() returns the bits of a half, mx_value() is its inverse. mx_sign(), mx_size(): the bit of a pair's sign, and
// the lowest of the other three, which are adjacent but for the last pair's.
AS_BOTH constexpr int mx_sign(int pair) { return pair == 3 ? 13 : 15 - 3 * pair; }
AS_BOTH constexpr int mx_size(int pair) { return 6 - 3 * pair; }
AS_BOTH constexpr uint32_t mx_bits(int pair, uint32_t value) {
  const uint32_t sign = (value >> 3) << mx_sign(pair);
  return pair == 3 ? sign | (value >> 1 & 3) << 10 | (value & 1) << 14 : sign | (value & 7) << mx_size(pair);
}
AS_BOTH constexpr uint32_t mx_value(int pair, uint32_t half) {
  const uint32_t sign = (half >> mx_sign(pair) & 1) << 3;
  return pair == 3 ? sign | (half >> 10 & 3) << 1 | (half >> 14 & 1) : sign | (half >> mx_size(pair) & 7);
}

// The word of a value, and its lowest bit there. column_blocks: block columns of the matrix.
AS_BOTH inline size_t word_of(int bits, int row, int column, int column_blocks) {
  const size_t block = (size_t)(row / kBlock) * column_blocks + column / kBlock;
  const int tile = row % kBlock / kTileRows, lane = row % 8 * 4 + column % 8 / 2, below = row % kTileRows / 8;
  const int step = column % kBlock / 16;
  const int place = bits == 4 ? (tile * 32 + lane) * 4 + step / 2 * 2 + below
                              : ((tile * 2 + step / 2) * 32 + lane) * 4 + step % 2 * 2 + below;
  return block * quant_words(bits) + place;
}
AS_BOTH constexpr int byte_chunk(int row, int chunk) { return row * kBlock + (chunk ^ row % 8 / 2) * 16; }
AS_BOTH inline size_t word_of(const Quants& c, int row, int column, int column_blocks) {
  if (c.mx)
    return mx_tile(row, column, column_blocks) / 4 + (row % 8 * 4 + column % 8 / 2) * 4 +
           column % kBlock / kMxGroup * 2 + row % kTileRows / 8;
  if (!c.in_rows) return word_of(c.bits, row, column, column_blocks);
  const size_t block = (size_t)(row / kBlock) * column_blocks + column / kBlock;
  return block * quant_words(8) + byte_chunk(row % kBlock, column % kBlock / 16) / 4 + column % 8 / 2;
}
AS_BOTH inline int bit_of(int bits, int column) {
  const int half = column % 16 / 8, odd = column % 2;
  return bits == 4 ? (column % 32 / 16 * 2 + half) * 4 + odd * 16 : (half * 2 + odd) * 8;
}
// The bits of a column's value in its word, and the value in a word.
AS_BOTH constexpr int nf4_bit(int column) { return (column % 32 / 8 * 2 + column % 2) * 4; }
AS_BOTH inline uint32_t bits_of_value(const Quants& c, int column, uint32_t value) {
  if (is_e2m1(c.codes)) return mx_bits(column % 32 / 8, value) << column % 2 * 16;
  return value << (c.codes == Codes::nf4 ? nf4_bit(column) : bit_of(c.bits, column));
}
AS_BOTH inline uint32_t value_in(const Quants& c, int column, uint32_t word) {
  if (is_e2m1(c.codes)) return mx_value(column % 32 / 8, word >> column % 2 * 16);
  return word >> (c.codes == Codes::nf4 ? nf4_bit(column) : bit_of(c.bits, column)) & ((1u << c.bits) - 1);
}
AS_BOTH inline size_t scale_of(int row, int group, int groups) {
  return ((size_t)(row / kBlock) * groups + group) * kScaleWords + row % kBlock / kTileRows * kTileRows + row % 8 * 2 +
         row % kTileRows / 8;
}

AS_BOTH inline size_t quants_bytes(int n, int k, int bits) {
  return (size_t)blocks_of(n) * blocks_of(k) * quant_bytes(bits);
}
AS_BOTH inline size_t scales_bytes(int n, int groups) { return (size_t)blocks_of(n) * groups * kScaleWords * 4; }

// Bytes of a matrix with its scales.
AS_BOTH inline size_t quantized_bytes(const Quants& c, int n, int k) {
  if (c.mx) return (size_t)blocks_of(n) * blocks_of(k) * kMxBlockBytes;
  return quants_bytes(n, k, c.bits) + scales_bytes(n, c.groups);
}

// Whether kernels support a group size: scales may change every 16 columns and at the beginning of a block.
AS_BOTH constexpr bool has_group(int group, int k) {
  return group >= k || group % kBlock == 0 || group == 32 || group == 16;
}

}  // namespace as::cuda
