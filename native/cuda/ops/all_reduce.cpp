#include "cuda/ops/all_reduce.h"

#include <algorithm>

#include "cuda/kernels/comm/sum_ranks.h"
#include "cuda/ops/fusion.h"

namespace as::cuda {

// Partial sums have 16 bits if the weights do. The GEMMs that read the sum round it anyway, and float32 would double
// the traffic: 5 % of a step from 128 rows on. (Two ranks, 1,024 rows: 49 us against 27; 1 row: 3.6 us for both.)
bool sums_in_dtype16(const std::vector<OpNode>& ops, const Weights& weights, size_t all_reduce) {
  size_t before = all_reduce;
  while (before && ops[before - 1].is(Op::lora)) before--;  // a lora adds to the output of the op before it
  if (!before) return false;
  const OpNode* maker = &ops[before - 1];
  if (maker->is(Op::combine_experts))
    for (size_t i = before - 1; i-- > 0 && !maker->is(Op::expert_linear);)
      if (has(ops[i].outputs, maker->inputs[0])) maker = &ops[i];
  return (maker->is(Op::linear) || maker->is(Op::embedding) || maker->is(Op::expert_linear)) &&
         !weights.matrix(maker->weights[0]).values;
}

size_t largest_partial(const Program& program, const Weights& weights, int max_rows, int max_outputs) {
  size_t most = 0;
  for (size_t i = 0; i < program.ops().size(); i++) {
    const OpNode& op = program.ops()[i];
    if (op.is(Op::all_reduce))
      most = std::max(most, partial_bytes(program.in(op).rows == kOutputRows ? max_outputs : max_rows,
                                          program.in(op).width, sums_in_dtype16(program.ops(), weights, i)));
  }
  return most;
}

namespace {

// Also computes the add and the norm that follow, if there are any.
int bind_all_reduce(Binding& b, size_t i) {
  const OpNode& op = b.ops[i];
  b.check_in_place(op);
  if (!b.ranks) return 0;
  const int tensor = op.inputs[0];
  const Tensor x = b.in(op);
  size_t last = i;
  RankSum sum;
  sum.peers = b.ranks->exchange.peers(), sum.peers.step = b.workspace.data->step();
  sum.call = b.next_call, sum.calls = b.calls, sum.is_dtype16 = sums_in_dtype16(b.ops, b.weights, i);
  sum.dtype = b.workspace.dtype;
  if (add_after(b, i, tensor)) last = i + 1, sum.adds = true;
  sum.y = b.in(b.ops[last]).rows;
  take_norm(b, last, sum.norm, sum.normed);
  const auto writes_partial = [&](const OpNode& before) {
    return !before.outputs.empty() && before.outputs[0] == tensor &&
           (before.is(Op::linear) || before.is(Op::embedding) || before.is(Op::combine_experts));
  };
  const bool there = i > 0 && writes_partial(b.ops[i - 1]);
  sum.on_its_way = there && place_of(b, i - 1);
  const Rows partial = b.ranks->exchange.partial(b.next_call++, x.rows.width, sum.is_dtype16, sum.dtype);
  b.launches.push_back([=, ws = &b.workspace, queue = b.queue](const Binding::Size& size) {
    const int rows = ws->rows_of(x.row_set, size);
    if (!there && rows) to_tiles(x.values(), rows, partial, queue);
    sum_ranks(sum, rows, queue);  // also without rows, because ranks count calls
  });
  return (int)(last - i);
}

const RegisterCudaOp kAllReduce(Op::all_reduce, bind_all_reduce);

}  // namespace

void bind_first_call(Binding& b) {
  b.calls = (int)std::count_if(b.ops.begin(), b.ops.end(), [](const OpNode& op) { return op.is(Op::all_reduce); });
  if (!b.ranks || b.calls % 2 == 0) return;
  b.calls++, b.next_call++;
  RankSum nothing;
  nothing.peers = b.ranks->exchange.peers(), nothing.peers.step = b.workspace.data->step(), nothing.calls = b.calls;
  b.launches.push_back([=, queue = b.queue](const Binding::Size&) { sum_ranks(nothing, 0, queue); });
}

}  // namespace as::cuda
