#include "cuda/ops/linear.h"

#include <algorithm>

#include "cuda/kernels/moe/moe.h"
#include "cuda/ops/fusion.h"

namespace as::cuda {
namespace {

// Whether a tensor has the logits of experts or the gates of rows.
bool is_routing(const Program& program, int tensor) {
  return std::any_of(program.ops().begin(), program.ops().end(), [&](const OpNode& op) {
    return (op.is(Op::router) && op.inputs[0] == tensor) || (op.is(Op::sigmoid_mul) && op.inputs[1] == tensor);
  });
}

}  // namespace

void launch_gemm(const GemmArgs& p, int rows, GemmChoice choice, const Queue& queue) {
  if (choice.algo == GemmAlgo::small_n) gemm_small_n(p, rows, queue);
  else if (choice.algo == GemmAlgo::long_k) gemm_long_k(p, rows, queue);
  else if (p.w.kind == Kind::f32) gemm_f32(p, rows, queue);
  else if (p.w.kind == Kind::dtype16) gemm_dtype16(p, rows, queue, choice.algo);
  else if (p.w.kind == Kind::quantized) gemm_quantized(p, rows, queue, choice.algo);
  else if (choice.fused) gemv_8bit(p, queue, choice.algo);
  else if (p.w.kind == Kind::integers) gemm_integer(p, rows, queue, choice.algo);
  else gemm_float8(p, rows, queue, choice.algo);
}

// Also computes what follows: the activation that multiplies gate and up columns, or the add.
int bind_linear(Binding& b, size_t i, bool norms) {
  Workspace& ws = b.workspace;
  const OpNode& op = b.ops[i];
  const Tensor x = b.in(op);
  if (b.ops[i + 1].is(Op::router) && b.ops[i + 1].inputs[0] == op.outputs[0] && has_small_n(b.matrix(op)))
    return bind_router(b, i + 1, true), 1;
  if (const int others = norms ? 0 : bind_shared_sum(b, i)) return others;
  const std::optional<size_t> sum = add_after(b, i, op.outputs[0]);
  const bool gated = is_gated(b.ops, b.weights, i);
  if (gated && b.paired.insert(op.weights[0]).second) b.weights.pair(op.weights[0]);
  GemmArgs p;
  p.w = b.matrix(op), p.w.quants.in_blocks = has_block_scales(p.w, b.queue);
  p.bias = b.vector(op, 1), p.adds = sum.has_value(), p.gated = gated;
  p.x = x.rows;
  p.y = sum ? b.in(b.ops[*sum]).rows : partial_of(b, i).value_or(b.out(b.ops[gated ? i + 1 : i]).rows);
  if (!gated && b.paired.count(op.weights[0])) {  // an adapter adds to the columns before the activation
    b.interleaved[op.outputs[0]] = p.bias;
    p.bias = nullptr, p.y.width = p.w.n;
  }
  if (p.w.kind == Kind::quantized) p.widened = ws.widened.as<uint16_t>();
  if (p.w.takes_bytes()) p.bytes = byte_rows(ws.byte_rows.as(), ws.max_rows(op.inputs[0]), p.w.k);
  const bool gathers = p.w.order, converts = p.w.takes_tiles() && (!x.rows.tiles || gathers),
             converted = b.tiled.erase(op.inputs[0]) > 0;
  if (converts) p.x = {nullptr, ws.tiles.as<uint16_t>(), x.rows.width, ws.dtype};
  const auto activation = b.activations.find(op.inputs[0]);
  const bool activates = activation != b.activations.end();
  const Activation function = activates ? activation->second : Activation::gelu;
  if (activates) b.activations.erase(activation);
  GemmArgs fused = p;
  if (norms)
    fused.unnormed = b.in(b.ops[i - 1]).values(), fused.norm = norm_of(b.ops[i - 1], b.vector(b.ops[i - 1], 0));
  uint16_t* const place = sum ? nullptr : place_of(b, i);
  Gemm gemm = gemm_of(p);
  gemm.normed = norms && !gathers;
  gemm.fuses = gathers          ? false
               : fused.unnormed ? fused.unnormed != p.y.values  // CTAs read it while others write
                                : p.w.takes_bytes();
  gemm.pushed = place != nullptr, gemm.few_columns = has_small_n(p.w) && is_routing(ws.program, op.outputs[0]);
  gemm.long_rows = !sum && multiplies_streams(b, i);
  const GemmTable& table = ws.kernels.gemm(gemm);
  b.tables[i] = &table;
  b.add_launch(x.row_set, [=, &table, queue = b.queue](int rows) mutable {
    const GemmChoice choice = table.at(rows);
    if (choice.fused) return launch_gemm(fused, rows, choice, queue);
    if (p.w.takes_bytes()) {
      if (norms) rms_norm_into_bytes(fused.unnormed, fused.norm, p, rows, queue);
      else quantize_activations(p, rows, queue);
    } else if (norms) {
      rms_norm(fused.unnormed, fused.norm, rows, x.rows, queue);
    }
    p.y.copy = rows <= kPushedRows ? place : nullptr;
    if (gathers) gather_columns(x.rows, p.w.order, rows, p.x, queue);
    else if (activates) activate(x.values(), function, rows, p.x, queue);
    else if (converts && !converted) to_tiles(x.values(), rows, p.x, queue);
    launch_gemm(p, rows, choice, queue);
  });
  return sum ? (int)(*sum - i) : gated;
}

namespace {

const RegisterCudaOp kLinear(Op::linear, [](Binding& b, size_t i) { return bind_linear(b, i, false); });

}  // namespace
}  // namespace as::cuda
