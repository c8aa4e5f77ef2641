#include "program/fusion.h"

#include <algorithm>

namespace as {
namespace {

class Fusion {
 public:
  Fusion(const Program& program, bool alone, bool adapters, const std::function<bool(const OpNode&)>& gates)
      : ops_(program.ops()), gates_(gates) {
    for (int i = 0; i < (int)ops_.size(); i++)
      if (!(alone && ops_[i].is(Op::all_reduce)) && !(!adapters && ops_[i].adapts())) order_.push_back(i);
  }

  std::vector<FusedOp> run() {
    std::vector<FusedOp> fused;
    for (size_t i = 0; i < order_.size();) {
      size_t count = attention(i);
      if (!count) count = linear(i);
      if (!count) count = experts(i);
      if (!count) count = sum(i);
      if (!count) count = loras(i);
      FusedOp op;
      for (size_t end = i + std::max<size_t>(count, 1); i < end; i++) {
        op.parts.push_back(order_[i]);
        op.name += (op.name.empty() ? "" : "+") + std::string(ops_[order_[i]].spec->name);
      }
      fused.push_back(std::move(op));
    }
    return fused;
  }

 private:
  bool is_at(size_t i, Op op) const { return i < order_.size() && ops_[order_[i]].is(op); }
  const OpNode& at(size_t i) const { return ops_[order_[i]]; }

  // Whether op `reader` alone reads the values that op `writer` writes to a tensor.
  bool reads_alone(size_t writer, size_t reader, int tensor) const {
    if (!has(at(reader).inputs, tensor)) return false;
    for (size_t i = writer + 1; i < order_.size(); i++) {
      if (i != reader && has(at(i).inputs, tensor)) return false;
      if (i >= reader && has(at(i).outputs, tensor)) return true;
    }
    return true;
  }

  // The number of ops from i on that fuse; 0: no such fusion begins here.
  size_t attention(size_t i) const {
    size_t end = i;
    const auto in_place = [&] { return at(end).inputs == at(i).inputs; };
    while ((is_at(end, Op::head_norm) || is_at(end, Op::rope)) && in_place()) end++;
    if (end == i || !is_at(end, Op::span_attention) || !in_place()) return 0;
    return reads_alone(end - 1, end, at(i).inputs[0]) ? end + 1 - i : 0;
  }

  size_t linear(size_t i) const {
    size_t end = i;
    if (is_at(i, Op::rms_norm) && is_at(i + 1, Op::linear) && reads_alone(i, i + 1, at(i).outputs[0])) end++;
    if (!is_at(end, Op::linear)) return 0;
    const OpNode& op = at(end);
    const int out = op.outputs[0];
    if (is_at(end + 1, Op::silu_mul) && reads_alone(end, end + 1, out) && gates_(op)) return end + 2 - i;
    // Not if a norm is fused before it: the linear would read what other threads add to.
    const bool adds =
        end == i && is_at(end + 1, Op::add) && at(end + 1).inputs[1] == out && !has(op.inputs, at(end + 1).inputs[0]);
    return end + 1 - i + (adds && reads_alone(end, end + 1, out));
  }

  size_t experts(size_t i) const {
    const bool gated = is_at(i, Op::expert_linear) && is_at(i + 1, Op::silu_mul) &&
                       reads_alone(i, i + 1, at(i).outputs[0]) && gates_(at(i));
    return gated ? 2 : 0;
  }

  size_t sum(size_t i) const {
    size_t end = i;
    if (is_at(i, Op::all_reduce) && is_at(i + 1, Op::add) && at(i + 1).inputs[1] == at(i).inputs[0]) end++;
    if (!is_at(end, Op::add)) return 0;
    const OpNode& add = at(end);
    if (is_at(end + 1, Op::rms_norm) && at(end + 1).inputs[0] == add.inputs[0] &&
        at(end + 1).outputs[0] != add.inputs[1])
      end++;
    return end + 1 - i;
  }

  // Consecutive lora ops of the same linear.
  size_t loras(size_t i) const {
    size_t end = i;
    while (is_at(end, Op::lora) && at(end).inputs == at(i).inputs) end++;
    return end - i;
  }

