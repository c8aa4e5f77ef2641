// The activation of the gate columns, times the up columns.
#include "cuda/kernels/lora/lora.h"
#include "cuda/ops/ops.h"

namespace as::cuda {
namespace {

int bind_silu_mul(Binding& b, size_t i) {
  const OpNode& op = b.ops[i];
  const Tensor x = b.in(op), y = b.out(op);
  const auto found = b.interleaved.find(op.inputs[0]);
  const auto routed = b.workspace.expert_rows.find(x.row_set);
  if (found != b.interleaved.end() && routed != b.workspace.expert_rows.end()) {
    const GatedEntries g{x.values(), paired_rows(x.rows.width), found->second, routed->second.routing, gating_of(op),
                         y.rows};
    b.add_launch(x.row_set, [=, queue = b.queue](int rows) { gate_entries(g, rows, queue); });
  } else if (found != b.interleaved.end()) {
    b.add_launch(x.row_set, [=, bias = found->second, queue = b.queue](int rows) {
      silu_mul_pairs(x.values(), bias, rows, y.rows, queue);
    });
  } else {
    b.add_launch(x.row_set, [=, gating = gating_of(op), queue = b.queue](int rows) {
      silu_mul(x.values(), gating, rows, y.rows, queue);
    });
  }
  return 0;
}

int bind_gelu_tanh_mul(Binding& b, size_t i) {
  const OpNode& op = b.ops[i];
  b.add_launch(b.in(op).row_set, [x = b.in(op), y = b.out(op), queue = b.queue](int rows) {
    gelu_tanh_mul(x.values(), rows, y.rows, queue);
  });
  return 0;
}

int bind_gelu_mul(Binding& b, size_t i) {
  const OpNode& op = b.ops[i];
  b.add_launch(b.in(op).row_set,
               [x = b.in(op), y = b.out(op), queue = b.queue](int rows) { gelu_mul(x.values(), rows, y.rows, queue); });
  return 0;
}

const RegisterCudaOp kSiluMul(Op::silu_mul, bind_silu_mul, OutputForm::tiles),
    kClampedSiluMul(Op::clamped_silu_mul, bind_silu_mul, OutputForm::tiles),
    kLimitedSiluMul(Op::limited_silu_mul, bind_silu_mul, OutputForm::tiles),
    kGeluTanhMul(Op::gelu_tanh_mul, bind_gelu_tanh_mul, OutputForm::tiles),
    kGeluMul(Op::gelu_mul, bind_gelu_mul, OutputForm::tiles);

}  // namespace
}  // namespace as::cuda
