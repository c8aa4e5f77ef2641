// A step's draws on the device, behind the step that makes the logits.
#pragma once
#include <vector>

#include "batch/masks.h"
#include "cuda/memory/device.h"
#include "cuda/step/draw_list.h"

namespace as {
namespace cuda {

// Who draws an output: nobody, best_tokens() alone, these kernels, or the host.
enum class DrawnBy : uint8_t { nobody, best, draws, host };

class Draws {
 public:
  // logits: [max_outputs, vocab_size] on the device, and best: of each of their rows (best_tokens), which becomes what
  // is drawn. masks: null, or those that draws name. All must outlive this.
  Draws(const Device& device, float* logits, Best* best, int vocab_size, int max_outputs, Masks* masks);

  // Queues the outputs of a batch that are to be drawn here, waiting for masks while the device works. Those that only
  // the host can draw become its.
  void queue(const Batch& batch, std::vector<DrawnBy>& by);
  // Once the device has come so far: the samples.
  void take(std::vector<SampleOutput>& samples) const;

 private:
  void queue_masks(const Batch& batch, const std::vector<DrawnBy>& by);
  // Queues the copy of so many bytes of what the host has.
  void send(const Memory& host, const Memory& device, size_t bytes) const;

  const Device& device_;
  Masks* const masks_;
  DrawList list_;
  DrawTask task_;
  std::vector<int> mask_of_;  // of each output: which of the step's masks; -1: none
  Memory host_draws_, host_edits_, host_masks_, host_drawn_;
  Memory draws_, edits_, bits_, drawn_, sums_;
};

}  // namespace cuda
}  // namespace as
