// Products of float32 values on tensor cores: each value is the sum of two of TF32's, of whose four products the three
// largest are added, for each step of 8 in this order: low x high, high x low, high x high. So a sum's bits depend on
// its terms and the order of steps only, not on which kernel forms it, or where in a tile.
#pragma once
#include "cuda/kernels/common/device.cuh"

namespace as::cuda {
namespace recurrent {

struct TwoParts {
  uint32_t high, low;
};
// high is rounded to 10 bits of mantissa; of low, tensor cores ignore what exceeds 10 bits.
__device__ inline TwoParts parts_of(float x) {
  const uint32_t high = (__float_as_uint(x) + 0x1000u) & ~0x1fffu;
  return {high, __float_as_uint(__fsub_rn(x, __uint_as_float(high)))};
}

// d [16, 8] += a [16, 8] b [8, 8]
__device__ inline void multiply_add_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ inline float4 four_at(const float* p) { return *reinterpret_cast<const float4*>(p); }
__device__ inline void put_four(float* p, const float4& x) { *reinterpret_cast<float4*>(p) = x; }
__device__ inline float4 scaled(float factor, const float4& x) {
  return make_float4(__fmul_rn(factor, x.x), __fmul_rn(factor, x.y), __fmul_rn(factor, x.z), __fmul_rn(factor, x.w));
}

// The first operand of a step of 8, of 16 or 32 rows.
template <int kTall>
struct LeftParts {
  uint32_t high[kTall][4], low[kTall][4];

  __device__ void set(int tile, int i, float x) {
    const TwoParts parts = parts_of(x);
    high[tile][i] = parts.high, low[tile][i] = parts.low;
  }
};

// sums += left right, for tiles of 8 columns from kFrom on. right(n, half): column lane / 4 of tile n, at lane % 4, or
// 4 behind it for the second half.
template <int kFrom = 0, int kTiles, int kTall, typename Right>
__device__ void add_parts(float (&sums)[kTiles][kTall][4], const LeftParts<kTall>& left, const Right& right) {
  uint32_t high[kTiles][2], low[kTiles][2];
#pragma unroll
  for (int n = kFrom; n < kTiles; n++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const TwoParts parts = parts_of(right(n, half));
      high[n][half] = parts.high, low[n][half] = parts.low;
    }
#pragma unroll
  for (int step = 0; step < 3; step++)
#pragma unroll
    for (int n = kFrom; n < kTiles; n++)
#pragma unroll
      for (int i = 0; i < kTall; i++)
        multiply_add_tf32(sums[n][i], step == 0 ? left.low[i] : left.high[i], step == 1 ? low[n] : high[n]);
}

// The same of 32 rows, of which a lane has four: 4 (lane / 4) and the next ones, of which a and b are the values at
// lane % 4 and 4 behind it. sums[n][i / 2][i % 2 * 2 + e]: row i of these, column 2 (lane % 4) + e of tile n.
template <int kFrom = 0, int kTiles, typename Right>
__device__ void add_products(float (&sums)[kTiles][2][4], const float4& a, const float4& b, const Right& right) {
  LeftParts<2> left;
  left.set(0, 0, a.x), left.set(0, 1, a.y), left.set(0, 2, b.x), left.set(0, 3, b.y);
  left.set(1, 0, a.z), left.set(1, 1, a.w), left.set(1, 2, b.z), left.set(1, 3, b.w);
  add_parts<kFrom>(sums, left, right);
}

// sums += keys right, of 16 keys or 32, a row each, at the step's channels.
template <int kTiles, int kTall, typename Right>
__device__ void multiply_keys(float (&sums)[kTiles][kTall][4], const float* keys, int stride, const Right& right) {
  const float* own = keys + threadIdx.x % 32 / 4 * stride + threadIdx.x % 4;
  LeftParts<kTall> left;
#pragma unroll
  for (int i = 0; i < 4 * kTall; i++) left.set(i / 4, i % 4, own[(i / 4 * 16 + i % 2 * 8) * stride + i % 4 / 2 * 4]);
  add_parts(sums, left, right);
}

}  // namespace recurrent
}  // namespace as::cuda
