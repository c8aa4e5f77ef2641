// The blobs that a rank sends rank 0 about its shard of one row, and constants that both sides share.
#pragma once

#include <cstdint>
#include <limits>

#include "sampling/random.h"
#include "sampling/sampler.h"

namespace as {
namespace sampling {

constexpr float kBanned = -std::numeric_limits<float>::infinity();
constexpr uint32_t kCandidatesMagic = 0x43505341;  // "ASPC"
constexpr uint32_t kNarrowedMagic = 0x4e505341;    // "ASPN"
constexpr int kCandidates = 1024;                  // of each rank; the largest set that is sampled without a search

struct Header {
  uint32_t bytes;  // of the whole blob
  uint32_t magic;
  int32_t not_finite;  // number of NaN and +Inf
  int32_t vocab_begin;
  int32_t vocab_local;
  int32_t n_candidates;
  int32_t n_top;
  int32_t truncated;  // there are finite logits below the last candidate
  float raw_max;
  float max;          // after the processors
  int32_t argmax_id;  // fallback if everything is banned: the shard's argmax, -1 if none is finite
  float argmax_raw;
  int32_t allowed_id;  // the same among the ids that the mask allows
  float allowed_raw;
  int32_t eos_id;  // the first end-of-sequence id if it is in this shard, else -1
  float eos_raw;
  int32_t winner_id;  // of unrestricted sampling, -1 if the shard has no token to sample
  float winner_raw;
  int32_t target_here;  // whether the target id is in this shard
  float target_raw;
  double winner_key;
  double raw_sum;  // sum of exp(raw - raw_max); 0 unless logprobs are requested
  double sum;      // sum of exp((logit - max) / temperature); 0 where it is not used
};

// A token's place in the order of (logit descending, id ascending). Its high bits are the depth: how far the logit is
// below the maximum of all ranks, divided by the temperature, in steps of 2^-24 up to 64 (weights below e^-64 are never
// sampled). The low bits are the id. A place has six digits of 10 bits; level 0 is the first.
constexpr int kDigitBits = 10, kBins = 1 << kDigitBits, kIdBits = 30, kDepthBits = 30;
constexpr int32_t kDeepest = (1 << kDepthBits) - 1;
AS_BOTH constexpr int shift_of(int level) { return (kLevels - 1 - level) * kDigitBits; }

AS_BOTH inline double steps_of(float scale) { return static_cast<double>(scale) * (1 << 24); }

// How many steps x is below the largest logit.
AS_BOTH inline int32_t depth_of(float x, double top, double steps) {
  const double depth = (top - x) * steps;
  return static_cast<int32_t>(depth < kDeepest ? depth : kDeepest);
}

constexpr double kMassUnit = 1.0 / (1ull << 44);

struct NarrowedHeader {
  uint32_t bytes, magic;
  int32_t n_bins;
  int32_t winner_id;  // of the sample, -1 if the shard has no token to sample
  double winner_key;
  float winner_raw;
  int32_t unused;
};

struct Candidate {
  int32_t id;
  float logit;  // after the processors, before temperature
  float raw;
};

inline bool better(const Candidate& a, const Candidate& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

enum class SamplingKind { greedy, top_k, nucleus, all };

inline SamplingKind kind_of(const SamplingParams& p) {
  if (p.greedy()) return SamplingKind::greedy;
  if (p.top_k > 0) return SamplingKind::top_k;
  return p.top_p < 1.0f || p.min_p > 0.0f ? SamplingKind::nucleus : SamplingKind::all;
}

Uniforms uniforms(const SamplingParams& params, int position);

Uniforms chunk_uniforms(const SamplingParams& params, int position, int pair);

// The depth (depth_of) of the last tokens that min_p keeps.
int32_t min_p_depth(const SamplingParams& params);

// The passes in use: those of the ISA, or the baseline's.
const LogitKernels& logit_kernels();

}  // namespace sampling
}  // namespace as
