// From step plans to tokens: a rank's sequences, and the runner that computes their rows.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "batch/slots.h"

namespace as {

// Tokens of each item that draws: counts[i] of them, one item's after the other's. Ranks other than 0 have the tokens
// alone.
struct StepOutput {
  std::vector<int32_t> counts;
  std::vector<SampleOutput> samples;
  std::vector<float> logits;  // [outputs, local vocabulary], if wanted: of rejected drafts, too
  int logit_width = 0;
};

class Decoder {
 public:
  // The runner must outlive the decoder.
  Decoder(Runner& runner, SlotLimits limits) : runner_(runner), slots_(std::move(limits)) {}
  // Throws std::invalid_argument, and changes nothing, for a plan that does not follow those before it.
  StepOutput step(const std::string& plan, bool want_logits);

 private:
  Runner& runner_;
  Slots slots_;
};

}  // namespace as
