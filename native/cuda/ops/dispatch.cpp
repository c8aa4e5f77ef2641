// Layers whose routed experts other ranks compute, on CPUs: the router, dispatch_rows and returned_sums.
#include "cuda/kernels/moe/dispatch.h"

#include "cuda/hot_experts.h"
#include "cuda/ops/fusion.h"
#include "cuda/ops/linear.h"

namespace as::cuda {
namespace {

// The number of the layer of experts of ops[i].
int layer_of(const Binding& b, size_t i) {
  int layer = 0;
  for (size_t j = 0; j < i; j++) layer += b.ops[j].is(Op::dispatch_rows);
  return layer;
}

// In steps with many rows the GPU computes the experts itself (expert_stream.h), or all but a part of them.
int bind_dispatch_rows(Binding& b, size_t i) {
  const OpNode& op = b.ops[i];
  if (!b.workspace.experts) refuse("op dispatch_rows without ranks of experts");
  const Tensor x = b.in(op);
  const Routing routing = b.workspace.dispatched.at(b.in(op, 1).row_set);
  if (x.rows.width > b.workspace.experts->shape().width || routing.top > b.workspace.experts->shape().top ||
      b.workspace.limits.max_rows > b.workspace.experts->shape().rows)
    throw std::invalid_argument("op dispatch_rows: the exchange's rows are smaller");
  ExpertStream* const stream = b.workspace.experts->stream();
  HotExperts* const hot = b.workspace.experts->hot();
  if (stream && !hot && stream->largest_split() > b.workspace.experts->shape().entry_rows)
    throw std::invalid_argument("op dispatch_rows: the exchange has no room for entries");
  float* sums = nullptr;
  const int layer = layer_of(b, i);
  if (stream) {
    size_t returned = i;
    while (returned < b.ops.size() && !b.ops[returned].is(Op::returned_sums)) returned++;
    if (returned == b.ops.size()) throw std::invalid_argument("op dispatch_rows: no op returned_sums follows");
    const Tensor y = b.out(b.ops[returned]);
    stream->check_layer(layer, x.rows.width, y.rows.width, routing.top);
    sums = y.values();
  }
  b.add_launch(kAllRows, [=, memory = b.workspace.experts->memory(), where = b.workspace.data->where(0),
                          queue = b.queue](int rows) {
    if (stream && stream->takes(rows)) {
      stream->count(layer, routing, rows);
      if (!(layer ? stream->is_split() : stream->split(rows)))
        return stream->run(layer, x.values(), routing, rows, sums);
      dispatch_part(memory, x.values(), x.rows.width, stream->met(layer, routing, rows), where, rows, queue);
      return stream->multiply(layer, x.values(), routing, rows);
    }
    const HotExpertsOfLayer own = hot ? hot->of_layer(layer) : HotExpertsOfLayer{};
    dispatch_rows(memory, x.values(), x.rows.width, routing, own, where, rows, queue);
    if (hot) hot->multiply(layer, x.values(), routing, rows);
  });
  return 0;
}

int bind_returned_sums(Binding& b, size_t i) {
  if (!b.workspace.experts) refuse("op returned_sums without ranks of experts");
  const Tensor y = b.out(b.ops[i]);
  if (y.rows.width > b.workspace.experts->shape().sum_width)
    throw std::invalid_argument("op returned_sums: the exchange's rows are smaller");
  const ExpertStream* const stream = b.workspace.experts->stream();
  size_t sent = i;
  while (sent && !b.ops[sent].is(Op::dispatch_rows)) sent--;
  if (!b.ops[sent].is(Op::dispatch_rows)) throw std::invalid_argument("op returned_sums follows no op dispatch_rows");
  const int layer = layer_of(b, sent);
  const Routing routing = b.workspace.dispatched.at(b.in(b.ops[sent], 1).row_set);
  std::optional<MetEntries> met;
  if (const HotExperts* const hot = b.workspace.experts->hot()) met = hot->met(layer, routing);
  b.add_launch(kAllRows, [=, memory = b.workspace.experts->memory(), queue = b.queue](int rows) {
    if (stream && stream->takes(rows)) {
      if (!stream->is_split()) return;
      await_ranks(memory, queue);
      return returned_entries(memory, stream->met(layer, routing, rows), y.values(), y.rows.width, rows, queue);
    }
    if (met) returned_entries(memory, *met, y.values(), y.rows.width, rows, queue);
    else returned_sums(memory, y.values(), y.rows.width, rows, queue);
  });
  return 0;
}

const RegisterCudaOp kDispatchRows(Op::dispatch_rows, bind_dispatch_rows),
    kReturnedSums(Op::returned_sums, bind_returned_sums);

}  // namespace
}  // namespace as::cuda
