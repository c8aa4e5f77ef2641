// Hyper-connections (mHC) over several residual streams.
#include "cuda/kernels/norm/streams.h"

#include "cuda/ops/fusion.h"

namespace as::cuda {
namespace {

int bind_stream_weights(Binding& b, size_t i) {
  const OpNode& op = b.ops[i];
  b.check_in_place(op);
  StreamWeights by;
  by.factors = b.vector(op, 0), by.base = b.vector(op, 1), by.eps = (float)op.number("eps");
  by.streams = op.integer("streams"), by.iterations = op.integer("iterations"), by.width = b.in(op).rows.width;
  if (merges_and_norms(b, i)) {
    const OpNode &merge = b.ops[i + 1], &norm = b.ops[i + 2];
    b.add_launch(b.in(op).row_set, [=, x = b.in(merge).values(), weights = b.in(op).values(),
                                    norm = norm_of(norm, b.vector(norm, 0)), out = b.out(norm).rows, queue = b.queue](
                                       int rows) { merge_and_norm(x, by, weights, norm, rows, out, queue); });
    return 2;
  }
  b.add_launch(b.in(op).row_set,
               [=, x = b.in(op).values(), queue = b.queue](int rows) { stream_weights(x, by, rows, queue); });
  return 0;
}

int bind_merge_streams(Binding& b, size_t i) {
  const OpNode& op = b.ops[i];
  const Rows weights = op.inputs.size() > 1 ? b.in(op, 1).rows : Rows();
  b.add_launch(b.in(op).row_set, [=, x = b.in(op), y = b.out(op), queue = b.queue](int rows) {
    merge_streams(x.values(), x.rows.width / y.rows.width, weights.values, weights.width, rows, y.rows, queue);
  });
  return 0;
}

int bind_mix_streams(Binding& b, size_t i) {
  const OpNode& op = b.ops[i];
  b.check_in_place(op);
  b.add_launch(b.in(op).row_set, [x = b.in(op), y = b.in(op, 1), weights = b.in(op, 2), queue = b.queue](int rows) {
    mix_streams(x.values(), x.rows.width / y.rows.width, y.values(), y.rows.width, weights.values(), rows, queue);
  });
  return 0;
}

const RegisterCudaOp kStreamWeights(Op::stream_weights, bind_stream_weights),
    kMergeStreams(Op::merge_streams, bind_merge_streams), kMixStreams(Op::mix_streams, bind_mix_streams);

}  // namespace
}  // namespace as::cuda
