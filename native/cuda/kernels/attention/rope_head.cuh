// One head of a row in decode attention: norm, RoPE, and conversion to the cache's type.
#pragma once
#include "cuda/kernels/attention/kv_splits.cuh"
#include "cuda/kernels/quantize/quantized.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace decode {

// A head of a row, with optional norm (as head_norm() does) and RoPE. A lane has every 32nd feature.
template <int kDim>
struct RopeHead {
  static constexpr int kEach = (kDim + 31) / 32;
  float x[kEach];

  __device__ void read(const float* head, const Norm& norm, int row, const Rope& rope, bool rotates) {
    const RotaryTable& t = rope.table;
    const int lane = threadIdx.x % 32, half = rotates ? t.dim / 2 : 0;
    float partner[kEach], cosine[kEach], sine[kEach], weights[kEach], partner_weights[kEach];
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      const int f = i * 32 + lane;
      x[i] = f < kDim ? head[f] : 0.0f;
      if (norm.weight) weights[i] = f < kDim ? norm.weight[f] : 0.0f;
      if (f >= 2 * half) continue;
      const int angle = rope.interleaved ? f / 2 : f < half ? f : f - half;
      const int other = rope.interleaved ? f ^ 1 : f < half ? f + half : f - half;
      partner[i] = head[other];
      if (norm.weight) partner_weights[i] = norm.weight[other];
      cosine[i] = t.cosine[(size_t)row * half + angle], sine[i] = t.sine[(size_t)row * half + angle];
    }
    if (norm.weight) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kEach; i++) sum = fmaf(x[i], x[i], sum);
      const float factor = 1.0f / sqrtf(warp_sum(sum) / kDim + norm.eps), one = norm.unit_offset ? 1.0f : 0.0f;
#pragma unroll
      for (int i = 0; i < kEach; i++) {
        x[i] = x[i] * factor * (weights[i] + one);
        if (i * 32 + lane < 2 * half) partner[i] = partner[i] * factor * (partner_weights[i] + one);
      }
    }
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      const int f = i * 32 + lane;
      if (f >= 2 * half) continue;
      const float own = __fmul_rn(x[i], cosine[i]), other = __fmul_rn(partner[i], sine[i]);
      x[i] = (rope.interleaved ? f % 2 : f >= half) ? own + other : own - other;
    }
  }
  __device__ void write(uint16_t* to) const {
    write(reinterpret_cast<char*>(to), [](int feature) { return feature * 2; });
  }
  // place: the offset of a feature in bytes.
  template <typename Place>
  __device__ void write(char* to, Place place) const {
#pragma unroll
    for (int i = 0; i < kEach; i++)
      if (const int f = i * 32 + threadIdx.x % 32; f < kDim)
        *reinterpret_cast<uint16_t*>(to + place(f)) = to_dtype16(x[i]);
  }
  // Quantizes for the cache. Quantized values go to `to` and, at the offset of `place`, to `also`. In scales and
  // also_scales the minimum follows the scale at a distance of apart and also_apart floats.
  template <CacheType kType, typename Place>
  __device__ void quantize(char* to, char* also, Place place, float* scales, int apart, float* also_scales,
                           int also_apart) const {
    constexpr int kBits = kType == CacheType::uint4 ? 4 : 8;
    const int lane = threadIdx.x % 32;
    float low = INFINITY, high = -INFINITY;
    bool bad = false;
    if (kType != CacheType::float8) {
#pragma unroll
      for (int i = 0; i < kEach; i++)
        if (i * 32 + lane < kDim) low = fminf(low, x[i]), high = fmaxf(high, x[i]), bad |= !isfinite(x[i]);
      low = -warp_max(-low), high = warp_max(high), bad = __any_sync(0xffffffffu, bad);
    }
    const Levels<kBits> levels(low, high, bad);
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      const int f = i * 32 + lane;
      int quant = kType == CacheType::float8 ? to_e4m3(x[i]) : levels.quant(x[i]);
      if (kBits == 4) {
        quant |= __shfl_down_sync(0xffffffffu, quant, 1) << 4;
        if (f < kDim && f % 2 == 0) to[f / 2] = also[place(f / 2)] = (char)quant;
      } else if (f < kDim) {
        to[f] = also[place(f)] = (char)quant;
      }
    }
    if (lane || kType == CacheType::float8) return;
    scales[0] = also_scales[0] = levels.scale(), scales[apart] = also_scales[also_apart] = levels.minimum();
  }
};

}  // namespace decode
}  // namespace AS_DTYPE16
}  // namespace as::cuda
