// Layout of 16-bit weights and activations in GPU memory: blocks of 64 rows x 64 columns (8 KiB), all blocks of a block
// row first. Within a block each row has 128 bytes, in eight chunks of 8 columns; chunk c of row r is stored at
// c ^ (r % 8). This is wgmma's 128-byte swizzle: a block is one bulk copy, and mma.sync reads 8 x 8 values from shared
// memory without bank conflicts. Rows and columns are padded to whole blocks; padding columns of weights are zero.
#pragma once
#include <cstddef>
#include <cstdint>

#include "common/host_device.h"

namespace as::cuda {

constexpr int kBlock = 64;                     // rows and columns of a block
constexpr int kBlockValues = kBlock * kBlock;  // values of a block
constexpr int kBlockBytes = 2 * kBlockValues;  // bytes of a block
constexpr int kRowBytes = 128;                 // bytes of a row of a block
constexpr int kMaxSplitK = 4;                  // most split-K parts of 16-bit weights

AS_BOTH constexpr int blocks_of(int n) { return (n + kBlock - 1) / kBlock; }
constexpr size_t tiles_bytes(int rows, int columns) {
  return (size_t)blocks_of(rows) * blocks_of(columns) * kBlockBytes;
}
// Offset of a value, counted in values. column_blocks: block columns of the matrix.
AS_BOTH inline size_t tile_offset(unsigned row, unsigned column, unsigned column_blocks) {
  return ((size_t)(row / kBlock) * column_blocks + column / kBlock) * kBlockValues +
         (row % kBlock * kBlock + (column % kBlock / 8 ^ row % 8) * 8 + column % 8);
}

// Offset in bytes of a 16-byte chunk in a block.
AS_BOTH constexpr int chunk_offset(int row, int chunk) { return row * kRowBytes + (chunk ^ row % 8) * 16; }

// Split-K: K is divided into parts of equal numbers of blocks (the last may be shorter), depending on the matrix alone.
// A part is one chain of tensor-core multiply-adds in ascending order, and parts are added in ascending order. So bits
// depend neither on which CTA computes a part nor on the number of rows. 16-bit matrices with many columns keep all SMs
// busy without split-K: there is one part, and a CTA that takes over a tile continues from the partial sum of another.
constexpr int kManyColumns = 16384;  // columns of a result
constexpr int max_split_k(int n) { return n < kManyColumns ? kMaxSplitK : 1; }

struct SplitK {
  int blocks, count, length;  // blocks of K; parts; blocks of a part

  explicit SplitK(int k, int most = kMaxSplitK) : blocks(blocks_of(k)) {
    length = (blocks + most - 1) / most;
    if (most > kMaxSplitK) length += length % 2;  // quantized matrices only: whole pairs of blocks
    count = (blocks + length - 1) / length;
  }
};

// Split-K parts of a quantized matrix: enough that nearly all SMs have a part of 256 columns, or else at least one of
// 128. Parts are whole pairs of blocks, which kernels process in one step.
constexpr int kMaxQuantSplitK = 10, kReferenceSms = 132;
inline int quant_split_k(int n, int k, int at_most = kMaxQuantSplitK) {
  const int tiles = (n + 4 * kBlock - 1) / (4 * kBlock), alone = kReferenceSms / tiles;
  int most = (kReferenceSms * 2 * kBlock + n - 1) / n;
  if (alone * tiles > kReferenceSms * 7 / 8) most = alone;
  if (most > at_most) most = at_most;
  while (most > 1 && most <= kMaxSplitK && SplitK(k, most).length % 2 && SplitK(k, most).count > 1) most--;
  return most;
}

}  // namespace as::cuda
