// Products of quantized weights with activations of 8 bits, in integers.
//
// Recipe: in each piece of K (tiles.h) the exact sum of code * activation over each group, or the part of it that the
// piece has; as a float times the scale, and the sum of these activations times the offset, are added to the piece's
// total, fused, groups in ascending order. SplitK are added in ascending order, and the sum is multiplied by the row's
// scale.
#pragma once
#include "cuda/kernels/gemm/gemm_float8.h"
#include "cuda/kernels/quantize/quantized.cuh"

namespace as::cuda {

// Activations lie in blocks of 64 rows x 64 columns as codes of e4m3 do (kernels/common/quantized.h): of each 16
// columns bytes 4 t to 4 t + 3 are columns 2 t, 2 t + 1 and the same eight further.
constexpr int kByteRow = kBlock, kByteBlock = kBlock * kByteRow;

// The blocks of K that have a sum of their own: those of a group in a piece.
struct Segments {
  int group_blocks, part_blocks, blocks;

  Segments(const Matrix& w, const SplitK& k)
      : group_blocks(w.quants.groups > 1 ? w.quants.group / kBlock : k.blocks),
        part_blocks(k.length),
        blocks(k.blocks) {}
  AS_BOTH int group(int block) const { return block / group_blocks; }
  // The first block of a block's segment.
  AS_BOTH int begin(int block) const {
    const int group = block / group_blocks * group_blocks, k_part = block / part_blocks * part_blocks;
    return group > k_part ? group : k_part;
  }
  // The last block of a block's segment.
  AS_BOTH int end(int block) const {
    int last = block / group_blocks * group_blocks + group_blocks - 1;
    const int k_part = block / part_blocks * part_blocks + part_blocks - 1;
    last = last < k_part ? last : k_part;
    return last < blocks ? last : blocks - 1;
  }
};

namespace AS_DTYPE16 {

// What a lane has of a tile of 16 rows x 64 columns in shared memory, as integers around zero: mma.sync's first
// operand, 32 columns at a time.
template <int kBits>
__device__ __forceinline__ void load_integers(const char* tile, uint32_t (&a)[2][4]) {
  const int lane = threadIdx.x % 32;
  if constexpr (kBits == 8) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      load_cores(a[half], shared_address(tile) + byte_chunk(lane % 16, 2 * half + lane / 16));
#pragma unroll
      for (int i = 0; i < 4; i++) a[half][i] ^= 0x80808080u;
    }
  } else {
    const uint4 own = reinterpret_cast<const uint4*>(tile)[lane];
    const uint32_t words[4] = {own.x, own.y, own.z, own.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      // 128 + code - 8, and then less 128: no byte borrows from the next.
      const uint32_t even = ((words[i] & 0x0f0f0f0fu) + 0x78787878u) ^ 0x80808080u,
                     odd = ((words[i] >> 4 & 0x0f0f0f0fu) + 0x78787878u) ^ 0x80808080u;
      a[i / 2][i % 2] = __byte_perm(even, odd, 0x6420), a[i / 2][2 + i % 2] = __byte_perm(even, odd, 0x7531);
    }
  }
}

// d [16, 8] += a [16, 32] b [8, 32]^T
__device__ inline void multiply_add(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Adds a segment's sum to a piece's total.
__device__ __forceinline__ void add_segment(float& total, uint32_t scales, int sum, float activations) {
  total = __fmaf_rn(__uint_as_float(scales << 16), __int2float_rn(sum), total);
  total = __fmaf_rn(__uint_as_float(scales & 0xffff0000u), activations, total);
}

}  // namespace AS_DTYPE16

// By wgmma, of chips of capability 9.0: any rows; many, of codes of 8 bits in one group.
void gemm_integer_stream_k(const GemmArgs& p, int rows, const Queue& queue);
void gemm_integer_prefill(const GemmArgs& p, int rows, const Queue& queue);

}  // namespace as::cuda
