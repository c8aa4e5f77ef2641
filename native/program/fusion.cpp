#include "program/fusion.h"

#include <algorithm>
#include <cstring>

namespace as {
namespace {

bool is(const OpNode& op, const char* name) { return !std::strcmp(op.spec->name, name); }

bool has(const std::vector<int>& list, int tensor) { return std::find(list.begin(), list.end(), tensor) != list.end(); }

double moved(const Program& p, const std::vector<int>& tensors, const StepSize& size) {
  double bytes = 0;
  for (int t : tensors) bytes += 4 * p.rows_of(p.tensors()[t].rows, size) * p.tensors()[t].width;
  return bytes;
}

// A sum is written all the same, but not read again.
Cost cost_add_rms_norm(const Program& p, const OpNode& op, const StepSize& size) {
  const TensorSpec& x = p.in(op);
  return {moved(p, op.inputs, size) + moved(p, op.outputs, size), 5 * p.rows_of(x.rows, size) * x.width};
}

// Gate and up are neither.
Cost cost_linear_silu_mul(const Program& p, const OpNode& op, const StepSize& size) {
  const TensorSpec& y = p.out(op);
  const WeightSpec& m = p.weights()[op.weights[0]];
  const double bytes = size.weight_bytes.empty() ? m.bytes() : size.weight_bytes.at(op.weights[0]);
  return {moved(p, op.inputs, size) + moved(p, op.outputs, size) + bytes,
          (4.0 * m.k + 5) * p.rows_of(y.rows, size) * y.width};
}

// Made by fuse() alone: no graph holds them.
const OpSpec& add_rms_norm() {
  static const OpSpec spec{
      "add+rms_norm", {2, 2},           {2, 2}, {1, 1}, true, RowRule::as_input, op_spec("rms_norm").attributes,
      nullptr,        cost_add_rms_norm};
  return spec;
}
const OpSpec& linear_silu_mul() {
  static const OpSpec spec{"linear+silu_mul",   {1, 1}, {1, 1}, {1, 2}, false, RowRule::as_input, {}, nullptr,
                           cost_linear_silu_mul};
  return spec;
}

// Whether ops[reader] alone reads what ops[writer] before it writes to a tensor.
bool reads_alone(const std::vector<OpNode>& ops, size_t writer, size_t reader, int tensor) {
  for (size_t i = writer + 1; i < ops.size(); i++) {
    if (i != reader && has(ops[i].inputs, tensor)) return false;
    if (i >= reader && has(ops[i].outputs, tensor)) return true;
  }
  return true;
}

}  // namespace

std::vector<FusedOp> fuse(const Program& program, const std::function<bool(const OpNode&)>& gates) {
  const std::vector<OpNode>& ops = program.ops();
  std::vector<FusedOp> fused;
  for (size_t i = 0; i < ops.size(); i++) {
    const OpNode &op = ops[i], *next = i + 1 < ops.size() ? &ops[i + 1] : nullptr;
    const bool feeds_next = next && !op.outputs.empty() && has(next->inputs, op.outputs[0]);
    if (feeds_next && is(op, "add") && is(*next, "rms_norm") && next->outputs[0] != op.inputs[1]) {
      OpNode both{&add_rms_norm(), op.inputs, {op.outputs[0], next->outputs[0]}, next->weights, next->values};
      fused.push_back({std::move(both), (int)i++, 2});
    } else if (feeds_next && is(op, "linear") && is(*next, "silu_mul") && gates(op) &&
               reads_alone(ops, i, i + 1, op.outputs[0])) {
      fused.push_back({{&linear_silu_mul(), op.inputs, next->outputs, op.weights, {}}, (int)i, 2});
      i++;
    } else {
      fused.push_back({op, (int)i, 1});
    }
  }
  return fused;
}

const OpNode* only_reader(const std::vector<FusedOp>& ops, size_t writer, int tensor) {
  const OpNode* reader = nullptr;
  for (size_t i = writer + 1; i < ops.size(); i++) {
    const OpNode& op = ops[i].op;
    if (has(op.inputs, tensor)) {
      if (reader || !(is(op, "linear") || is(op, "linear+silu_mul"))) return nullptr;
      reader = &op;
    }
    if (has(op.outputs, tensor)) break;
  }
  return reader;
}

}  // namespace as
