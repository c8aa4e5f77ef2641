#include "batch/decoder.h"

#include <chrono>

namespace as {

StepOutput Decoder::step(std::string_view bytes, bool want_logits) {
  Plan plan = Plan::parse(bytes, slots_.groups());
  if (plan.to) return step_part(plan);
  next_part_ = 0;
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

StepOutput Decoder::step_part(Plan& plan) {
  if (drafter_) throw std::invalid_argument("step plan: a step with drafts does not run in parts");
  check_part(plan, next_part_, runner_.positions());
  next_part_ = 0;
  if (!plan.from) {
    slots_.check(plan, false);
    for (GivenRows& given : plan.given) given.keep();  // for the parts that follow
    slots_.begin(plan);
    batch_ = &slots_.batch();
  }
  RunOutput result = runner_.run_part(*batch_, plan.from, plan.to);
  if (plan.to < runner_.positions()) {
    next_part_ = plan.to;
    return {};
  }
  return output_of(*batch_, result, slots_.accept(*batch_, result.samples));
}

void check_part(const Plan& plan, int next, int positions) {
  if ((plan.from && plan.from != next) || plan.to > positions)
    throw std::invalid_argument("step plan: a part from " + std::to_string(plan.from) + " to " +
                                std::to_string(plan.to) + " of " + std::to_string(positions) + ", expected " +
                                (next ? "one from " + std::to_string(next) : "a first part"));
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
