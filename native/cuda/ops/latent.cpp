// Latent attention, and its products of each head with a matrix of its own.
#include <algorithm>

#include "cuda/kernels/gemm/gemm_heads.h"
#include "cuda/ops/fusion.h"

namespace as::cuda {
namespace {

int bind_latent_attention(Binding& b, size_t i) {
  const OpNode& op = b.ops[i];
  Workspace& ws = b.workspace;
  Attention a;
  a.cache = ws.cache_of(op), a.group = group_of(ws.program, op), a.queries = latent_heads(ws.program, op);
  a.scale = (float)op.number("scale");
  a.qkv = b.in(op).values(), a.width = b.in(op).rows.width, a.out = b.out(op).rows;
  a.rotated = b.in(op, 1).values(), a.rotated_width = b.in(op, 1).rows.width, a.kept = b.in(op, 2).values();
  a.tables = ws.data->tables(op.integer("cache_group")), a.partials = ws.partials.as<float>();
  if (op.inputs.size() > 3) a.selected = b.in(op, 3).values(), a.selected_width = b.in(op, 3).rows.width;
  a.max_splits = ws.max_splits, a.arrivals = ws.arrivals.as<int>(), a.given_up = b.queue.scratch.given_up;
  if (a.out.values == a.qkv) refuse("op latent_attention in place");
  if (op.integer("rate")) refuse("op latent_attention to positions of entries");
  const int* where = ws.data->where(op.integer("cache_group"));
  const int wanted = 3 * ws.device.sm_count(), most = ws.max_splits;
  const AttentionAlgo algo = ws.kernels.latent_attention(a.cache, a.group);
  b.launches.push_back([=, data = &*ws.data, queue = b.queue](const Binding::Size& size) {
    if (!size.rows) return;
    const int tiles = std::max(size.decode_tiles * a.cache.kv_heads, 1);
    const int sharers = size.kv_splits > 1 ? std::clamp(wanted / tiles, 2, std::max(most, 2)) : 1;
    store_latent(a, where, size.rows, queue);
    attend_latent_decode(a, algo, data->decode_tiles(), size.decode_tiles, sharers, queue);
    attend_latent_prefill(a, algo, data->prefill_tiles(), size.prefill_tiles, queue);
    attend_latent_selected(a, algo, data->selected_tiles(), size.selected_tiles, queue);
  });
  return 0;
}

int bind_head_linear(Binding& b, size_t i) {
  const OpNode& op = b.ops[i];
  HeadGemm p;
  p.w = b.matrix(op);
  if (p.w.kind != Kind::f32 && p.w.kind != Kind::dtype16)
    refuse("op head_linear with matrices of other types than float32, bfloat16 and float16");
  if (p.w.experts != op.integer("heads"))
    throw std::invalid_argument("op head_linear takes a matrix of " + std::to_string(op.integer("heads")) +
                                " heads, weight " + std::to_string(op.weights[0]) + " has " +
                                std::to_string(p.w.experts));
  p.x = b.in(op).values() + op.integer("offset"), p.width = b.in(op).rows.width, p.y = b.out(op).rows;
  if (b.in(op).values() == b.out(op).values()) refuse("op head_linear in place");
  b.add_launch(b.in(op).row_set, [=, queue = b.queue](int rows) { gemm_heads(p, rows, queue); });
  return 0;
}

const RegisterCudaOp kLatentAttention(Op::latent_attention, bind_latent_attention),
    kHeadLinear(Op::head_linear, bind_head_linear, OutputForm::tiles);

}  // namespace
}  // namespace as::cuda
