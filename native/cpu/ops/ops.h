// What each op's file defines: from an op of a program to the op that runs.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "cpu/cache.h"
#include "cpu/core.h"
#include "cpu/weights.h"
#include "program/program.h"

namespace as {

struct AttentionWork;

// Cosines and sines of the rows of a step: [rows, half] each.
struct RotaryTable {
  int half = 0;
  std::vector<float> cosine, sine;
};

// How much a step may have, and what sequences may reach.
struct RunnerLimits {
  int max_rows = 0, max_outputs = 0, max_slots = 0, max_length = 0;
};

// Where an op finds what it runs on.
struct Binding {
  const Core& core;
  const Program& program;
  const OpNode& op;
  const std::vector<Tensor> inputs, outputs;
  const Weights& weights;
  const RunnerLimits& limits;
  const SpanCache& cache;
  const Buffer& scratch;                                   // for prepared rows, by one product at a time
  std::vector<std::shared_ptr<RotaryTable>>& rotary;       // of the ops before
  std::vector<std::shared_ptr<AttentionWork>>& attention;  // of the layers before
  Drawn& drawn;                                            // the step's

  const Tensor& in(int i = 0) const { return inputs[i]; }
  const Tensor& out(int i = 0) const { return outputs[i]; }
  const Packed& matrix(int i = 0) const { return weights.matrix(op.weights[i]); }
  // Null if the op has no such weight.
  const float* vector(int i = 0) const {
    return i < (int)op.weights.size() ? weights.vector(op.weights[i]).data() : nullptr;
  }
};

using Bind = std::unique_ptr<BoundOp> (*)(const Binding&);

// The CPU's ops by name; null: it has none of this name.
Bind cpu_op(const std::string& name);

}  // namespace as
