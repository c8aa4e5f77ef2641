// Which rows of an operand in tiles each CTA of a cluster copies for all that share them.
#pragma once
#include "cuda/kernels/common/device.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// The part of an operand that a CTA copies for all CTAs of the cluster that share the operand.
struct Share {
  const uint16_t* tiles;
  int first, blocks;  // first row of the tile; blocks of K
  int begin, end;     // this CTA's rows, counted from `first`
  int bytes;          // of all CTAs' shares, per block of K

  // rows: of the operand; most: rows of a tile; place: index of this CTA among `count`.
  __device__ Share(const uint16_t* tiles, int first, int rows, int most, int blocks, int place, int count)
      : tiles(tiles), first(first), blocks(blocks) {
    const int there = max(0, min(most, blocks_of(rows) * kBlock - first)), each = most / count;
    begin = min(there, place * each), end = min(there, (place + 1) * each), bytes = there * kRowBytes;
  }
};

// A part of a share that lies in one block of 64 rows, and where its first block of K goes in a stage.
struct Part {
  const char* from = nullptr;
  uint32_t to = 0;
  int bytes = 0;

  // Part number n of a share. If there is one, n becomes -1; else n decreases by the number of the share's parts.
  __device__ Part(const Share& share, int& n) {
    for (int row = share.begin, next; row < share.end; row = next) {
      const int at = share.first + row;
      next = min(share.end, row + kBlock - at % kBlock);
      if (n-- > 0) continue;
      from = reinterpret_cast<const char*>(share.tiles) + (size_t)(at / kBlock) * share.blocks * kBlockBytes +
             at % kBlock * kRowBytes;
      to = row * kRowBytes, bytes = (next - row) * kRowBytes;
      return;
    }
  }
};

// Part number n of those of both operands, the weights' first. of_rows: set to whether it is one of the rows.
__device__ __forceinline__ Part part_of(const Share& weights, const Share& rows, int n, bool& of_rows) {
  const Part part(weights, n);
  of_rows = n >= 0;
  return of_rows ? Part(rows, n) : part;
}
#endif

}  // namespace AS_DTYPE16
}  // namespace as::cuda
