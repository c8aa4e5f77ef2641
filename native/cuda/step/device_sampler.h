// Samples a step's outputs on the device, in stream order after the step that computes the logits. Several ranks deal
// the outputs among themselves (kernels/comm/sample_ranks.h).
#pragma once
#include <optional>
#include <vector>

#include "batch/masks.h"
#include "cuda/kernels/comm/sample_ranks.h"
#include "cuda/memory/device.h"
#include "cuda/step/sample_list.h"

namespace as::cuda {

// How an output is sampled: not at all, by argmax() alone, by these kernels, or on the host.
enum class SampledBy : uint8_t { nobody, argmax, device, host };

class DeviceSampler {
 public:
  // logits [max_outputs, width] and argmax, their rows' argmax, are on the device. A row's sample replaces its argmax.
  // ranks: null if there is one rank, whose width is the size of the vocabulary. Otherwise the argmaxes are those of
  // all ranks, and all ranks queue the same batches. masks: null, or the masks that outputs refer to; of several ranks,
  // only rank 0 reads them. All must outlive this.
  DeviceSampler(const Device& device, float* logits, Argmax* argmax, int width, int max_outputs, Masks* masks,
                const RankSamples* ranks);
  ~DeviceSampler();
  DeviceSampler(const DeviceSampler&) = delete;
  DeviceSampler& operator=(const DeviceSampler&) = delete;

  // Queues the samples of a batch that `by` assigns to these kernels. Waits for masks while the device computes.
  // Reassigns samples that only the host can compute to the host.
  void queue(const Batch& batch, std::vector<SampledBy>& by);
  // Runs all kernels once, which loads them.
  void warm_up();
  // Reads the samples after the device has computed them.
  void take(std::vector<SampleOutput>& samples) const;

 private:
  void queue_masks(const Batch& batch, const std::vector<SampledBy>& by);
  void queue_dealt(int count);
  void fetch_logits(int own, bool masked) const;
  bool reads_masks() const { return masks_ && (!ranks_ || ranks_->peers.rank == 0); }
  // Queues a copy to the device. It does not wait for the step that computes the logits; await_copies() lets the
  // kernels that are queued next wait for the copies so far.
  void send(const Memory& host, const Memory& device, size_t bytes) const;
  void await_copies() const;

  const Device& device_;
  cudaStream_t copies_ = nullptr;
  cudaEvent_t copied_ = nullptr;
  Masks* const masks_;
  const std::optional<RankSamples> ranks_;
  uint32_t rounds_ = 0;  // that ranks have sampled together
  float* const logits_;  // of this rank's part of the vocabulary
  SampleList list_;
  SampleTask task_;
  std::vector<int> mask_of_;  // of each output: the index of its mask in the step; -1: none
  Memory host_samples_, host_edits_, host_masks_, host_outputs_, host_dealt_;
  Memory samples_, edits_, bits_, outputs_, dealt_, sums_;
};

}  // namespace as::cuda
