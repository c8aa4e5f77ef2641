#include "batch/queued_decoder.h"

#include <algorithm>
#include <stdexcept>

namespace as {
namespace {

bool has_drafts(const Plan& plan) {
  return std::any_of(plan.work.begin(), plan.work.end(), [](const Work& w) { return w.drafts > 0; });
}

bool has_drafts(const Batch& batch) {
  return std::any_of(batch.items.begin(), batch.items.end(), [](const Item& item) { return item.drafts > 0; });
}

}  // namespace

RunOutput DraftRunner::run(const Batch& batch, bool want_logits) {
  constexpr int kMostQueued = 2;  // runs whose rows the runner holds
  if (queued_ == kMostQueued) runner_.finish({}), queued_ = 0;
  runner_.begin(batch, want_logits);
  runner_.sample(batch);
  if (batch.outputs.empty()) return queued_++, RunOutput{};
  queued_ = 0;
  return runner_.finish(batch);
}

StepOutput QueuedDecoder::step(std::string_view plan, bool want_logits) {
  if (!begin(plan, want_logits)) throw std::logic_error("step() while another step is not finished");
  sample();
  return finish();
}

bool QueuedDecoder::begin(std::string_view bytes, bool want_logits) {
  const bool first = steps_.empty();
  if (steps_.size() > 1 || (!first && !steps_.back().foretold)) return false;
  Plan plan = Plan::parse(bytes, slots_.groups());
  if (plan.to) return first && begin_part(plan);
  if (!first && has_drafts(plan)) return false;  // drafts follow the tokens that the current step samples
  try {
    slots_.check(plan, drafter_ != nullptr);
  } catch (const std::invalid_argument&) {
    if (first) throw;
    return false;  // the error is raised when the plan is submitted again
  }
  slots_.begin(plan);
  next_part_ = 0;
  const bool copies = !plan.saved.empty() || !plan.restored.empty();
  if (copies) store_->copy(plan.saved, plan.restored);
  if (drafter_) drafter_->draft(slots_);
  steps_.push_back({slots_.batch(), copies});
  if (drafter_) drafter_->place(steps_.back().batch);
  if (!steps_.back().batch.empty()) runner_.begin(steps_.back().batch, want_logits);
  return true;
}

bool QueuedDecoder::begin_part(Plan& plan) {
  if (drafter_) throw std::invalid_argument("step plan: a step with drafts does not run in parts");
  check_part(plan, next_part_, runner_.positions());
  next_part_ = 0;
  if (!plan.from) {
    slots_.check(plan, false);
    slots_.begin(plan);
    batch_ = slots_.batch();
  }
  runner_.begin_part(batch_, plan.from, plan.to);
  const bool last = plan.to == runner_.positions();
  steps_.push_back({last ? batch_ : Batch{}, false, false, true});
  next_part_ = last ? 0 : plan.to;
  return true;
}

void QueuedDecoder::sample() {
  Step& step = steps_.back();
  if (step.runs() && !runner_.sample(step.batch)) return;
  if (has_drafts(step.batch)) return;
  slots_.foretell(step.batch);
  step.foretold = true;
}

StepOutput QueuedDecoder::finish() {
  if (steps_.empty()) throw std::logic_error("finish() of a step that was not begun");
  const Step step = std::move(steps_.front());
  steps_.pop_front();
  StepOutput output;
  if (step.runs()) {
    RunOutput result = runner_.finish(step.batch);
    output = output_of(step.batch, result, slots_.accept(step.batch, result.samples, step.foretold));
  }
  if (step.copies) output.copy_seconds = store_->finish();
  return output;
}

}  // namespace as
