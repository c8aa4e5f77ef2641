// From step plans to tokens: a rank's sequences, and the runner that computes their rows.
#pragma once
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "batch/draft_model.h"
#include "batch/slots.h"

namespace as {

// Tokens of each item that draws: counts[i] of them, one item's after the other's, of drafted[i] drafts that were
// tried. Ranks other than 0 have the tokens alone.
struct StepOutput {
  std::vector<int32_t> counts, drafted;
  std::vector<SampleOutput> samples;
  std::vector<SampleOutput> scores;  // of items with kPromptLogprobs: of each output after which nothing is drawn
  std::vector<float> hidden;         // [outputs of items with kHidden, hidden_width]
  int hidden_width = 0;
  std::vector<float> logits;  // [outputs, local vocabulary], if wanted: of rejected drafts, too
  int logit_width = 0;
  double copy_seconds = 0;  // that the plan's copies took
};

// A rank's model, whatever device computes it.
class StepModel {
 public:
  virtual ~StepModel() = default;
  // Throws std::invalid_argument, and changes nothing, for a plan that does not follow those before it.
  virtual StepOutput step(const std::string& plan, bool want_logits) = 0;
  virtual void set_profiling(bool on) = 0;

  // Of a device that works by itself: a step in parts, so that the next one can be queued while it is computed. Queues
  // a step; false: nothing has happened, it is to be begun once there is no other one, or computed by step(). Throws as
  // step() does.
  virtual bool begin(const std::string&) { return false; }
  // Queues the draws of the step that was begun last, once there is no other one. May wait for masks.
  virtual void sample() {}
  // Whether finish() would not wait.
  virtual bool done() const { return true; }
  // What comes of the step that was begun first.
  virtual StepOutput finish() { throw std::logic_error("finish() of a step that was not begun"); }
};

// What a batch's samples are to whoever sent the plan. Takes logits and hidden states out of `drawn`.
StepOutput output_of(const Batch& batch, RunOutput& result, const std::vector<Slots::Accepted>& accepted);

class Decoder {
 public:
  // Runners must outlive the decoder. draft: null, or another model's, with the same vocabulary, cache groups and
  // spans: it makes the drafts of items that want its. store: null, or the second tier of both caches.
  Decoder(Runner& runner, Runner* draft, SpanStore* store, SlotLimits limits);
  // Throws std::invalid_argument, and changes nothing, for a plan that does not follow those before it.
  StepOutput step(const std::string& plan, bool want_logits);
  // An adapter is loaded, or no longer: rows may name it from now on, or not.
  void set_adapter(int index, bool loaded) { slots_.set_adapter(index, loaded); }

 private:
  Runner& runner_;
  SpanStore* store_;
  Slots slots_;
  std::optional<DraftModel> draft_;
};

}  // namespace as
