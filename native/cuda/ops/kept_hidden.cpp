// keep_hidden: copies rows to the places that the batch names. kept_hidden: from there. concat. spread_columns.
#include <array>

#include "cuda/kernels/norm/hidden_rows.h"
#include "cuda/ops/ops.h"

namespace as::cuda {
namespace {

// Also selects the rows with outputs, if that follows.
int bind_keep_hidden(Binding& b, size_t i) {
  const OpNode &op = b.ops[i], &next = b.ops[i + 1];
  const bool selects = next.is(Op::select_rows) && next.inputs[0] == op.inputs[0];
  const Rows y = selects ? b.out(next).rows : Rows();
  b.launches.push_back([=, x = b.in(op).values(), width = b.in(op).rows.width, ws = &b.workspace,
                        queue = b.queue](const Binding::Size& size) {
    const StepData& data = *ws->data;
    if (selects) keep_and_select(x, data.keeps(), size.rows, ws->hidden, data.chosen(), size.outputs, y, queue);
    else if (size.rows) keep_rows(x, data.keeps(), size.rows, width, ws->hidden, queue);
  });
  return selects;
}

int bind_kept_hidden(Binding& b, size_t i) {
  b.add_launch(kAllRows, [y = b.out(b.ops[i]), ws = &b.workspace, queue = b.queue](int rows) {
    select_rows({ws->hidden, nullptr, y.rows.width}, ws->data->takes(), rows, y.rows, queue);
  });
  return 0;
}

int bind_concat(Binding& b, size_t i) {
  const OpNode& op = b.ops[i];
  std::array<Columns, 3> parts{};
  for (size_t part = 0; part < op.inputs.size(); part++)
    parts[part] = {b.in(op, (int)part).values(), b.in(op, (int)part).rows.width};
  b.add_launch(b.in(op).row_set, [=, y = b.out(op), queue = b.queue](int rows) {
    concat(parts[0], parts[1], parts[2], rows, y.values(), queue);
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
