// Draws on the device, with the bits of native/sampling: the same sums in the same order, from the same random numbers.
// Files that include this are compiled without contraction of products and sums.
#pragma once
#include "cuda/kernels/sampling/argmax.h"
#include "sampling/sampler_blob.h"

namespace as::cuda {

// What a processor does to a logit, and room for what the model gave.
struct Edit {
  int32_t id;
  float by, before;
};

// A row to be drawn from, or scored. Parameters are as sampler.h has them.
struct RowSample {
  int32_t row;  // of the logits
  sampling::SamplingKind kind;
  int32_t target;               // the id whose log probability is wanted instead of a draw; -1: none
  int32_t top_k, top_logprobs;  // top_logprobs: -1 if there are no log probabilities either
  int32_t deepest;              // how many steps below the best min_p's last tokens are; -1: no min_p
  float scale, top_p;           // scale: 1 / temperature
  int32_t mask;                 // which of the step's; -1: none
  int32_t end;                  // the first end-of-sequence id, which is taken if nothing else is left; -1: none
  int32_t first_edit, repeats, lowers, bans, biases;  // edits, in this order; biases by id
  sampling::RandomAt random;

  AS_BOTH int edits() const { return repeats + lowers + bans + biases; }
  // Whether log probabilities need sums of their own, as the ones of what is drawn from are others.
  AS_BOTH bool sums_apart() const { return top_logprobs >= 0 && (scale != 1.0f || mask >= 0 || edits() > 0); }
  // Whether there is use for sums of what is drawn from: others need the greatest logits alone.
  AS_BOTH bool weighs() const {
    return kind == sampling::SamplingKind::nucleus || kind == sampling::SamplingKind::all ||
           (top_logprobs >= 0 && !sums_apart());
  }
};

// Of chunks of a row's logits (sampling::chunk_of): the greatest, and the sum of weights relative to it; and the
// greatest of groups, kGroups to a chunk if it is large, else one.
constexpr int kGroups = 4;
struct ChunkSums {
  float* maxima = nullptr;  // [draws, chunks]
  double* sums = nullptr;   // [draws, chunks]
  float* groups = nullptr;  // [draws, chunks * groups_of(chunk)]
};
AS_BOTH constexpr int groups_of(int chunk) { return chunk == 256 ? kGroups : 1; }

struct SampleTask {
  float* logits = nullptr;  // [rows, width]; left as they are
  int width = 0, chunk = 0, chunks = 0;
  Argmax* best = nullptr;           // of each row of the logits; becomes what is drawn
  const uint32_t* masks = nullptr;  // [masks, mask_words]
  int mask_words = 0;
  const RowSample* draws = nullptr;
  Edit* edits = nullptr;
  ChunkSums raw, processed;
  SampleOutput* drawn = nullptr;  // [draws]
};
// edited, apart: whether any of the draws has edits, or sums_apart().
void sample_rows(const SampleTask& task, int draws, bool edited, bool apart, const Queue& queue);

}  // namespace as::cuda
