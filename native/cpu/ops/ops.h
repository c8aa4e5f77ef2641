// What each op's file defines: from ops of a program to the op that runs.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "batch/masks.h"
#include "cpu/adapters.h"
#include "cpu/cache.h"
#include "cpu/core.h"
#include "cpu/weights.h"
#include "program/program.h"

namespace as {

struct AttentionWork;
struct Routing;

// Cosines and sines of the rows of a step: [rows, half] each.
struct RotaryTable {
  int number = 0, half = 0;
  std::vector<float> cosine, sine;
};

// How much a step may have, and what sequences may reach.
struct RunnerLimits {
  int max_rows = 0, max_outputs = 0, max_slots = 0, max_length = 0;
};

// One of the ops that run together.
struct Part {
  const OpNode& op;
  const Weights& weights;
  std::vector<Tensor> inputs, outputs;

  bool is(Op kind) const { return op.is(kind); }
  const Tensor& in(int i = 0) const { return inputs[i]; }
  const Tensor& out(int i = 0) const { return outputs[i]; }
  const Packed& matrix(int i = 0) const { return weights.matrix(op.weights[i]); }
  // Null if the op has no such weight.
  const float* vector(int i = 0) const {
    return i < (int)op.weights.size() ? weights.vector(op.weights[i]).data() : nullptr;
  }
};

// The weight of a norm: with unit_offset 1 + w.
std::vector<float> norm_weight(const Part& norm);

// Where an op finds what it runs on.
struct Binding {
  const Core& core;
  std::vector<Part> parts;  // program/fusion.h
  const RunnerLimits& limits;
  const SpanCache& cache;
  Scratch& scratch;
  std::vector<std::shared_ptr<RotaryTable>>& rotary;       // of the ops before
  std::vector<std::shared_ptr<AttentionWork>>& attention;  // of the layers before
  const std::vector<std::shared_ptr<Routing>>& routings;   // by row set, null where none is formed
  RunOutput& output;                                       // the step's
  Masks* masks;                                            // null: there are none
  const Adapters* adapters = nullptr;                      // null: rows have none
  bool feeds_sum = false;  // of an add: its sum is next read by a sum over ranks that adds to it

  Routing& routing(int row_set) const { return *routings[row_set]; }
  // The first part of that kind, or null.
  const Part* part(Op kind) const {
    for (const Part& p : parts)
      if (p.is(kind)) return &p;
    return nullptr;
  }
  std::vector<Op> kinds() const {  // of the parts
    std::vector<Op> all;
    for (const Part& p : parts) all.push_back(p.op.kind());
    return all;
  }
};

// The table of that number among those of the ops before; std::invalid_argument if there is none.
std::shared_ptr<RotaryTable> rotary_table(const Binding& b, int number);

// How a rope rotates a head, by [half] cosines and sines.
using Rotation = void (*)(float* x, const float* cosine, const float* sine, int half);
Rotation rotation(const Binding& b, const OpNode& rope);

// An op, or null for one that has nothing to do.
using Bind = std::unique_ptr<BoundOp> (*)(const Binding&);

template <class Type>
std::unique_ptr<BoundOp> bind_op(const Binding& b) {
  return std::make_unique<Type>(b);
}

// How the CPU runs a sequence of ops as one; null: it does not. head_norm and rope before span_attention do not count.
Bind cpu_op(std::vector<Op> kinds);
// Each op's file registers its bind function for the sequences of ops that it runs.
struct RegisterCpuOp {
  RegisterCpuOp(const std::vector<std::vector<Op>>& sequences, Bind bind);
};

}  // namespace as
