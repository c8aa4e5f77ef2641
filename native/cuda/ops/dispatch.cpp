// Layers whose routed experts other ranks compute, on CPUs: the router, dispatch_rows and returned_sums.
#include "cuda/kernels/moe/dispatch.h"

#include "cuda/hot_experts.h"
#include "cuda/ops/fusion.h"
#include "cuda/ops/linear.h"

namespace as::cuda {
namespace {

// Whether the last layer of experts has rows with outputs alone.
bool selects_outputs(const Binding& b) {
  int rows = kAllRows;
  for (const OpNode& op : b.ops)
    if (op.is(Op::dispatch_rows)) rows = b.in(op).row_set;
  return rows == kOutputRows;
}

// In steps with many rows the GPU computes the experts itself (expert_stream.h), or all but a part of them.
int bind_dispatch_rows(Binding& b, size_t i) {
  const OpNode& op = b.ops[i];
  if (op.flag("elsewhere")) return 0;
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
  const int layer = op.integer("layer");
  if (stream) {
    size_t returned = i;
    while (returned < b.ops.size() && !b.ops[returned].is(Op::returned_sums)) returned++;
    if (returned == b.ops.size()) throw std::invalid_argument("op dispatch_rows: no op returned_sums follows");
    const Tensor y = b.out(b.ops[returned]);
    stream->check_layer(layer, x.rows.width, y.rows.width, routing.top);
    sums = y.values();
  }
  const SentLayer sent{layer, x.row_set == kOutputRows, b.workspace.data->counts()};
  b.launches.push_back([=, ws = &b.workspace, last = selects_outputs(b) ? kOutputRows : kAllRows,
                        memory = b.workspace.experts->memory(), queue = b.queue](const Binding::Size& size) {
    const int rows = ws->rows_of(x.row_set, size);
    if (!rows) return;
    if (stream && stream->takes(rows)) {
      if (!layer) stream->begin_step(rows, ws->rows_of(last, size));
      stream->count(layer, routing, rows);
      if (!stream->is_split()) return stream->run(layer, x.values(), routing, rows, sums);
      dispatch_part(memory, x.values(), x.rows.width, stream->met(layer, routing, rows), sent, rows, queue);
      return stream->multiply(layer, x.values(), routing, rows);
    }
    const HotExpertsOfLayer own = hot ? hot->of_layer(layer) : HotExpertsOfLayer{};
    dispatch_rows(memory, x.values(), x.rows.width, routing, own, sent, rows, queue);
    if (hot) hot->multiply(layer, x.values(), routing, rows);
  });
  return 0;
}

int bind_returned_sums(Binding& b, size_t i) {
  const Tensor y = b.out(b.ops[i]);
  if (b.ops[i].flag("elsewhere")) {
    b.add_launch(y.row_set, [=, queue = b.queue](int rows) {
      check(cudaMemsetAsync(y.values(), 0, (size_t)rows * y.rows.width * sizeof(float), queue.stream),
            "clearing sums of experts");
    });
    return 0;
  }
  if (!b.workspace.experts) refuse("op returned_sums without ranks of experts");
  if (y.rows.width > b.workspace.experts->shape().sum_width)
    throw std::invalid_argument("op returned_sums: the exchange's rows are smaller");
  const ExpertStream* const stream = b.workspace.experts->stream();
  size_t sent = i;
  while (sent && !b.ops[sent].is(Op::dispatch_rows)) sent--;
  if (!b.ops[sent].is(Op::dispatch_rows)) throw std::invalid_argument("op returned_sums follows no op dispatch_rows");
  const int layer = b.ops[sent].integer("layer");
  const Routing routing = b.workspace.dispatched.at(b.in(b.ops[sent], 1).row_set);
  std::optional<MetEntries> met;
  if (const HotExperts* const hot = b.workspace.experts->hot()) met = hot->met(layer, routing);
  b.add_launch(y.row_set, [=, memory = b.workspace.experts->memory(), queue = b.queue](int rows) {
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
