// The greatest logits of a row in descending order, found by a CTA. All threads call these functions and get the same
// result.
//
// When a step samples, its instructions are in no cache, and most run once: fetching them dominates the time. Functions
// that are called from several places are therefore not inlined.
#pragma once
#include "common/exact.h"
#include "cuda/kernels/sampling/sample_sums.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr int kListed = 4096;    // the most logits that are sorted
constexpr int kSearched = 2040;  // the most tokens of a CTA in the first bin of a search that are listed

using Key = unsigned long long;

struct BinSums {
  uint32_t counts[kBins], low[kBins], high[kBins];  // masses in two words
};

// Of a search by a CTA (sample_wide.cuh).
struct SearchedTokens {
  BinSums bins[2];
  int listed;
  int ids[kSearched];
};

// Sums of a bin of a search, and of all bins up to it.
struct FoundBin {
  Key mass_up_to, mass;
  int count_up_to, count;
};

struct Shared {
  union {
    Key list[kListed];  // of logits
    double terms[kListed];
    SearchedTokens search;
  };
  float weights[kCandidates];
  int histogram[256];
  double keys[kWarps];
  Key masses[kWarps];
  float tops[kWarps];
  int ids[kWarps];
  double sum;
  Key mass;
  FoundBin found;
  double best_key;  // the CTA's BestChunk
  int best_chunk;
  float best_top;
  int count, token, digit;
};

// Keys ascend with descending logits and, among equal logits, with ascending ids.
__device__ inline uint32_t rank_of(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);  // -0 equals 0
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ inline float of_rank(uint32_t rank) {
  return __uint_as_float(rank & 0x80000000u ? rank & 0x7fffffffu : ~rank);
}
__device__ inline Key key_of(float x, int id) { return (Key)~rank_of(x) << 32 | (unsigned)id; }
__device__ inline float logit_of(Key key) { return of_rank(~(uint32_t)(key >> 32)); }
__device__ inline int id_of(Key key) { return (int)(uint32_t)key; }

// Reduces the values of all lanes with `take`.
template <typename T, typename Take>
__device__ T of_lanes(T value, const Take& take) {
#pragma unroll 1
  for (int step = 16; step; step /= 2) value = take(value, __shfl_xor_sync(kAll, value, step));
  return value;
}
static_assert(kWarps == 32, "a lane takes the value of each warp");

__device__ __noinline__ float block_max(Shared& s, const float* x, int n) {
  const auto take = [](float a, float b) { return greater(a, b); };
  float top = -INFINITY;
  for (int i = threadIdx.x; i < n; i += kThreads) top = greater(top, x[i]);
  top = of_lanes(top, take);
  if (threadIdx.x % 32 == 0) s.tops[threadIdx.x / 32] = top;
  __syncthreads();
  top = of_lanes(s.tops[threadIdx.x % 32], take);
  __syncthreads();
  return top;
}

template <typename T>
__device__ __noinline__ T block_min(T* of_warps, T value) {
  const auto take = [](T a, T b) { return min(a, b); };
  value = of_lanes(value, take);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  value = of_lanes(of_warps[threadIdx.x % 32], take);
  __syncthreads();
  return value;
}

template <typename T>
__device__ __noinline__ T block_sum(T* of_warps, T value) {
  const auto take = [](T a, T b) { return a + b; };
  value = of_lanes(value, take);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  value = of_lanes(of_warps[threadIdx.x % 32], take);
  __syncthreads();
  return value;
}

// The sum of the values of all threads up to this one.
template <typename T>
__device__ __noinline__ T block_scan(T* of_warps, T value) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll 1
  for (int step = 1; step < 32; step *= 2) {
    const T other = __shfl_up_sync(kAll, value, step);
    if (lane >= step) value += other;
  }
  if (lane == 31) of_warps[warp] = value;
  __syncthreads();
  value += of_lanes(lane < warp ? of_warps[lane] : (T)0, [](T a, T b) { return a + b; });
  __syncthreads();
  return value;
}

// The weight of all tokens relative to `top`, added chunk by chunk.
__device__ __noinline__ double total_weight(Shared& s, const RowSums& row, float top, float scale) {
  double sum = 0.0;
  for (int from = 0; from < row.chunks; from += kListed) {
    const int count = min(kListed, row.chunks - from);
    for (int i = threadIdx.x; i < count; i += kThreads) {
      const double depth = ((double)top - row.maxima[from + i]) * scale;
      s.terms[i] = depth < 80.0 ? row.sums[from + i] * exact::exp(-depth) : 0.0;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
#pragma unroll 8
      for (int i = 0; i < count; i++) sum += s.terms[i];
      s.sum = sum;
    }
    __syncthreads();
  }
  sum = s.sum;
  __syncthreads();
  return sum;
}

// s.histogram counts digits. Returns digit number `left` (from 1 on) in ascending order; `left` becomes its number
// among equal digits. Clears the histogram.
__device__ __noinline__ int digit_of(Shared& s, int& left) {
  __syncthreads();
  if (threadIdx.x < 32) {
    int counts[8], own = 0;
    for (int k = 0; k < 8; k++) {
      own += counts[k] = s.histogram[8 * threadIdx.x + k];
      s.histogram[8 * threadIdx.x + k] = 0;
    }
    int before = own;
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(kAll, before, step);
      if ((int)threadIdx.x >= step) before += other;
    }
    before -= own;
    if (before < left && before + own >= left) {
      int k = 0;
      while (before + counts[k] < left) before += counts[k++];
      s.digit = 8 * (int)threadIdx.x + k, s.count = left - before;
    }
  }
  __syncthreads();
  left = s.count;
  const int digit = s.digit;
  __syncthreads();
  return digit;
}

