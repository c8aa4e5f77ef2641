// How matrices of 16 bits lie in the GPU's memory, weights and activations alike: blocks of 64 rows x 64 columns (8
// KiB), along the rows first; in a block rows of 128 bytes, whose eight pieces of 8 columns change places with the row:
// piece p of row r is at p ^ (r % 8). That is wgmma's 128-byte swizzle, so that a block is one bulk copy, and 8 x 8
// values for mma.sync are read out of shared memory without bank conflicts. Both sides are padded to whole blocks;
// padding of columns is zero in weights.
#pragma once
#include <cstddef>
#include <cstdint>

#include "common/host_device.h"

namespace as::cuda {

constexpr int kBlock = 64;                     // rows and columns of a block
constexpr int kBlockValues = kBlock * kBlock;  // of one
constexpr int kBlockBytes = 2 * kBlockValues;  // of one
constexpr int kRowBytes = 128;                 // of a row of a block
constexpr int kMaxSplitK = 4;                  // of a sum along K

AS_BOTH constexpr int blocks_of(int n) { return (n + kBlock - 1) / kBlock; }
constexpr size_t tiles_bytes(int rows, int columns) {
  return (size_t)blocks_of(rows) * blocks_of(columns) * kBlockBytes;
}
// Where a value lies, counted in values. column_blocks: of the matrix.
AS_BOTH inline size_t tile_offset(unsigned row, unsigned column, unsigned column_blocks) {
  return ((size_t)(row / kBlock) * column_blocks + column / kBlock) * kBlockValues +
         (row % kBlock * kBlock + (column % kBlock / 8 ^ row % 8) * 8 + column % 8);
}

// Where piece `piece` of row `row` is in a block, in bytes.
AS_BOTH constexpr int chunk_offset(int row, int chunk) { return row * kRowBytes + (chunk ^ row % 8) * 16; }

// A sum over K is cut into pieces of equal numbers of blocks (the last may be shorter), by the matrix alone: each is
// one chain of tensor-core products in ascending order, and they are added in ascending order. So it does not matter
// who computes which piece, and for how many rows at once. Matrices of 16 bits with many rows keep all SMs busy
// without: there a sum is one piece, and who goes on with somebody else's goes on from what that one left.
constexpr int kManyColumns = 16384;  // of a result
constexpr int max_split_k(int n) { return n < kManyColumns ? kMaxSplitK : 1; }

struct SplitK {
  int blocks, count, length;  // blocks of K; pieces; blocks of a piece

  explicit SplitK(int k, int most = kMaxSplitK) : blocks(blocks_of(k)) {
    length = (blocks + most - 1) / most;
    if (most > kMaxSplitK) length += length % 2;  // of quantized matrices alone: whole pairs
    count = (blocks + length - 1) / length;
  }
};

// Of quantized matrices: so many pieces that nearly all SMs have one of 256 columns, or else at least one of
// 128; and each of whole pairs of blocks, which kernels take in one step.
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
