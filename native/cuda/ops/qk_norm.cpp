// Norms over all queries and over all keys of all ranks.
#include "cuda/ops/ops.h"

namespace as::cuda {
namespace {

int bind_qk_square_sums(Binding& b, size_t i) {
  const OpNode& op = b.ops[i];
  const QkColumns columns{op.integer("q_columns"), op.integer("k_offset"), op.integer("k_columns")};
  b.add_launch(b.in(op).row_set, [=, x = b.in(op), y = b.out(op), queue = b.queue](int rows) {
    qk_square_sums(x.values(), x.rows.width, columns, rows, y.values(), queue);
  });
  return 0;
}

int bind_qk_norm(Binding& b, size_t i) {
  const OpNode& op = b.ops[i];
  b.check_in_place(op);
  const QkNorm norm{b.vector(op, 0),       b.vector(op, 1),       op.integer("q_columns"), op.integer("k_columns"),
                    op.integer("q_width"), op.integer("k_width"), (float)op.number("eps")};
  b.add_launch(b.in(op).row_set, [=, x = b.in(op), sums = b.in(op, 1), queue = b.queue](int rows) {
    qk_norm(x.values(), x.rows.width, norm, sums.values(), rows, queue);
  });
  return 0;
}

const RegisterCudaOp kQkSquareSums(Op::qk_square_sums, bind_qk_square_sums), kQkNorm(Op::qk_norm, bind_qk_norm);

}  // namespace
}  // namespace as::cuda
