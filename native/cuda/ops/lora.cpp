#include <optional>

#include "cuda/kernels/lora/lora.h"
#include "cuda/ops/fusion.h"

namespace as::cuda {
namespace {

// Computes all targets of a linear at once, and the activation or the add that follows, if possible.
int bind_lora(Binding& b, size_t i) {
  const OpNode& op = b.ops[i];
  const Adapters& adapters = *b.workspace.adapters;
  const int made = op.inputs[0];
  size_t end = i, last;
  while (b.ops[end].is(Op::lora) && b.ops[end].inputs == op.inputs) end++;
  last = end - 1;
  const Tensor y = b.in(op), x = b.in(op, 1);
  AdaptedSums sums;
  sums.pairs = adapters.table(), sums.targets = adapters.targets(), sums.adapter_count = adapters.limits.count;
  sums.adapters = b.workspace.data->adapters();
  sums.chosen = y.row_set == kOutputRows ? b.workspace.data->chosen() : nullptr;
  sums.is_dtype16 = adapters.limits.is_dtype16, sums.type = b.workspace.dtype, sums.max_rank = adapters.limits.max_rank,
  sums.inner = b.workspace.inner.as<float>();
  sums.x = x.rows, sums.y = y.values(), sums.width = y.rows.width;
  const auto is_part = [](const OpNode& lora, int offset, int columns) {
    return lora.integer("offset") == offset && lora.integer("columns") == columns;
  };
  const std::optional<size_t> sum = add_after(b, last, made);
  if (const auto found = b.interleaved.find(made); found != b.interleaved.end()) {
    const int half = sums.paired_gates = y.rows.width / 2;
    sums.width = paired_rows(y.rows.width);
    if (sums.is_dtype16 && b.ops[end].is(Op::silu_mul) && last == i + 1 && half % 8 == 0 && is_part(op, 0, half) &&
        is_part(b.ops[last], half, half))
      last = end, sums.gated = b.out(b.ops[end]).rows, sums.bias = found->second;
  } else if (sums.is_dtype16 && sum && last == i && is_part(op, 0, y.rows.width)) {
    last = *sum, sums.added = b.in(b.ops[*sum]).values();
  }
  for (size_t next = i; next < end; sums.count = 0) {
    for (; next < end && sums.count < kMaxTargets; next++)
      sums.columns[sums.count++] = {b.ops[next].integer("target"), b.ops[next].integer("offset"),
                                    b.ops[next].integer("columns")};
    b.add_launch(y.row_set, [=, queue = b.queue](int rows) { add_lora(sums, rows, queue); });
  }
  return (int)(last - i);
}

int bind_expert_lora(Binding& b, size_t i) {
  const OpNode& op = b.ops[i];
  const Adapters& adapters = *b.workspace.adapters;
  const Tensor y = b.in(op), x = b.in(op, 1);
  const RowSet& entries = b.workspace.program.row_sets()[y.row_set];
  ExpertSums e;
  e.routing = b.workspace.expert_rows.at(y.row_set).routing, e.gathers = x.row_set != y.row_set;
  AdaptedSums& sums = e.sums;
  sums.pairs = adapters.table(), sums.targets = adapters.targets(), sums.adapter_count = adapters.limits.count;
  sums.adapters = b.workspace.data->adapters();
  sums.chosen = entries.of == kOutputRows ? b.workspace.data->chosen() : nullptr;
  sums.is_dtype16 = adapters.limits.is_dtype16, sums.type = b.workspace.dtype, sums.max_rank = adapters.limits.max_rank;
  sums.inner = b.workspace.inner.as<float>();
  sums.x = x.rows, sums.y = y.rows.values, e.tiles = y.rows.tiles, sums.width = y.rows.width;
  if (b.interleaved.count(op.inputs[0])) sums.paired_gates = y.rows.width / 2, sums.width = paired_rows(y.rows.width);
  sums.count = 1, sums.columns[0] = {op.integer("target"), op.integer("offset"), op.integer("columns")};
  if (sums.columns[0].columns)
    b.add_launch(y.row_set, [=, queue = b.queue](int rows) { add_expert_lora(e, rows, queue); });
  return 0;
}

const RegisterCudaOp kLora(Op::lora, bind_lora), kExpertLora(Op::expert_lora, bind_expert_lora);

}  // namespace
}  // namespace as::cuda
