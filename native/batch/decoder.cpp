#include "batch/decoder.h"

#include <chrono>

namespace as {

StepOutput Decoder::step(const std::string& bytes, bool want_logits) {
  const Plan plan = Plan::parse(bytes, slots_.groups());
  slots_.check(plan, drafter_ != nullptr);
  slots_.begin(plan);
  StepOutput output;
  if (!plan.saved.empty() || !plan.restored.empty()) {  // a checked plan has copies only if there is a store
    const auto began = std::chrono::steady_clock::now();
    store_->copy(plan.saved, plan.restored);
    output.copy_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  }
  if (drafter_) drafter_->draft(slots_);
  Batch& batch = slots_.batch();
  if (batch.empty()) return output;
  if (drafter_) drafter_->place(batch);
  RunOutput result = runner_.run(batch, want_logits);
  const double copy_seconds = output.copy_seconds;
  output = output_of(batch, result, slots_.accept(batch, result.samples));
  output.copy_seconds = copy_seconds;
  return output;
}

StepOutput output_of(const Batch& batch, RunOutput& result, const std::vector<Slots::Accepted>& accepted) {
  StepOutput output;
  for (const Slots::Accepted& item : accepted) {
    output.counts.push_back(item.count), output.drafted.push_back(item.drafts);
    const auto first = result.samples.begin() + item.output;
    output.samples.insert(output.samples.end(), first, first + item.count);
  }
  for (size_t i = 0; i < batch.outputs.size(); i++)
    if (batch.outputs[i].wanted == Wanted::score) output.scores.push_back(result.samples[i]);
  output.hidden = std::move(result.hidden), output.hidden_width = result.hidden_width;
  output.logits = std::move(result.logits), output.logit_width = result.logit_width;
  return output;
}

}  // namespace as
