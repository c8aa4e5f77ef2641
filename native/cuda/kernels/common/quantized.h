// How quantized matrices lie in the GPU's memory. A value is scale * (code - middle) + offset, middle = 2^(bits - 1),
// as InstantQuant has it (cpu/kernels/format.h); each group of columns of a row has a scale and an offset in bfloat16.
//
// Codes: blocks of 64 rows x 64 columns, along the rows first (tiles.h); in a block four tiles of 16 rows; in a tile 16
// bytes (of 8 bits 2 x 16, those of columns 0 to 31 first) for each lane of a warp, which are what mma.sync wants of it
// as its first operand: lane 4 r + t has rows r and r + 8 of the tile, and of each 16 columns 2 t, 2 t + 1 and the same
// eight further. A word is of one row: of 4 bits its pairs of columns lie four bits apart, the odd column's code 16
// bits above the even one's; of 8 bits four bytes in the columns' order.
//
// Codes of 8 bits for activations of 8 bits have words of the same columns, and lie as these do, for wgmma to read them
// out of shared memory: in a block rows of 64 bytes, whose four pieces of 16 columns change places with the row: piece
// p of row r is at p ^ (r % 8 / 2), which is wgmma's 64-byte swizzle.
//
// Scales: for each block of 64 rows and group 64 words, scale below offset, tile by tile, row r + 8 beside row r. Rows
// that there are not have zeros, and so the value zero; columns that there are not have any code.
#pragma once
#include "cuda/kernels/common/tiles.h"

namespace as::cuda {

constexpr int kTileRows = 16;
constexpr int kScaleWords = kBlock;                                               // of a block of rows and a group
AS_BOTH constexpr int quant_words(int bits) { return kBlockValues * bits / 32; }  // of a block
AS_BOTH constexpr int quant_bytes(int bits) { return 4 * quant_words(bits); }

// Codes of a matrix [n, k].
struct Quants {
  int bits = 0;               // 4 or 8; 0: the matrix is not quantized
  int group = 0, groups = 0;  // columns of one (the last may have fewer), and how many a row has
  bool floats = false;        // codes are e4m3, 8 bits, and a row has one scale, float32, and no offset
  bool in_rows = false;       // codes lie as activations of 8 bits do
  uint32_t* words = nullptr;
  uint32_t* scales = nullptr;
};

// Where a value's code is: a word, and from which bit of it on. column_blocks: of the matrix.
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
  if (!c.in_rows) return word_of(c.bits, row, column, column_blocks);
  const size_t block = (size_t)(row / kBlock) * column_blocks + column / kBlock;
  return block * quant_words(8) + byte_chunk(row % kBlock, column % kBlock / 16) / 4 + column % 8 / 2;
}
AS_BOTH inline int bit_of(int bits, int column) {
  const int half = column % 16 / 8, odd = column % 2;
  return bits == 4 ? (column % 32 / 16 * 2 + half) * 4 + odd * 16 : (half * 2 + odd) * 8;
}
AS_BOTH inline size_t scale_of(int row, int group, int groups) {
  return ((size_t)(row / kBlock) * groups + group) * kScaleWords + row % kBlock / kTileRows * kTileRows + row % 8 * 2 +
         row % kTileRows / 8;
}

AS_BOTH inline size_t quants_bytes(int n, int k, int bits) {
  return (size_t)blocks_of(n) * blocks_of(k) * quant_bytes(bits);
}
AS_BOTH inline size_t scales_bytes(int n, int groups) { return (size_t)blocks_of(n) * groups * kScaleWords * 4; }

// Whether kernels take such groups: scales change from one 16 columns to the next at most, and where a block begins.
AS_BOTH constexpr bool has_group(int group, int k) {
  return group >= k || group % kBlock == 0 || group == 32 || group == 16;
}

}  // namespace as::cuda
