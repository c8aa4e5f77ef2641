// Values of quantized matrices (cuda/quantized.h), as kernels recover them.
#pragma once
#include <cuda_fp8.h>

#include "cuda/kernels/device.cuh"

namespace as {
namespace cuda {

// To nearest, to even; larger ones become the largest, 448.
__device__ inline uint8_t to_e4m3(float x) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3); }
__device__ inline float from_e4m3(uint8_t code) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)));
}

// How values between two are quantized in a cache: as the CPU backend does it (cpu/cache.cpp). bad: some are no
// numbers.
template <int kBits>
struct Levels {
  static constexpr int kMost = (1 << kBits) - 1;
  float low, step, inverse, half;
  bool bad, flat;

  __device__ Levels(float low, float high, bool bad) : low(low), bad(bad) {
    step = (float)(((double)high - low) / kMost);  // in double: the range may pass the largest float
    flat = bad || step < 1e-37f;                   // equal values, or nearly: the inverse would overflow
    inverse = flat ? 0 : __fdiv_rn(2.0f, step), half = __fmul_rn(0.5f, low);
  }
  __device__ int code(float x) const {
    return flat ? 0 : min(kMost, __float2int_rn(__fmul_rn(__fsub_rn(__fmul_rn(0.5f, x), half), inverse)));
  }
  __device__ float scale() const { return bad ? NAN : flat ? 0 : step; }
  __device__ float minimum() const { return bad ? NAN : low; }
};

// To the bit what the CPU backend recovers.
__device__ inline float recovered(uint32_t scales, int code, int bits) {
  const float scale = __uint_as_float(scales << 16), offset = __uint_as_float(scales & 0xffff0000u);
  return __fadd_rn(__fmul_rn(scale, (float)(code - (1 << (bits - 1)))), offset);
}
__device__ inline float value_of(const Codes& c, int row, int column, int k) {
  const uint32_t word = c.words[word_of(c, row, column, blocks_of(k))];
  if (c.floats)
    return __fmul_rn(__uint_as_float(c.scales[scale_of(row, 0, 1)]), from_e4m3(word >> bit_of(8, column) & 0xff));
  return recovered(c.scales[scale_of(row, column / c.group, c.groups)],
                   word >> bit_of(c.bits, column) & ((1 << c.bits) - 1), c.bits);
}

// A row's scale and offset, each twice.
struct Affine {
  __nv_bfloat162 scale, offset;

  __device__ void set(uint32_t scales) {
    const uint32_t low = __byte_perm(scales, 0, 0x1010), high = __byte_perm(scales, 0, 0x3232);
    scale = reinterpret_cast<const __nv_bfloat162&>(low), offset = reinterpret_cast<const __nv_bfloat162&>(high);
  }
  // Of two integers, which bfloat16 holds: rounded once.
  __device__ uint32_t operator()(__nv_bfloat162 centred) const {
    const __nv_bfloat162 y = __hfma2(scale, centred, offset);
    return reinterpret_cast<const uint32_t&>(y);
  }
};

// What a lane has of a tile of 16 rows x 64 columns, as loaded: 16 bytes at a time.
template <int kBits>
struct LaneCodes {
  static constexpr int kLoads = kBits / 4;
  uint4 loaded[kLoads];

  // The 16 columns of step `step`, which the compiler knows, as mma.sync's first operand. rows: those of lane / 4, and
  // of eight further.
  __device__ __forceinline__ void fragment(int step, const Affine (&rows)[2], uint32_t (&a)[4]) const {
    if constexpr (kBits == 4) {
      const uint32_t words[2] = {step < 2 ? loaded[0].x : loaded[0].z, step < 2 ? loaded[0].y : loaded[0].w};
#pragma unroll
      for (int half = 0; half < 2; half++)
#pragma unroll
        for (int below = 0; below < 2; below++) {
          // 128 + code: the code is the lowest bits of a fraction of seven.
          const uint32_t pair = (words[below] >> (step % 2 * 2 + half) * 4 & 0x000f000fu) | 0x43004300u;
          const uint32_t middle = 0x43084308u;  // 136
          a[half * 2 + below] = rows[below](
              __hsub2(reinterpret_cast<const __nv_bfloat162&>(pair), reinterpret_cast<const __nv_bfloat162&>(middle)));
        }
    } else {
      const uint4& four = loaded[step / 2];
      const uint32_t words[2] = {step % 2 == 0 ? four.x : four.z, step % 2 == 0 ? four.y : four.w};
#pragma unroll
      for (int half = 0; half < 2; half++)
#pragma unroll
        for (int below = 0; below < 2; below++) {
          // 2^23 + code: the code is the lowest bits of a fraction of 23.
          const float low = __uint_as_float(__byte_perm(words[below], 0x4b000000u, 0x7540u + half * 2)),
                      high = __uint_as_float(__byte_perm(words[below], 0x4b000000u, 0x7541u + half * 2));
          a[half * 2 + below] = rows[below](__floats2bfloat162_rn(low - 8388736.0f, high - 8388736.0f));
        }
    }
  }
};

// Zeros where columns from `column` on, of 16 that a fragment has, are not there.
__device__ inline void cut_fragment(uint32_t (&a)[4], int columns) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int column = i / 2 * 8 + threadIdx.x % 4 * 2;
    if (column >= columns) a[i] = 0;
    else if (column + 1 >= columns) a[i] &= 0xffff;
  }
}

}  // namespace cuda
}  // namespace as
