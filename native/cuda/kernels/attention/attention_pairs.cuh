// A warp computes attention of 16 (row, query head) pairs by mma.sync (after Dao, "FlashAttention-2", 2023), over
// 16-bit keys and values in shared memory.
#pragma once
#include "cuda/kernels/attention/attention.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {

// kPadded: heads have a.cache.head_dim features, and zeros up to kDim.
template <int kDim, bool kPadded = false>
class WarpPairs {
 public:
  // Warps that share pairs: each computes all scores, but only a part of the value features.
  static constexpr int kShare = kDim > 256 ? 4 : kDim > 128 ? 2 : 1;
  static constexpr int kPairs = 16, kTokens = 64;                            // positions at a time
  static constexpr int kStride = kDim + 8, kTensor = kTokens * kStride * 2;  // values of a row, padded against bank
                                                                             // conflicts; bytes of keys, or of values
  static constexpr int kQueries = kDim > 128 ? kPairs* kStride * 2 : 0;      // shared bytes for a warp's queries
  // first: the warp's first pair; part: its part of the features. queries: in shared memory, read after a barrier.
  __device__ WarpPairs(const Attention& a, const TileRows& rows, int kv_head, int first, int part, uint32_t queries)
      : a_(a), rows_(rows), kv_head_(kv_head), first_(first), part_(part), queries_(queries), factor_(score_factor(a)) {
    const int dim = head_dim();
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int own = pair(h);
      const bool there = own < rows.count && rows.has(own, kv_head);
      last_[h] = there ? last_seen(a, rows.row(own), rows.position(own)) : -1;
      least_[h] = there ? first_seen(a, rows.row(own), rows.position(own)) : 0;
      const float* from = a.qkv + (there ? (size_t)rows.row(own) * a.width + (size_t)rows.head(own, kv_head) * dim : 0);
#pragma unroll
      for (int s = 0; s < kSteps; s++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int at = s * 16 + half * 8 + threadIdx.x % 4 * 2;
          uint32_t two = 0;
          if constexpr (kPadded)
            two = to_dtype16x2(there && at < dim ? from[at] : 0, there && at + 1 < dim ? from[at + 1] : 0);
          else if (there) two = to_dtype16x2(from[at], from[at + 1]);
          if constexpr (!kQueries) query_[s][h + 2 * half] = two;
          else if (s % kShare == part) store_shared(queries + ((threadIdx.x % 32 / 4 + 8 * h) * kStride + at) * 2, two);
        }
    }
    clear(total_, total_most_, total_sum_);
  }

  __device__ __forceinline__ void begin_split() { clear(out_, most_, sum_); }
  // Adds kTokens positions from `begin` on. keys, values: addresses in shared memory.
  __device__ __forceinline__ void attend(uint32_t keys, uint32_t values, int begin) {
    attend(keys, values, begin, [] {}, [] {});
  }
  // The same; calls functions behind the last read of keys and before the first one of values.
  template <typename Scored, typename Weighed>
  __device__ __forceinline__ void attend(uint32_t keys, uint32_t values, int begin, const Scored& scored,
                                         const Weighed& weighed) {
    const int lane = threadIdx.x % 32;
    float scores[kTokens / 8][4];
    const auto multiply = [&](int t, int s, const uint32_t(&query)[4]) {
      uint32_t k[4];
      load_cores(k, keys + (((t + lane / 16) * 8 + lane % 8) * kStride + s * 16 + lane / 8 % 2 * 8) * 2);
      multiply_add(scores[t], query, k[0], k[1]);
      multiply_add(scores[t + 1], query, k[2], k[3]);
    };
#pragma unroll
    for (int t = 0; t < kTokens / 8; t++)
#pragma unroll
      for (int i = 0; i < 4; i++) scores[t][i] = 0;
    if constexpr (!kQueries) {
#pragma unroll
      for (int t = 0; t < kTokens / 8; t += 2)
#pragma unroll
        for (int s = 0; s < kSteps; s++) multiply(t, s, query_[s]);
    } else {
#pragma unroll 4
      for (int s = 0; s < kSteps; s++) {
        uint32_t query[4];
        load_cores(query, queries_ + (lane % 16 * kStride + s * 16 + lane / 16 * 8) * 2);
#pragma unroll
        for (int t = 0; t < kTokens / 8; t += 2) multiply(t, s, query);
      }
    }
    scored();
    if (a_.soft_cap > 0) {
#pragma unroll
      for (int t = 0; t < kTokens / 8; t++)
#pragma unroll
        for (int i = 0; i < 4; i++) scores[t][i] = capped(a_, scores[t][i]);
    }
    if (a_.slopes) {
#pragma unroll
      for (int t = 0; t < kTokens / 8; t++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int at = begin + t * 8 + lane % 4 * 2 + i % 2, h = i / 2;
          if (last_[h] >= 0)
            scores[t][i] = sloped(a_, rows_.head(pair(h), kv_head_), scores[t][i], at - rows_.position(pair(h)));
        }
    }
    float now[2] = {-INFINITY, -INFINITY}, by[2];
#pragma unroll
    for (int t = 0; t < kTokens / 8; t++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int at = begin + t * 8 + lane % 4 * 2 + i % 2, h = i / 2;
        scores[t][i] = at <= last_[h] && at >= least_[h] ? scores[t][i] : -INFINITY;
        now[h] = fmaxf(now[h], scores[t][i]);
      }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      now[h] = fmaxf(now[h], __shfl_xor_sync(0xffffffffu, now[h], 1));
      now[h] = fmaxf(now[h], __shfl_xor_sync(0xffffffffu, now[h], 2));
      now[h] = fmaxf(most_[h], now[h] * factor_);
      by[h] = shrunk(most_[h], now[h]), most_[h] = now[h];
#pragma unroll
      for (int v = 0; v < kValues; v++) out_[v][2 * h] *= by[h], out_[v][2 * h + 1] *= by[h];
    }
    float halves[2][2] = {};
