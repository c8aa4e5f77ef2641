// Integer GEMMs of quantized weights and 8-bit activations.
//
// Recipe: a segment is the intersection of a group and a split-K part (tiles.h). Its products of quantized values and
// activations are summed exactly. The sum times the scale, and the sum of its activations times the offset, are added
// to the part's total by fused multiply-adds, segments in ascending order. Parts are added in ascending order, and the
// result is multiplied by the row's scale.
#pragma once
#include "cuda/kernels/gemm/gemm_float8.h"
#include "cuda/kernels/quantize/quantized.cuh"

namespace as::cuda {

// Activations are stored in blocks of 64 rows x 64 columns like e4m3 weights (kernels/common/quantized.h): in each
// group of 16 columns, bytes 4 t to 4 t + 3 are columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9.
constexpr int kByteRow = kBlock, kByteBlock = kBlock * kByteRow;

// Segments: the blocks of K that share a group and a split-K part.
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

// Loads a lane's part of a 16 x 64 tile from shared memory as signed integers: mma.sync's first operand, 32 columns at
// a time.
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
      // Adds 128 - 8 to each byte, then subtracts 128 by flipping its top bit: no byte borrows from the next one.
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

// Adds a segment's sum to a split-K part's total.
__device__ __forceinline__ void add_segment(float& total, uint32_t scales, int sum, float activations) {
  total = __fmaf_rn(__uint_as_float(scales << 16), __int2float_rn(sum), total);
  total = __fmaf_rn(__uint_as_float(scales & 0xffff0000u), activations, total);
}

// The same for floats with groups (gemm_float8.h), with the scales of the weights and of the activations.
__device__ __forceinline__ void add_group(float& total, float of_weights, float of_activations, float sum) {
  total = __fmaf_rn(sum, __fmul_rn(of_weights, of_activations), total);
}

}  // namespace AS_DTYPE16

// wgmma, capability 9.0. stream_k: any number of rows; prefill: many rows, 8-bit weights with one group.
void gemm_integer_stream_k(const GemmArgs& p, int rows, const Queue& queue);
void gemm_integer_prefill(const GemmArgs& p, int rows, const Queue& queue);

}  // namespace as::cuda
