#include "bindings/step_result.h"

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

namespace as {
namespace {

// The most probable ids of some samples, and their log probabilities: [n, 20] each.
std::pair<py::array_t<int32_t>, py::array_t<float>> tops_of(const std::vector<SampleOutput>& samples) {
  const py::ssize_t n = (py::ssize_t)samples.size(), width = kMaxTopLogprobs;
  py::array_t<int32_t> ids({n, width});
  py::array_t<float> values({n, width});
  for (py::ssize_t i = 0; i < n; i++) {
    std::copy_n(samples[i].top_ids, width, ids.mutable_data() + i * width);
    std::copy_n(samples[i].top_logprobs, width, values.mutable_data() + i * width);
  }
  return {std::move(ids), std::move(values)};
}

// An array [rows, width] of these values, which are not copied: the rows of an image may be large.
py::array_t<float> rows_of(std::vector<float> values, py::ssize_t width) {
  const auto kept = new std::vector<float>(std::move(values));
  const py::capsule owner(kept, [](void* p) { delete static_cast<std::vector<float>*>(p); });
  return py::array_t<float>({(py::ssize_t)kept->size() / width, width}, kept->data(), owner);
}

}  // namespace

StepResult to_result(StepOutput out, bool want_logits) {
  const py::ssize_t n = (py::ssize_t)out.samples.size();
  StepResult r;
  r.copy_seconds = out.copy_seconds;
  r.counts = py::array_t<int32_t>(out.counts.size(), out.counts.data());
  r.drafted = py::array_t<int32_t>(out.drafted.size(), out.drafted.data());
  r.tokens = py::array_t<int32_t>(n), r.status = py::array_t<int32_t>(n), r.logprobs = py::array_t<float>(n);
  std::tie(r.top_ids, r.top_logprobs) = tops_of(out.samples);
  int32_t *tokens = r.tokens.mutable_data(), *status = r.status.mutable_data();
  float* logprobs = r.logprobs.mutable_data();
  for (py::ssize_t i = 0; i < n; i++) {
    const SampleOutput& s = out.samples[i];
    tokens[i] = s.token, status[i] = (int32_t)s.status, logprobs[i] = s.logprob;
  }
  r.prompt_logprobs = r.prompt_top_ids = r.prompt_top_logprobs = r.hidden = r.logits = py::none();
  if (!out.scores.empty()) {
    py::array_t<float> values((py::ssize_t)out.scores.size());
    for (size_t i = 0; i < out.scores.size(); i++)
      values.mutable_data()[i] = out.scores[i].status == SampleStatus::kOk ? out.scores[i].logprob : NAN;
    std::tie(r.prompt_top_ids, r.prompt_top_logprobs) = tops_of(out.scores);
    r.prompt_logprobs = std::move(values);
  }
  if (!out.hidden.empty()) { r.hidden = rows_of(std::move(out.hidden), out.hidden_width); }
  if (want_logits) { r.logits = rows_of(std::move(out.logits), std::max(out.logit_width, 1)); }
  return r;
}

}  // namespace as
