// Layers whose routed experts other ranks compute, on CPUs: the router, dispatch_rows and returned_sums.
#include "cuda/kernels/moe/dispatch.h"

#include "cuda/expert_stream.h"
#include "cuda/ops/fusion.h"
#include "cuda/ops/linear.h"

namespace as::cuda {
namespace {

// In steps with many rows the GPU computes the experts itself (expert_stream.h), and no rank of experts is asked.
int bind_dispatch_rows(Binding& b, size_t i) {
  const OpNode& op = b.ops[i];
  if (!b.workspace.experts) refuse("op dispatch_rows without ranks of experts");
  const Tensor x = b.in(op);
  const Routing routing = b.workspace.dispatched.at(b.in(op, 1).row_set);
  if (x.rows.width > b.workspace.experts->shape().width || routing.top > b.workspace.experts->shape().top ||
      b.workspace.limits.max_rows > b.workspace.experts->shape().rows)
    throw std::invalid_argument("op dispatch_rows: the exchange's rows are smaller");
  ExpertStream* const stream = b.workspace.experts->stream();
  float* sums = nullptr;
  int layer = 0;
  if (stream) {
    for (size_t j = 0; j < i; j++) layer += b.ops[j].is(Op::dispatch_rows);
    size_t returned = i;
    while (returned < b.ops.size() && !b.ops[returned].is(Op::returned_sums)) returned++;
    if (returned == b.ops.size()) throw std::invalid_argument("op dispatch_rows: no op returned_sums follows");
    const Tensor y = b.out(b.ops[returned]);
    stream->check_layer(layer, x.rows.width, y.rows.width, routing.top);
    sums = y.values();
  }
  b.add_launch(kAllRows, [=, memory = b.workspace.experts->memory(), where = b.workspace.data->where(0),
                          queue = b.queue](int rows) {
    if (stream && stream->takes(rows)) stream->run(layer, x.values(), routing, rows, sums);
    else dispatch_rows(memory, x.values(), x.rows.width, routing, where, rows, queue);
  });
  return 0;
}

int bind_returned_sums(Binding& b, size_t i) {
  if (!b.workspace.experts) refuse("op returned_sums without ranks of experts");
  const Tensor y = b.out(b.ops[i]);
  if (y.rows.width > b.workspace.experts->shape().sum_width)
    throw std::invalid_argument("op returned_sums: the exchange's rows are smaller");
  const ExpertStream* const stream = b.workspace.experts->stream();
  b.add_launch(kAllRows, [=, memory = b.workspace.experts->memory(), queue = b.queue](int rows) {
    if (stream && stream->takes(rows)) return;
    returned_sums(memory, y.values(), y.rows.width, rows, queue);
  });
  return 0;
}

const RegisterCudaOp kDispatchRows(Op::dispatch_rows, bind_dispatch_rows),
    kReturnedSums(Op::returned_sums, bind_returned_sums);

}  // namespace
}  // namespace as::cuda
