#include "batch/decoder.h"

namespace as {

StepOutput Decoder::step(const std::string& bytes, bool want_logits) {
  const Plan plan = Plan::parse(bytes, slots_.groups());
  slots_.check(plan);
  const Batch& batch = slots_.begin(plan);
  if (batch.rows.empty()) return {};
  Drawn drawn = runner_.run(batch, want_logits);
  StepOutput output;
  for (const Slots::Accepted& item : slots_.accept(drawn.samples)) {
    output.counts.push_back(item.count);
    const auto first = drawn.samples.begin() + item.output;
    output.samples.insert(output.samples.end(), first, first + item.count);
  }
  output.logits = std::move(drawn.logits), output.logit_width = drawn.logit_width;
  return output;
}

}  // namespace as
