// A step's results for Python.
#pragma once
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include "batch/decoder.h"

namespace as {

namespace py = pybind11;

// A step's results: arrays over the sampled tokens.
struct StepResult {
  py::array_t<int32_t> counts, drafted, tokens, status, top_ids;
  py::array_t<float> logprobs, top_logprobs;
  double copy_seconds = 0;
  py::object prompt_logprobs, prompt_top_ids, prompt_top_logprobs, hidden, logits;
};

StepResult to_result(StepOutput out, bool want_logits);

}  // namespace as
