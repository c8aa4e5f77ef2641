#include <algorithm>

#include "cuda/ops/fusion.h"

namespace as::cuda {
namespace {

void rope_queries(const Attention& a, const Rope& by, int rows, const Queue& queue) {
  rope(const_cast<float*>(a.qkv), a.width, {0, a.queries, a.cache.head_dim}, by.table, by.interleaved, false, rows,
       queue);
}

int bind_span_attention(Binding& b, size_t i) {
  const OpNode& op = b.ops[i];
  Workspace& ws = b.workspace;
  if (op.flag("bidirectional") && op.integer("window")) refuse("op span_attention in both directions with a window");
  if (op.flag("segments") && !op.flag("bidirectional")) refuse("op span_attention in segments and in one direction");
  Attention a;
  const bool reads = !op.integer("kv_heads");  // keys and values of an earlier op
  const SharedHeads heads = shared_heads(keeper_of(ws.program, op));
  a.cache = ws.cache_of(op), a.group = heads.group, a.first = heads.first, a.queries = op.integer("q_heads");
  a.scale = (float)op.number("scale"), a.soft_cap = (float)op.number("soft_cap"), a.window = op.integer("window");
  a.qkv = b.in(op).values(), a.width = b.in(op).rows.width, a.out = b.out(op).rows;
  a.tables = ws.data->tables(op.integer("cache_group")), a.partials = ws.partials.as<float>();
  a.max_splits = ws.max_splits, a.arrivals = ws.arrivals.as<int>(), a.given_up = b.queue.scratch.given_up;
  if (op.flag("sinks")) a.sinks = b.vector(op, 0);
  if (op.flag("alibi")) a.slopes = b.vector(op, op.flag("sinks"));
  if (op.flag("segments")) a.from = ws.data->part_begins(), a.to = ws.data->part_ends();
  else if (op.flag("images")) a.to = ws.data->part_ends();
  else if (op.flag("bidirectional")) a.to = ws.data->ends();
  const double logn = op.number("logn");
  const std::optional<Rope> rope = std::exchange(b.rope, std::nullopt);
  const std::optional<std::pair<HeadNorm, HeadNorm>> norms = std::exchange(b.head_norms, std::nullopt);
  Attention whole = a;
  if (norms) whole.query_norm = norms->first.norm, whole.key_norm = norms->second.norm;
  const int* where = ws.data->where(op.integer("cache_group"));
  const int at_once = a.cache.type == CacheType::dtype16 ? 2 : 3;  // CTAs of attention per SM
  const int wanted = at_once * ws.device.sm_count(), most = ws.max_splits;
  AttentionChoice kernels = ws.kernels.attention(a.cache, a.group, a.slopes);
  kernels.stores &= !reads;
  const bool narrow = ws.is_narrow(op);
  b.launches.push_back([=, data = &*ws.data, queue = b.queue](const Binding::Size& size) {
    if (!size.rows) return;
    const Rope* rotates = rope ? &*rope : nullptr;
    if (logn) scale_queries(a, data->positions(), logn, size.rows, queue);
    const int tiles = std::max(size.decode_tiles * a.cache.kv_heads, 1);
    const int sharers = size.kv_splits > 1 ? std::clamp(wanted / tiles, 2, std::max(most, 2)) : 1;
    if (kernels.stores && size.stores && size.decode_tiles && !size.prefill_tiles)
      return store_and_attend(whole, rotates, data->decode_tiles(), size.decode_tiles, sharers, queue);
    if (norms) head_norm(const_cast<float*>(a.qkv), a.width, norms->first, norms->second, size.rows, queue);
    const bool rotates_queries = rotates && !size.decode_tiles && attend_prefill_ropes(a, kernels.prefill, *rotates);
    if (!reads) store_cache(a, where, rotates, !rotates_queries, size.rows, queue);
    else if (rotates && !rotates_queries) rope_queries(a, *rotates, size.rows, queue);
    attend_decode(a, kernels.decode, data->decode_tiles(), size.decode_tiles, sharers, queue);
    attend_prefill(a, kernels.prefill, data->prefill_tiles(narrow), narrow ? size.narrow_tiles : size.prefill_tiles,
                   rotates_queries ? rotates : nullptr, queue);
  });
  return 0;
}

const RegisterCudaOp kSpanAttention(Op::span_attention, bind_span_attention, OutputForm::cache_type);

}  // namespace
}  // namespace as::cuda
