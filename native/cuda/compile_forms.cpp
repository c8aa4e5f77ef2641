// The two forms of a program, without ops for adapters and with them, and what launches of either compute.
#include <algorithm>

#include "cuda/runner.h"

namespace as {
namespace cuda {

std::vector<OpNode> CudaRunner::ops_of(bool adapted) const {
  std::vector<OpNode> ops = program_.ops();
  if (!adapted)
    ops.erase(std::remove_if(ops.begin(), ops.end(), [](const OpNode& op) { return op.is("lora"); }), ops.end());
  return ops;
}

void CudaRunner::bind_form(bool adapted) {
  ops_ = ops_of(adapted);
  std::vector<int> numbers, parts;  // of ops in the program; of those that the next launch computes
  for (int i = 0; i < (int)program_.ops().size(); i++)
    if (adapted || !program_.ops()[i].is("lora")) numbers.push_back(i);
  std::vector<OpTime> named;
  if (ranks_) bind_first_call();
  named.resize(launches_.size());
  for (size_t i = 0; i < ops_.size(); i++) {
    const size_t first = i, before = launches_.size();
    i += bind(i);
    parts.insert(parts.end(), numbers.begin() + first, numbers.begin() + i + 1);
    if (launches_.size() > before) name_launches(before, parts, named);
    else if (!ops_[i].is("rope") && !ops_[i].is("head_norm")) parts.clear();  // it is not computed
  }
  const Tensor logits = in(ops_.back());
  launches_.push_back([=, best = best_.as<Best>(), queue = device_.queue()](const Size& size) {
    if (size.outputs) best_tokens(logits.values(), logits.rows.width, size.outputs, best, queue);
  });
  parts = {numbers.back()};
  name_launches(named.size(), parts, named);
  times_.set(adapted, std::move(named));
  forms_[adapted] = {std::move(launches_), heads_from_};
  ops_.clear(), launches_.clear(), heads_from_ = 0;
}

// All of a linear's targets at once; perhaps with the op that gates, or the sum, that follows.
int CudaRunner::bind_lora(size_t i) {
  const OpNode& op = ops_[i];
  const int made = op.inputs[0];
  size_t end = i, last;
  while (ops_[end].is("lora") && ops_[end].inputs == op.inputs) end++;
  last = end - 1;
  const Tensor y = in(op), x = in(op, 1);
  AdaptedSums sums;
  sums.pairs = adapters_->table(), sums.targets = adapters_->targets(), sums.adapter_count = adapters_->limits.count;
  sums.adapters = data_->adapters(), sums.chosen = y.row_set == kOutputRows ? data_->chosen() : nullptr;
  sums.halves = adapters_->limits.halves, sums.type = half_, sums.max_rank = adapters_->limits.max_rank,
  sums.inner = inner_.as<float>();
  sums.x = x.rows, sums.y = y.values(), sums.width = y.rows.width;
  const auto is_part = [](const OpNode& lora, int offset, int columns) {
    return lora.integer("offset") == offset && lora.integer("columns") == columns;
  };
  const std::optional<size_t> sum = sum_at(end + (!ranks_ && ops_[end].is("all_reduce")), made);
  if (const auto pairs = pairs_.find(made); pairs != pairs_.end()) {
    const int half = sums.half = y.rows.width / 2;
    sums.width = paired_rows(y.rows.width);
    if (sums.halves && ops_[end].is("silu_mul") && last == i + 1 && half % 8 == 0 && is_part(op, 0, half) &&
        is_part(ops_[last], half, half))
      last = end, sums.gated = out(ops_[end]).rows, sums.bias = pairs->second.bias;
  } else if (sums.halves && sum && last == i && is_part(op, 0, y.rows.width)) {
    last = *sum, sums.added = in(ops_[*sum]).values();
  }
  for (size_t next = i; next < end; sums.count = 0) {
    for (; next < end && sums.count < kMostTargets; next++)
      sums.columns[sums.count++] = {ops_[next].integer("target"), ops_[next].integer("offset"),
                                    ops_[next].integer("columns")};
    launches_.push_back([=, queue = device_.queue()](const Size& size) {
      if (const int rows = count(y, size)) add_low_rank(sums, rows, queue);
    });
  }
  return (int)(last - i);
}

// What launches from `first` on compute together, for the profile; clears `parts`.
void CudaRunner::name_launches(size_t first, std::vector<int>& parts, std::vector<OpTime>& named) const {
  OpTime made;
  for (int part : parts) {
    const OpNode& op = program_.ops()[part];
    if (op.is("all_reduce") && !ranks_) continue;
    made.op.parts.push_back(part);
    made.op.name += (made.op.name.empty() ? "" : "+") + std::string(op.spec->name);
    if (op.is("span_attention")) made.layer = &layers_[op.integer("layer")];
  }
  made.launches = (int)(launches_.size() - first);
  named.resize(first, OpTime{});
  named.push_back(std::move(made));
  named.resize(launches_.size(), OpTime{});
  parts.clear();
}

}  // namespace cuda
}  // namespace as
