// Runs step plans: a rank's sequences, and the runner that computes their rows.
#pragma once
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "batch/draft_model.h"
#include "batch/slots.h"

namespace as {

// The tokens of each item that samples, one item after the other: counts[i] of them, with drafted[i] drafts tried.
// Ranks other than 0 have only the tokens.
struct StepOutput {
  std::vector<int32_t> counts, drafted;
  std::vector<SampleOutput> samples;
  std::vector<SampleOutput> scores;  // of items with kPromptLogprobs: each output that is scored, not sampled
  std::vector<float> hidden;         // [outputs of items with kHidden, hidden_width]
  int hidden_width = 0;
  std::vector<float> logits;  // [outputs, local vocabulary], on request; of rejected drafts, too
  int logit_width = 0;
  double copy_seconds = 0;  // time that the plan's copies took
};

// A rank's model on any device.
class StepModel {
 public:
  virtual ~StepModel() = default;
  // Throws std::invalid_argument, and changes nothing, if the plan does not follow the previous ones.
  virtual StepOutput step(const std::string& plan, bool want_logits) = 0;
  virtual void set_profiling(bool on) = 0;

  // For asynchronous devices: the parts of a step, so that the next step can be queued while this one is computed.
  // begin() queues a step. It returns false, and changes nothing, if the step must be begun once no other step is
  // unfinished, or run by step(). Throws as step() does.
  virtual bool begin(const std::string&) { return false; }
  // Queues sampling of the step begun last, once it is the only unfinished one. May wait for masks.
  virtual void sample() {}
  // Returns whether finish() would return without waiting.
  virtual bool done() const { return true; }
  // Returns the result of the step begun first.
  virtual StepOutput finish() { throw std::logic_error("finish() of a step that was not begun"); }
};

// The results of a batch in the form that the plan's sender reads. Moves logits and hidden states out of `result`.
StepOutput output_of(const Batch& batch, RunOutput& result, const std::vector<Slots::Accepted>& accepted);

class Decoder {
 public:
  // Runners must outlive the decoder. draft: null, or a draft model with the same vocabulary, cache groups and spans.
  // store: null, or the second tier of both caches.
  Decoder(Runner& runner, Runner* draft, SpanStore* store, SlotLimits limits);
  // Throws std::invalid_argument, and changes nothing, if the plan does not follow the previous ones.
  StepOutput step(const std::string& plan, bool want_logits);
  // Says whether an adapter is loaded, and so may be named by rows.
  void set_adapter(int index, bool loaded) { slots_.set_adapter(index, loaded); }

 private:
  Runner& runner_;
  SpanStore* store_;
  Slots slots_;
  std::optional<DraftModel> draft_;
};

}  // namespace as
