// Runs step plans: a rank's sequences, and the runner that computes their rows.
#pragma once
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "batch/drafter.h"
#include "batch/slots.h"

namespace as {

// The tokens of all items that sample, item by item: item i has counts[i] tokens and verified drafted[i] drafts. Ranks
// other than 0 have only the tokens.
struct StepOutput {
  std::vector<int32_t> counts, drafted;
  std::vector<SampleOutput> samples;
  std::vector<SampleOutput> scores;  // of items with kPromptLogprobs: the outputs that are scored, not sampled
  std::vector<float> hidden;         // [outputs of items with kHidden, hidden_width]
  int hidden_width = 0;
  std::vector<float> logits;  // [outputs, local vocabulary], on request; includes rejected drafts
  int logit_width = 0;
  double copy_seconds = 0;  // time that the plan's copies took
};

// A rank's model on any device.
class StepModel {
 public:
  virtual ~StepModel() = default;
  // Throws std::invalid_argument, and changes nothing, if the plan does not follow the previous ones.
  virtual StepOutput step(std::string_view plan, bool want_logits) = 0;
  virtual void set_profiling(bool on) = 0;

  // For asynchronous devices: a step in parts, so that the next step can be queued while this one is computed. begin()
  // queues a step. It returns false, and changes nothing, if the caller must retry when no other step is unfinished, or
  // must use step(). Throws as step() does.
  virtual bool begin(std::string_view) { return false; }
  // Queues the sampling of the latest step. No other step may be unfinished. May wait for masks.
  virtual void sample() {}
  // Returns whether finish() would return without waiting.
  virtual bool done() const { return true; }
  // Returns the result of the oldest step.
  virtual StepOutput finish() { throw std::logic_error("finish() of a step that was not begun"); }
};

// Throws std::invalid_argument unless the plan's part is the first of a step or begins at position `next`, of a program
// with so many positions.
void check_part(const Plan& plan, int next, int positions);

// Converts a batch's results to what the plan's sender reads. Moves logits and hidden states out of `result`.
StepOutput output_of(const Batch& batch, RunOutput& result, const std::vector<Slots::Accepted>& accepted);

class Decoder {
 public:
  // The runner must outlive the decoder. drafter: null, or that of a model with the same vocabulary, cache groups and
  // spans. store: null, or the second tier of both caches.
  Decoder(Runner& runner, std::unique_ptr<Drafter> drafter, SpanStore* store, SlotLimits limits)
      : runner_(runner), store_(store), slots_(std::move(limits)), drafter_(std::move(drafter)) {}
  // Throws std::invalid_argument, and changes nothing, if the plan does not follow the previous ones.
  StepOutput step(std::string_view plan, bool want_logits);
  // Sets whether an adapter is loaded. Rows may use loaded adapters only.
  void set_adapter(int index, bool loaded) { slots_.set_adapter(index, loaded); }

 private:
  StepOutput step_part(Plan& plan);

  Runner& runner_;
  SpanStore* store_;
  Slots slots_;
  const std::unique_ptr<Drafter> drafter_;
  // Of a step that runs in parts: its batch, and where the next one begins; 0: none is under way.
  const Batch* batch_ = nullptr;
  int next_part_ = 0;
};

}  // namespace as
