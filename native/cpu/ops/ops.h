// The interface between the op files and the runner: how ops of a program become ops that run.
#pragma once
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "batch/masks.h"
#include "cpu/adapters.h"
#include "cpu/cache.h"
#include "cpu/core.h"
#include "cpu/slot_pages.h"
#include "cpu/weights.h"
#include "program/program.h"

namespace as {

struct AttentionWork;
struct Routing;

// Cosines and sines of the rows of a step, [rows, half] each.
struct RotaryTable {
  int number = 0, half = 0;
  std::vector<float> cosine, sine;
  const float* inverse = nullptr;  // frequencies
  float attention_factor = 1;
  // The angles of a position, of a table that depends on positions alone.
  void angles(int position, float* cosine, float* sine) const;
};

// The limits of a step and of sequences.
struct RunnerLimits {
  int max_rows = 0, max_outputs = 0, max_slots = 0, max_length = 0;
  int draft_layers = 1;  // of the draft head, if there is one
};

// In the order of the program's ops.
using SlotPagesOf = std::map<const OpNode*, std::unique_ptr<SlotPages>>;

// One of the ops that are fused.
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

// The weight of a norm: 1 + w with unit_offset.
std::vector<float> norm_weight(const Part& norm);

// What an op is bound to.
struct Binding {
  const Core& core;
  std::vector<Part> parts;  // program/fusion.h
  const RunnerLimits& limits;
  const SpanCache& cache;
  Scratch& scratch;
  std::vector<std::shared_ptr<RotaryTable>>& rotary;       // of the previous ops
  std::vector<std::shared_ptr<AttentionWork>>& attention;  // of the previous layers
  const std::vector<std::shared_ptr<Routing>>& routings;   // by row set; null for sets that no router forms
  RunOutput& output;                                       // of the step
  Masks* masks;                                            // null: none
  const Adapters* adapters = nullptr;                      // null: rows have none
  float* const* states = nullptr;                          // hidden states by place (batch/draft_head.h)
  SlotPagesOf* slot_pages_of = nullptr;                    // those that forms of the program have bound
  ExpertExchange* exchange = nullptr;                      // with ranks of experts, or with the model's; null: none
  bool feeds_sum = false;  // for add: the next op that reads its sum is a sum over ranks that adds to it

  // A page for each slot, which the op has in every form of the program.
  SlotPages& slot_pages(PageBytes bytes) const {
    std::unique_ptr<SlotPages>& pages = (*slot_pages_of)[&parts[0].op];
    if (!pages) pages = std::make_unique<SlotPages>(limits.max_slots, bytes, "the state of recurrent layers");
    return *pages;
  }
  Routing& routing(int row_set) const { return *routings[row_set]; }
  // The first part of this kind, or null.
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

// The rotary table with this number among the previous ops. Throws std::invalid_argument if there is none.
std::shared_ptr<RotaryTable> rotary_table(const Binding& b, int number);

// Rotates a head by [half] cosines and sines.
using Rotation = void (*)(float* x, const float* cosine, const float* sine, int half);
Rotation rotation(const Binding& b, const OpNode& rope);

// Returns null if the op has nothing to do.
using Bind = std::unique_ptr<BoundOp> (*)(const Binding&);

template <class Type>
std::unique_ptr<BoundOp> bind_op(const Binding& b) {
  return std::make_unique<Type>(b);
}

// The bind function of a sequence of ops, or null. head_norm and rope before span_attention are ignored.
Bind cpu_op(std::vector<Op> kinds);
// Each op's file registers its bind function for the sequences of ops that it runs.
struct RegisterCpuOp {
  RegisterCpuOp(const std::vector<std::vector<Op>>& sequences, Bind bind);
};

}  // namespace as
