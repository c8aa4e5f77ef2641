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
  b.check_in_place(op);
  b.add_launch(b.in(op).row_set,
               [x = b.in(op), other = b.in(op, 1), offset = op.integer("offset"), queue = b.queue](int rows) {
                 multiply(x.values(), x.rows.width, other.values() + offset, other.rows.width, rows, queue);
               });
  return 0;
}

int bind_scale(Binding& b, size_t i) {
  const OpNode& op = b.ops[i];
  b.check_in_place(op);
  b.add_launch(b.in(op).row_set,
               [x = b.in(op), factor = (float)op.number("factor"), weight = b.vector(op, 0),
                queue = b.queue](int rows) { scale(x.values(), factor, weight, (size_t)rows * x.rows.width, queue); });
  return 0;
}

int bind_clamp(Binding& b, size_t i) {
  const OpNode& op = b.ops[i];
  b.check_in_place(op);
  b.add_launch(b.in(op).row_set, [x = b.in(op), low = b.vector(op, 0), high = b.vector(op, 1), queue = b.queue](
                                     int rows) { clamp(x.values(), low, high, (size_t)rows * x.rows.width, queue); });
  return 0;
}

int bind_standardize(Binding& b, size_t i) {
  const OpNode& op = b.ops[i];
  b.check_in_place(op);
  b.add_launch(b.in(op).row_set, [x = b.in(op), shift = b.vector(op, 0), factor = b.vector(op, 1), queue = b.queue](
                                     int rows) { standardize(x.values(), x.rows.width, shift, factor, rows, queue); });
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
    kClamp(Op::clamp, bind_clamp), kStandardize(Op::standardize, bind_standardize),
    kSoftCap(Op::soft_cap, bind_soft_cap), kSigmoidMul(Op::sigmoid_mul, bind_sigmoid_mul);

}  // namespace
}  // namespace as::cuda