// A limit for keys that the greatest logits of at least `want` groups do not exceed, and roughly the lowest such limit.
// ~0 if there are too few groups: no finite logit exceeds that.
__device__ __noinline__ Key limit_of_groups(Shared& s, const RowSums& row, int want) {
  if (want >= row.group_count) return ~0ull;
  uint32_t prefix = 0;
  for (int shift = 24; shift >= 8; shift -= 8) {
    for (int g = threadIdx.x; g < row.group_count; g += kThreads) {
      const uint32_t digits = ~rank_of(row.groups[g]);
      if (shift == 24 || (digits ^ prefix) >> (shift + 8) == 0) atomicAdd(&s.histogram[digits >> shift & 255], 1);
    }
    prefix |= (uint32_t)digit_of(s, want) << shift;
  }
  const uint32_t last = prefix | 255;
  return last >= ~rank_of(-INFINITY) ? ~0ull : (Key)last << 32 | 0xffffffffu;
}

// Calls visit(key) for all finite logits up to the limit, each in any one of the threads.
template <typename Visit>
__device__ void visit_greatest(const SampleTask& task, const Logits& x, const RowSums& row, Key limit, Visit visit) {
  const auto look = [&](int id, float value) {
    const Key key = key_of(value, id);
    if (key <= limit && value > -INFINITY) visit(key);
  };
  if (task.chunk != kChunk) {
    for (int id = threadIdx.x; id < task.width; id += kThreads) look(id, x(id));
    return;
  }
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int base = 0; base < row.chunks; base += kThreads) {
    const int own = base + lane * kWarps + warp;
    const bool wanted = own < row.chunks && row.maxima[own] > -INFINITY && key_of(row.maxima[own], 0) <= limit;
    for (unsigned todo = __ballot_sync(kAll, wanted); todo; todo &= todo - 1) {
      const int first = (base + (__ffs(todo) - 1) * kWarps + warp) * kChunk;
      float values[kChunk / 32];
#pragma unroll
      for (int k = 0; k < kChunk / 32; k++) {
        const int id = first + k * 32 + lane;
        values[k] = id < task.width ? x(id) : -INFINITY;
      }
#pragma unroll
      for (int k = 0; k < kChunk / 32; k++) look(first + k * 32 + lane, values[k]);
    }
  }
}

// Lowers a limit that more than kListed logits meet: at least `want` and at most kListed logits meet the result.
__device__ __noinline__ Key limit_of_logits(Shared& s, const SampleTask& task, const Logits& x, const RowSums& row,
                                            Key limit, int want) {
  Key prefix = 0;
  int before = 0;
  for (int shift = 56;; shift -= 8) {
    visit_greatest(task, x, row, limit, [&](Key key) {
      if (shift == 56 || (key ^ prefix) >> (shift + 8) == 0) atomicAdd(&s.histogram[key >> shift & 255], 1);
    });
    __syncthreads();
    int left = want - before;
    // All logits with this digit may be few enough to stop here.
    const int mine = threadIdx.x < 256 ? s.histogram[threadIdx.x] : 0, asked = left;
    __syncthreads();
    const int digit = digit_of(s, left);
    if ((int)threadIdx.x == digit) s.count = mine;
    __syncthreads();
    const int same = s.count;
    __syncthreads();
    before += asked - left;
    prefix |= (Key)digit << shift;
    if (before + same <= kListed) return prefix | (((Key)1 << shift) - 1);
  }
}

// Lists the finite logits up to the limit, in order, and returns their count. If there are more than kListed, the limit
// is lowered so that fewer are listed, but at least `want`.
__device__ __noinline__ int list_greatest(Shared& s, const SampleTask& task, const Logits& x, const RowSums& row,
                                          Key& limit, int want) {
  for (;;) {
    if (threadIdx.x == 0) s.count = 0;
    __syncthreads();
    visit_greatest(task, x, row, limit, [&](Key key) {
      const int at = atomicAdd(&s.count, 1);
      if (at < kListed) s.list[at] = key;
    });
    __syncthreads();
    if (s.count <= kListed) break;
    __syncthreads();
    limit = limit_of_logits(s, task, x, row, limit, want);
  }
  const int count = s.count;
  int size = 2;  // bitonic sort
  while (size < count) size *= 2;
  for (int i = count + threadIdx.x; i < size; i += kThreads) s.list[i] = ~0ull;
  __syncthreads();
  for (int run = 2; run <= size; run *= 2) {
    for (int step = run / 2; step; step /= 2) {
      for (int i = threadIdx.x; i < size / 2; i += kThreads) {
        const int low = 2 * i - (i & (step - 1)), high = low + step;
        const Key a = s.list[low], b = s.list[high];
        if ((a > b) == ((low & run) == 0)) s.list[low] = b, s.list[high] = a;
      }
      __syncthreads();
    }
  }
  return count;
}

}  // namespace
}  // namespace AS_DTYPE16
}  // namespace as::cuda
