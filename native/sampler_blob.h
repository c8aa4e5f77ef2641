// What a rank tells rank 0 about its shard of one row, and what both sides of the exchange have to agree on.
#pragma once

#include <cstdint>
#include <limits>

#include "sampler.h"

namespace as {
namespace sampling {

constexpr float kBanned = -std::numeric_limits<float>::infinity();
constexpr uint32_t kCandidatesMagic = 0x43505341;  // "ASPC"
constexpr uint32_t kFullMagic = 0x46505341;        // "ASPF"

struct Header {
  uint32_t bytes;  // of the whole blob
  uint32_t magic;
  int32_t not_finite;  // NaN and +Inf found
  int32_t vocab_begin;
  int32_t vocab_local;
  int32_t n_candidates;
  int32_t n_top;
  int32_t truncated;  // there are finite logits below the last candidate
  float raw_max;
  float max;        // after the processors
  int32_t best_id;  // fallback if everything is banned: best raw logit of the shard, -1 if none is finite
  float best_raw;
  int32_t allowed_id;  // the same among the ids that the mask allows
  float allowed_raw;
  int32_t eos_id;  // the first end-of-sequence id if it is in this shard, else -1
  float eos_raw;
  int32_t winner_id;  // of unrestricted sampling, -1 if the shard has nothing to draw
  float winner_raw;
  double raw_sum;  // sum of exp(raw - raw_max); 0 unless logprobs are wanted
  double sum;      // sum of exp((logit - max) / temperature); 0 where the draw has no use for it
};

struct Candidate {
  int32_t id;
  float logit;  // after the processors, before temperature
  float raw;
};

inline bool better(const Candidate& a, const Candidate& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

enum class Draw { greedy, top_k, nucleus, all };

inline Draw kind_of(const SamplingParams& p) {
  if (p.greedy()) return Draw::greedy;
  if (p.top_k > 0) return Draw::top_k;
  return p.top_p < 1.0f ? Draw::nucleus : Draw::all;
}

struct Uniforms {
  double first, second;  // in [0, 1), 53 bits each
};

Uniforms uniforms(const SamplingParams& params, int position);

// The passes in use: the ISA's, or the baseline's.
const LogitKernels& logit_kernels();

}  // namespace sampling
}  // namespace as