  const std::vector<OpNode>& ops_;
  const std::function<bool(const OpNode&)>& gates_;
  std::vector<int> order_;
};

}  // namespace

std::vector<FusedOp> fuse(const Program& program, bool alone, bool adapters,
                          const std::function<bool(const OpNode&)>& gates) {
  return Fusion(program, alone, adapters, gates).run();
}

std::vector<FusedOp> one_by_one(const Program& program, bool adapters) {
  std::vector<FusedOp> ops;
  for (int i = 0; i < (int)program.ops().size(); i++)
    if (adapters || !program.ops()[i].adapts()) ops.push_back({{i}, program.ops()[i].spec->name});
  return ops;
}

const OpNode* only_linear(const Program& program, const std::vector<FusedOp>& ops, size_t op, int tensor) {
  const OpNode* reader = nullptr;
  const bool experts = program.ops()[ops[op].parts[0]].is(Op::expert_linear);  // its rows are sorted like the reader's
  for (size_t i = op + 1; i < ops.size(); i++)
    for (size_t p = 0; p < ops[i].parts.size(); p++) {
      const OpNode& part = program.ops()[ops[i].parts[p]];
      if (has(part.inputs, tensor)) {
        if (reader || p || !(part.is(Op::linear) || (experts && part.is(Op::expert_linear)))) return nullptr;
        reader = &part;
      }
      if (has(part.outputs, tensor)) return reader;
    }
  return reader;
}

std::vector<bool> never_written(const Program& program, const std::vector<FusedOp>& ops) {
  std::vector<bool> seen(program.tensors().size());
  for (const FusedOp& op : ops)
    for (size_t p = 0; p < op.parts.size(); p++) {
      const OpNode& part = program.ops()[op.parts[p]];
      const bool gate = p && part.is(Op::silu_mul),
                 gated = p + 1 < op.parts.size() && program.ops()[op.parts[p + 1]].is(Op::silu_mul);
      for (int t : part.inputs) seen[t] = seen[t] || !gate;
      for (int t : part.outputs) seen[t] = seen[t] || !gated;
    }
  seen.flip();
  return seen;
}

bool feeds_sum(const Program& program, const std::vector<FusedOp>& ops, size_t op, int tensor) {
  for (size_t i = op + 1; i < ops.size(); i++) {
    const OpNode &first = program.ops()[ops[i].parts[0]], &last = program.ops()[ops[i].parts.back()];
    for (int p : ops[i].parts) {
      if (!has(program.ops()[p].inputs, tensor)) continue;
      return first.is(Op::all_reduce) && ops[i].parts.size() > 1 && program.ops()[ops[i].parts[1]].is(Op::add) &&
             program.ops()[ops[i].parts[1]].inputs[0] == tensor && (last.is(Op::add) || last.is(Op::rms_norm));
    }
    for (int p : ops[i].parts)
      if (has(program.ops()[p].outputs, tensor)) return false;
  }
  return false;
}

Cost cost_of(const Program& program, const FusedOp& op, const StepSize& size) {
  Cost total;
  for (size_t p = 0; p < op.parts.size(); p++) {
    const OpNode& part = program.ops()[op.parts[p]];
    const Cost own = program.cost(part, size);
    const bool of_heads = part.is(Op::head_norm) || part.is(Op::rope);  // on copies of the heads, if attention follows
    total.bytes += of_heads && op.parts.size() > 1 ? 0 : own.bytes, total.operations += own.operations;
    if (!p || of_heads || part.is(Op::span_attention)) continue;
    // A fused part does not read the previous part's output again. If it is the only reader, the output is not even
    // written.
    const OpNode& before = program.ops()[op.parts[p - 1]];
    for (int t : part.inputs) {
      if (!has(before.outputs, t)) continue;
      const bool kept = before.is(Op::add) || before.is(Op::all_reduce);
      total.bytes -= (kept ? 1 : 2) * 4 * program.rows_of(program.tensors()[t].rows, size) * program.tensors()[t].width;
    }
  }
  return total;
}

}  // namespace as
