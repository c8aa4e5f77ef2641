// keep_hidden: copies rows to the places that the batch names. kept_hidden: from there. concat. spread_columns.
#include "cuda/kernels/norm/hidden_rows.h"
#include "cuda/ops/ops.h"

namespace as::cuda {
namespace {

int bind_keep_hidden(Binding& b, size_t i) {
  b.add_launch(kAllRows, [x = b.in(b.ops[i]), ws = &b.workspace, queue = b.queue](int rows) {
    keep_rows(x.values(), ws->data->keeps(), rows, x.rows.width, ws->hidden, queue);
  });
  return 0;
}

int bind_kept_hidden(Binding& b, size_t i) {
  b.add_launch(kAllRows, [y = b.out(b.ops[i]), ws = &b.workspace, queue = b.queue](int rows) {
    select_rows(ws->hidden, ws->data->takes(), rows, y.rows, queue);
  });
  return 0;
}

int bind_concat(Binding& b, size_t i) {
  const OpNode& op = b.ops[i];
  if (op.inputs.size() > 2) refuse("op concat of three tensors");
  b.add_launch(b.in(op).row_set, [x = b.in(op), other = b.in(op, 1), y = b.out(op), queue = b.queue](int rows) {
    concat(x.values(), x.rows.width, other.values(), other.rows.width, rows, y.values(), queue);
  });
  return 0;
}

int bind_spread_columns(Binding& b, size_t i) {
  const OpNode& op = b.ops[i];
  b.add_launch(b.in(op).row_set, [x = b.in(op), y = b.out(op), columns = b.vector(op, 0), queue = b.queue](int rows) {
    spread_columns(x.values(), x.rows.width, columns, y.rows.width, rows, y.values(), queue);
  });
  return 0;
}

const RegisterCudaOp kKeepHidden(Op::keep_hidden, bind_keep_hidden), kKeptHidden(Op::kept_hidden, bind_kept_hidden),
    kConcat(Op::concat, bind_concat), kSpreadColumns(Op::spread_columns, bind_spread_columns);

}  // namespace
}  // namespace as::cuda
