// What ranks exchange to sample. Each has the logits of its part of the vocabulary.
//
// The samples of a step are dealt to the ranks in turn. Every rank pushes its part of a row of logits to the rank that
// samples from it. That one has then the whole row, so it runs the kernels that a single GPU runs, and the bits are the
// same for any number of ranks. It pushes what it sampled to all ranks.
#pragma once
#include "cuda/kernels/comm/sum_ranks.h"
#include "cuda/kernels/sampling/sample.h"

namespace as::cuda {

// A sample of the step.
struct DealtSample {
  int32_t row;      // of this rank's logits, and of the argmaxes
  int32_t mask;     // the index of its mask on rank 0; -1: none
  int32_t samples;  // 0: the row's token is only scored
};

// Memory of all ranks' GPUs, after what sums use. outputs: the most of a step; vocab: the size of the vocabulary.
struct RankSamples {
  Peers peers;
  int outputs = 0, vocab = 0;
  int begin = 0, width = 0;  // this rank's part of the vocabulary
  char* memory[kMaxRanks] = {};
  char* staged = nullptr;  // by host memory: this rank's logits and masks in its GPU's memory, before they are sampled

  // Sample j of a step belongs to rank j % world, as its number j / world.
  AS_BOTH int owner(int j) const { return j % peers.world; }
  AS_BOTH int own(int samples) const { return (samples + peers.world - 1 - peers.rank) / peers.world; }
  AS_BOTH int most() const { return (outputs + peers.world - 1) / peers.world; }  // samples of a rank
  AS_BOTH int mask_words() const { return (vocab + 31) / 32; }

  // On each rank: words of each rank's argmaxes, for even and odd steps; rows of logits and masks of the samples that
  // belong to it; all samples.
  AS_BOTH uint2* argmaxes(int on, int of, uint32_t step) const {
    return reinterpret_cast<uint2*>(memory[on]) + (step % 2 * peers.world + of) * (size_t)outputs * kArgmaxWords;
  }
  AS_BOTH float* logits(int on) const { return reinterpret_cast<float*>(memory[on] + argmax_bytes()); }
  AS_BOTH uint32_t* masks(int on) const {
    return reinterpret_cast<uint32_t*>(memory[on] + argmax_bytes() + logit_bytes());
  }
  AS_BOTH SampleOutput* samples(int on) const {
    return reinterpret_cast<SampleOutput*>(memory[on] + argmax_bytes() + logit_bytes() + mask_bytes());
  }
  AS_BOTH size_t bytes() const {
    return vocab ? argmax_bytes() + logit_bytes() + mask_bytes() + round_up_256(outputs * sizeof(SampleOutput)) : 0;
  }
  // Where this rank's kernels read the logits and masks of its samples.
  float* own_logits() const { return staged ? reinterpret_cast<float*>(staged) : logits(peers.rank); }
  uint32_t* own_masks() const {
    return staged ? reinterpret_cast<uint32_t*>(staged + logit_bytes()) : masks(peers.rank);
  }
  size_t staged_bytes() const { return vocab ? logit_bytes() + mask_bytes() : 0; }
  // For each rank: the last round whose logits, or samples, it has pushed to rank `on`.
  AS_BOTH uint32_t* arrived(int on, PeerWait what) const { return peers.flags[on] + (1 + (int)what) * 2 * kMaxRanks; }
  // How many CTAs of this rank have pushed logits; zero between launches.
  AS_BOTH uint32_t* pushed() const { return peers.own() + 16 * kMaxRanks; }

  static constexpr int kArgmaxWords = 3;  // of an Argmax: a value each, and a number of its step

 private:
  AS_BOTH size_t argmax_bytes() const { return round_up_256(2 * (size_t)peers.world * outputs * kArgmaxWords * 8); }
  AS_BOTH size_t logit_bytes() const { return round_up_256((size_t)most() * vocab * sizeof(float)); }
  AS_BOTH size_t mask_bytes() const { return round_up_256((size_t)most() * mask_words() * sizeof(uint32_t)); }
};

// Replaces the argmaxes [rows, kArgmaxParts] of this rank's part of the vocabulary by those of all ranks' parts: part r
// is rank r's, with ids of the whole vocabulary. Every step that computes logits calls it once, on all ranks.
void agree_argmaxes(const RankSamples& ranks, Argmax* best, int rows, const Queue& queue);

// A round: all ranks call these in this order, with the same samples. round: 1, 2, ...
// Pushes this rank's part of `logits` [rows, width] to the owners of the samples; rank 0 also pushes their masks.
void push_logits(const RankSamples& ranks, const float* logits, const uint32_t* masks, const DealtSample* samples,
                 int count, uint32_t round, const Queue& queue);
// Waits until all logits of the samples that belong to this rank are there. If one is missing, its samples are none.
void await_logits(const RankSamples& ranks, const DealtSample* samples, int count, Argmax* argmax, uint32_t round,
                  const Queue& queue);
// Pushes what this rank has sampled to all ranks, waits for what they have sampled, and replaces the argmaxes.
void exchange_samples(const RankSamples& ranks, const SampleOutput* own, const DealtSample* samples, int count,
                      Argmax* argmax, uint32_t round, const Queue& queue);

}  // namespace as::cuda
