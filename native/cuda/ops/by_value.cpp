// Elementwise ops that work in place.
#include "cuda/ops/ops.h"

namespace as::cuda {
namespace {

int bind_add(Binding& b, size_t i) {
  const OpNode& op = b.ops[i];
  b.check_in_place(op);
  b.add_launch(b.in(op).row_set, [x = b.in(op), other = b.in(op, 1), queue = b.queue](int rows) {
    add(x.values(), other.values(), (size_t)rows * x.rows.width, queue);
  });
  return 0;
}

int bind_multiply(Binding& b, size_t i) {
  const OpNode& op = b.ops[i];
  op.allow_only({}, "the CUDA backend");
  b.check_in_place(op);
  b.add_launch(b.in(op).row_set, [x = b.in(op), other = b.in(op, 1), queue = b.queue](int rows) {
    multiply(x.values(), other.values(), (size_t)rows * x.rows.width, queue);
  });
  return 0;
}

int bind_scale(Binding& b, size_t i) {
  const OpNode& op = b.ops[i];
  if (!op.weights.empty()) refuse("op scale with a weight");
  b.check_in_place(op);
  b.add_launch(b.in(op).row_set, [x = b.in(op), factor = (float)op.number("factor"), queue = b.queue](int rows) {
    scale(x.values(), factor, (size_t)rows * x.rows.width, queue);
  });
  return 0;
}

int bind_soft_cap(Binding& b, size_t i) {
  const OpNode& op = b.ops[i];
  b.check_in_place(op);
  b.add_launch(b.in(op).row_set, [x = b.in(op), cap = (float)op.number("cap"), queue = b.queue](int rows) {
    soft_cap(x.values(), cap, (size_t)rows * x.rows.width, queue);
  });
  return 0;
}

int bind_sigmoid_mul(Binding& b, size_t i) {
  const OpNode& op = b.ops[i];
  b.check_in_place(op);
  b.add_launch(b.in(op).row_set, [x = b.in(op), gate = b.in(op, 1), queue = b.queue](int rows) {
    sigmoid_mul(x.values(), gate.values(), rows, x.rows.width, queue);
  });
  return 0;
}

const RegisterCudaOp kAdd(Op::add, bind_add), kMultiply(Op::multiply, bind_multiply), kScale(Op::scale, bind_scale),
    kSoftCap(Op::soft_cap, bind_soft_cap), kSigmoidMul(Op::sigmoid_mul, bind_sigmoid_mul);

}  // namespace
}  // namespace as::cuda