#pragma unroll
    for (int t = 0; t < kTokens / 8; t++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int h = i / 2;
        scores[t][i] = weight_of(scores[t][i], factor_, most_[h]);
        halves[h][t / (kTokens / 16)] += scores[t][i];
      }
#pragma unroll
    for (int h = 0; h < 2; h++) sum_[h] = summed(sum_[h], by[h], halves[h]);
    weighed();
#pragma unroll
    for (int s = 0; s < kTokens / 16; s++) {
      const uint32_t weights[4] = {to_dtype16x2(scores[2 * s][0], scores[2 * s][1]),
                                   to_dtype16x2(scores[2 * s][2], scores[2 * s][3]),
                                   to_dtype16x2(scores[2 * s + 1][0], scores[2 * s + 1][1]),
                                   to_dtype16x2(scores[2 * s + 1][2], scores[2 * s + 1][3])};
#pragma unroll
      for (int v = 0; v < kValues; v += 2) {
        uint32_t x[4];
        load_cores_transposed(
            x, values + ((s * 16 + lane / 8 % 2 * 8 + lane % 8) * kStride + (part_ * kValues + v + lane / 16) * 8) * 2);
        multiply_add(out_[v], weights, x[0], x[1]);
        multiply_add(out_[v + 1], weights, x[2], x[3]);
      }
    }
  }
  __device__ __forceinline__ void end_split() {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      sum_[h] += __shfl_xor_sync(0xffffffffu, sum_[h], 1);
      sum_[h] += __shfl_xor_sync(0xffffffffu, sum_[h], 2);
    }
  }

  // Writes the KV split as partial_of() describes it.
  __device__ __forceinline__ void write_split(float* to) const {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int own = pair(h), of_four = threadIdx.x % 4;
      if (own >= rows_.count) continue;
      if (part_ == 0 && of_four == 0) to[own] = most_[h], to[kDecodePairs + own] = sum_[h];
      float* const features = to + 2 * kDecodePairs + own * kDim + part_ * kValues * 8 + of_four * 2;
#pragma unroll
      for (int v = 0; v < kValues; v++)
        *reinterpret_cast<float2*>(features + v * 8) = make_float2(out_[v][2 * h], out_[v][2 * h + 1]);
    }
  }

  // Merges the KV split into the total.
  __device__ __forceinline__ void add_split() {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float now = fmaxf(total_most_[h], most_[h]), by = shrunk(total_most_[h], now),
                  split_by = shrunk(most_[h], now);
      total_most_[h] = now, total_sum_[h] = merged(total_sum_[h], by, sum_[h], split_by);
#pragma unroll
      for (int v = 0; v < kValues; v++)
#pragma unroll
        for (int i = 2 * h; i < 2 * h + 2; i++) total_[v][i] = merged(total_[v][i], by, out_[v][i], split_by);
    }
  }
  __device__ __forceinline__ void write_total() const {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int own = pair(h);
      if (own >= rows_.count || !rows_.has(own, kv_head_)) continue;
      const int row = rows_.row(own), head = rows_.head(own, kv_head_);
      const int feature = part_ * kValues * 8 + threadIdx.x % 4 * 2, column = head * head_dim() + feature;
      const float sum = with_sink(a_, head, total_sum_[h], total_most_[h]);
#pragma unroll
      for (int v = 0; v < kValues; v++)
#pragma unroll
        for (int i = 0; i < 2; i++)
          if (!kPadded || feature + v * 8 + i < head_dim())
            put(a_.out, row, column + v * 8 + i, share(total_[v][2 * h + i], sum));
    }
  }

 private:
  static constexpr int kSteps = kDim / 16, kValues = kDim / 8 / kShare;
  // values[v][2 h] and values[v][2 h + 1] are features 8 v + 2 (lane % 4) and the next, of a thread's pair h.
  using Values = float[kValues][4];

  __device__ __forceinline__ int head_dim() const { return kPadded ? a_.cache.head_dim : kDim; }
  __device__ __forceinline__ int pair(int h) const { return first_ + threadIdx.x % 32 / 4 + 8 * h; }
  __device__ __forceinline__ static void clear(Values& values, float (&most)[2], float (&sum)[2]) {
#pragma unroll
    for (int h = 0; h < 2; h++) most[h] = -INFINITY, sum[h] = 0;
#pragma unroll
    for (int v = 0; v < kValues; v++)
#pragma unroll
      for (int i = 0; i < 4; i++) values[v][i] = 0;
  }
  const Attention& a_;
  const TileRows& rows_;
  const int kv_head_, first_, part_;
  const uint32_t queries_;
  const float factor_;
  int least_[2], last_[2];  // positions that a pair sees; last_ is -1 if there is none
  uint32_t query_[kQueries ? 1 : kSteps][4];
  Values out_, total_;
  float most_[2], sum_[2], total_most_[2], total_sum_[2];
};

}  // namespace AS_DTYPE16
}  // namespace as::cuda
