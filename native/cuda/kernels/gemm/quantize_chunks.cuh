// Quantization of rows of activations to 8-bit integers or floats, in chunks of 16 columns. Shared by the kernel that
// stores them (quantize_rows.cu) and by the kernels that multiply them at once.
#pragma once
#include "cuda/kernels/gemm/gemm_integer.h"
#include "cuda/kernels/norm/normed_row.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {

constexpr int kChunkColumns = 16;

// 16 columns of a row in float32 or in tiles, not converted; zeros beyond the row's end.
template <bool kTiles>
struct Chunk;
template <>
struct Chunk<false> : RowPart<kChunkColumns> {
  using RowPart::read;
  __device__ void read(const Rows& in, int row, int column) {
    read(in.values + (size_t)row * in.width, column, in.width);
  }
  // The maximum of `least` and the bits of all absolute values. NaN and infinity have the greatest bits.
  __device__ uint32_t top(uint32_t least) const {
#pragma unroll
    for (int i = 0; i < kChunkColumns; i++) least = max(least, __float_as_uint(values[i]) & 0x7fffffffu);
    return least;
  }
};
template <>
struct Chunk<true> {
  uint32_t pairs[kChunkColumns / 2];

  __device__ void read(const Rows& in, int row, int column) {
#pragma unroll
    for (int i = 0; i < kChunkColumns; i += 8) {
      const int first = column + i, there = in.width - first;
      uint4 eight = make_uint4(0, 0, 0, 0);
      if (there > 0) eight = *reinterpret_cast<const uint4*>(in.tiles + tile_offset(row, first, blocks_of(in.width)));
      uint32_t* words = pairs + i / 2;
      words[0] = eight.x, words[1] = eight.y, words[2] = eight.z, words[3] = eight.w;
      if (there < 8)
#pragma unroll
        for (int j = 0; j < 4; j++) words[j] &= 2 * j + 1 < there ? 0xffffffffu : 2 * j < there ? 0xffffu : 0;
    }
  }
  __device__ float operator[](int i) const { return i % 2 ? high_of(pairs[i / 2]) : low_of(pairs[i / 2]); }
  __device__ uint32_t top(uint32_t least) const {
    uint32_t two = 0;
#pragma unroll
    for (int i = 0; i < kChunkColumns / 2; i++) two = __vmaxu2(two, pairs[i] & 0x7fff7fffu);
    return max(least, max(two << 16, two & 0xffff0000u));
  }
};

// Quantizes x / scale to nearest, with scale = max |x| / 127 as in the CPU backend, or / 448 for floats. A NaN or an
// infinity makes the scale NaN, and so the row's results. A row of (nearly) zeros becomes zeros. most: bits of max |x|.
template <bool kFloats>
struct ByteScale {
  float scale, inverse;

  __device__ explicit ByteScale(uint32_t most) {
    constexpr float kMost = kFloats ? kLargestFloat8 : 127.0f;
    const float top = __uint_as_float(most);
    scale = __fdiv_rn(top, kMost), inverse = __fdiv_rn(kMost, top);
    if (!isfinite(top)) scale = NAN, inverse = 0;
    else if (!(top > 1e-34f)) scale = inverse = 0;
  }
  // A chunk's 16 bytes. Integers are added to `sum`.
  template <bool kTiles>
  __device__ uint4 bytes(const Chunk<kTiles>& x, int& sum) const {
    uint32_t words[4] = {};
    if (inverse != 0) {
#pragma unroll
      for (int t = 0; t < 4; t++)
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
          const float low = __fmul_rn(x[j * 4 + t * 2], inverse), high = __fmul_rn(x[j * 4 + t * 2 + 1], inverse);
          if constexpr (kFloats) {
            words[t] |= (uint32_t)two_e4m3(low, high) << j * 8;
          } else {
            const int a = __float2int_rn(low), b = __float2int_rn(high);
            words[t] |= (uint32_t)((a & 0xff) | (b & 0xff) << 8) << j * 8, sum += a + b;
          }
        }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
};

// The scale of the group that eight adjacent lanes' chunks form. All lanes of a warp must call it.
template <bool kTiles>
__device__ inline ByteScale<true> scale_of_group(const Chunk<kTiles>& x) {
  uint32_t most = x.top(0);
#pragma unroll
  for (int step = 1; step < kFloatGroup / kChunkColumns; step *= 2)
    most = max(most, __shfl_xor_sync(0xffffffffu, most, step));
  return ByteScale<true>(most);
}

// Chunks of one row, which is normalized. make() returns the bits of the row's maximum, the same in all threads.
template <int kThreads, int kKept_>
class NormedChunks : public NormedRow<Chunk<false>, kThreads, kKept_> {
 public:
  using Base = NormedRow<Chunk<false>, kThreads, kKept_>;
  using Base::Base;
  struct Shared : Base::Shared {
    uint32_t tops[kThreads / 32];
  };
  __device__ uint32_t make(const float* row, Shared& shared) {
    Base::make(row, shared);
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < kKept_; i++) most = (*this)[i].top(most);
    most = __reduce_max_sync(0xffffffffu, most);
    if (threadIdx.x % 32 == 0) shared.tops[threadIdx.x / 32] = most;
    meet<kThreads>();
#pragma unroll
    for (int i = 0; i < kThreads / 32; i++) most = max(most, shared.tops[i]);
    return most;
  }
};

}  // namespace AS_DTYPE16
}  // namespace as::cuda
