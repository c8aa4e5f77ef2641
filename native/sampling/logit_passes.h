// The passes over all logits of a row, as plain loops for the compiler's vectorizer. Included once for each ISA, in its
// namespace. LogitKernels in sampler.h documents the functions. Every sum has the same shape on all ISAs: 16 lanes over
// a chunk of 256, then chunks in ascending order.

#include "sampling/weights.h"

int group_max(const float* x, int n, float* groups) {
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  constexpr float kMax = std::numeric_limits<float>::max();
  uint32_t bad = 0;
  for (int begin = 0; begin < n; begin += kChunk) {
    float top[kLanes];
    uint32_t wrong[kLanes];
    for (int j = 0; j < kLanes; ++j) top[j] = kLowest, wrong[j] = 0;
    const int end = n - begin < kChunk ? n : begin + kChunk;
    int i = begin;
    for (; i + kLanes <= end; i += kLanes) {
#pragma GCC unroll 1  // otherwise gcc unrolls the lanes into scalars before it looks for vectors
      for (int j = 0; j < kLanes; ++j) {
        const float v = x[i + j];
        top[j] = v > top[j] ? v : top[j];
        wrong[j] += v <= kMax ? 0u : 1u;  // NaN and +Inf; -Inf is a valid logit
      }
    }
    for (; i < end; ++i) {
      const int j = (i - begin) % kLanes;
      top[j] = x[i] > top[j] ? x[i] : top[j];
      wrong[j] += x[i] <= kMax ? 0u : 1u;
    }
    for (int j = 0; j < kLanes; ++j) *groups++ = top[j], bad += wrong[j];
  }
  return static_cast<int>(bad);
}

void mask_group_max(const float* x, const uint32_t* mask, int first, int n, float* out, float* groups) {
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  constexpr uint32_t kBits[kLanes] = {1u,      1u << 1, 1u << 2,  1u << 3,  1u << 4,  1u << 5,  1u << 6,  1u << 7,
                                      1u << 8, 1u << 9, 1u << 10, 1u << 11, 1u << 12, 1u << 13, 1u << 14, 1u << 15};
  const uint32_t banned = float_to_bits(kLowest);
  for (int begin = 0; begin < n; begin += kChunk) {
    float top[kLanes];
    for (int j = 0; j < kLanes; ++j) top[j] = kLowest;
    const int end = n - begin < kChunk ? n : begin + kChunk;
    int i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      const int at = first + i;
      const uint32_t allowed = mask[at / 32] >> (at % 32) & 0xffffu;
      if (!allowed) {
        for (int j = 0; j < kLanes; ++j) out[i + j] = kLowest;
        continue;
      }
#pragma GCC unroll 1
      for (int j = 0; j < kLanes; ++j) {
        const uint32_t keep = (allowed & kBits[j]) ? 0xffffffffu : 0u;
        const float v = bits_to_float((float_to_bits(x[i + j]) & keep) | (banned & ~keep));
        out[i + j] = v;
        top[j] = v > top[j] ? v : top[j];
      }
    }
    for (; i < end; ++i) {
      const int at = first + i, j = (i - begin) % kLanes;
      out[i] = (mask[at / 32] >> (at % 32)) & 1u ? x[i] : kLowest;
      top[j] = out[i] > top[j] ? out[i] : top[j];
    }
    for (int j = 0; j < kLanes; ++j) *groups++ = top[j];
  }
}

void exp_values(const float* x, int n, float shift, float scale, float* out) {
  for (int i = 0; i < n; ++i) out[i] = exp_nonpositive((x[i] - shift) * scale);
}

void chunk_sum_exp(const float* x, int n, const float* groups, float scale, float* maxima, double* sums) {
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  float values[kChunk];
  for (int begin = 0; begin < n; begin += kChunk) {
    const int count = n - begin < kChunk ? n - begin : kChunk;
    float tops[kLanes];
    for (int j = 0; j < kLanes; ++j) tops[j] = *groups++;
    for (int step = kLanes / 2; step > 0; step /= 2) {
      for (int j = 0; j < step; ++j) tops[j] = tops[j + step] > tops[j] ? tops[j + step] : tops[j];
    }
    const float top = tops[0];
    *maxima++ = top;
    if (top == kLowest) {  // true of most chunks under a narrow mask
      *sums++ = 0.0;
      continue;
    }
    exp_values(x + begin, count, top, scale, values);
    for (int i = count; i < kChunk; ++i) values[i] = 0.0f;
    float lanes[kLanes];
    for (int j = 0; j < kLanes; ++j) lanes[j] = 0.0f;
    for (int i = 0; i < kChunk; i += kLanes) {
#pragma GCC unroll 1
      for (int j = 0; j < kLanes; ++j) lanes[j] += values[i + j];
    }
    double sum = 0.0;
    for (int j = 0; j < kLanes; ++j) sum += lanes[j];
    *sums++ = sum;
  }
}

void weigh_bins(const float* x, int n, float top, float scale, uint32_t* bins, uint64_t* masses) {
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  const double best = top, steps = steps_of(scale);
  float weights[kChunk];
  exp_values(x, n, top, scale, weights);
  for (int i = 0; i < n; ++i) {
    const uint32_t bin = static_cast<uint32_t>(depth_of(x[i], best, steps)) >> (kDepthBits - kDigitBits);
    bins[i] = x[i] == kLowest ? static_cast<uint32_t>(kBins) : bin;
  }
  for (int i = 0; i < n; ++i) {
    masses[i] = static_cast<uint64_t>(static_cast<int64_t>(static_cast<double>(weights[i]) / kMassUnit));
  }
}

int find_between(const float* x, int n, float low, float high, int* found) {
  uint8_t within[kChunk];
  for (int i = 0; i < n; ++i) within[i] = static_cast<uint8_t>((x[i] >= low) & (x[i] <= high));
  for (int i = n; i < kChunk; ++i) within[i] = 0;
  int count = 0;
  for (int i = 0; i < n; i += 8) {
    uint64_t eight;
    std::memcpy(&eight, within + i, sizeof eight);
    if (!eight) continue;
    for (int k = i; k < i + 8; ++k) {
      if (within[k]) found[count++] = k;
    }
  }
  return count;
}

LogitKernels logit_passes() {
  LogitKernels k{};
  k.group_max = group_max, k.mask_group_max = mask_group_max, k.chunk_sum_exp = chunk_sum_exp;
  k.exp_values = exp_values, k.weigh_bins = weigh_bins, k.find_between = find_between;
  return k;
}
