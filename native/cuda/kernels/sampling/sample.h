// Sampling on the GPU with the bits of native/sampling: the same sums in the same order and the same random numbers.
// Files that include this header are compiled without contraction of multiplications and additions (-fmad=false).
#pragma once
#include "cuda/kernels/sampling/argmax.h"
#include "sampling/sampler_blob.h"

namespace as::cuda {

// A logit processor's change of one logit, and the logit before it.
struct Edit {
  int32_t id;
  float by, before;
};

// A row to sample from or to score. Parameters are those of sampling/sampler.h.
struct RowSample {
  int32_t row, output;  // of the logits, and of the argmaxes
  sampling::SamplingKind kind;
  int32_t target;               // id to score instead of sampling; -1: none
  int32_t top_k, top_logprobs;  // top_logprobs: -1 if no log probabilities are wanted
  int32_t deepest;              // steps from the greatest logit down to min_p's limit; -1: no min_p
  float scale, top_p;           // scale: 1 / temperature
  int32_t mask;                 // index of the step's mask; -1: none
  int32_t end;                  // first end-of-sequence id, sampled if no other token is left; -1: none
  int32_t first_edit, repeats, lowers, bans, biases;  // edits in this order; biases sorted by id
  sampling::RandomAt random;

  AS_BOTH int edits() const { return repeats + lowers + bans + biases; }
  // Whether log probabilities need sums of the unprocessed logits, because sampling uses different logits.
  AS_BOTH bool needs_both_sums() const { return top_logprobs >= 0 && (scale != 1.0f || mask >= 0 || edits() > 0); }
  // Whether more tokens may be sampled from than a CTA lists.
  AS_BOTH bool may_be_wide() const {
    return kind == sampling::SamplingKind::nucleus ||
           (kind == sampling::SamplingKind::top_k && top_k > sampling::kCandidates);
  }
  // Whether sums of the processed logits are needed; otherwise the greatest logits are enough.
  AS_BOTH bool weighs() const {
    return kind == sampling::SamplingKind::nucleus || kind == sampling::SamplingKind::all ||
           (top_logprobs >= 0 && !needs_both_sums());
  }
};

// For each chunk of a row's logits (sampling::chunk_of): the greatest logit, the sum of weights relative to it, and the
// greatest logit of each group. A large chunk has kGroups groups, others one.
constexpr int kGroups = 4;
struct ChunkSums {
  float* maxima = nullptr;  // [samples, chunks]
  double* sums = nullptr;   // [samples, chunks]
  float* groups = nullptr;  // [samples, chunks * groups_of(chunk)]
};
AS_BOTH constexpr int groups_of(int chunk) { return chunk == 256 ? kGroups : 1; }

struct SampleTask {
  float* logits = nullptr;  // [rows, width]; unchanged afterwards
  int width = 0, chunk = 0, chunks = 0;
  Argmax* argmax = nullptr;         // argmax of each row; replaced by the sampled token
  const uint32_t* masks = nullptr;  // [masks, mask_words]
  int mask_words = 0;
  const RowSample* samples = nullptr;
  Edit* edits = nullptr;
  ChunkSums raw, processed;
  float* wide = nullptr;  // [samples]: the greatest logit, if the set is wider than a CTA's list; else -infinity
  SampleOutput* outputs = nullptr;  // [samples]
};
// What some sample of a step needs.
struct SampleParts {
  bool edits = false;      // RowSample::edits()
  bool both_sums = false;  // RowSample::needs_both_sums()
  bool wide = false;       // RowSample::may_be_wide()
};
void sample_rows(const SampleTask& task, int samples, const SampleParts& parts, const Queue& queue);

}  // namespace as::cuda
