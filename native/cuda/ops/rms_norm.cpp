#include "cuda/ops/fusion.h"
#include "cuda/ops/linear.h"

namespace as::cuda {
namespace {

int bind_rms_norm(Binding& b, size_t i) {
  const OpNode& op = b.ops[i];
  if (norms_for_linear(b, i)) return bind_linear(b, i + 1, true) + 1;
  const auto launch = [x = b.in(op), y = b.out(op), norm = norm_of(op, b.vector(op, 0)), queue = b.queue](int rows) {
    rms_norm(x.values(), norm, rows, y.rows, queue);
  };
  const int row_set = b.in(op).row_set;
  if (norms_to_bytes(b, i)) {
    const OpNode& after = b.ops[i + 2];
    if (after.is(Op::lora) && after.inputs[1] == op.outputs[0])  // lora reads the normed rows
      b.add_launch(row_set, launch);
    return bind_linear(b, i + 1, true) + 1;
  }
  if (norms_with_router(b, i))  // a single row is normed by the kernel of the router's logits
    b.add_launch(row_set, [=](int rows) {
      if (rows > 1) launch(rows);
    });
  else b.add_launch(row_set, launch);
  return 0;
}

const RegisterCudaOp kRmsNorm(Op::rms_norm, bind_rms_norm, OutputForm::both);

}  // namespace
}  // namespace as::cuda
