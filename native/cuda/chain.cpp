// Ops of a chain, each by its own launch.
#include "cuda/chain.h"

namespace as {
namespace cuda {
namespace {

void multiply(const Product& p, int rows, const Queue& queue) {
  if (p.w.kind == Kind::f32) linear_f32(p, rows, queue);
  else if (p.w.kind == Kind::bf16) linear_bf16(p, rows, queue);
  else if (p.w.kind == Kind::integers) linear_integer(p, rows, queue);
  else if (p.w.kind == Kind::float8) linear_float8(p, rows, queue);
  else linear_quantized(p, rows, queue);
}

}  // namespace

void run_op(const ChainOp& op, int rows, const Queue& queue) {
  if (op.kind == ChainOp::Kind::sum) return sum_ranks(op.sum, rows, queue);
  if (!rows) return;
  if (op.kind == ChainOp::Kind::norm) rms_norm(op.x, op.norm, rows, op.y, queue);
  else if (op.kind == ChainOp::Kind::product) multiply(op.product, rows, queue);
  else if (op.norm.weight) rms_norm_into_bytes(op.x, op.norm, op.product, rows, queue);
  else quantize_activations(op.product, rows, queue);
}

}  // namespace cuda
}  // namespace as
