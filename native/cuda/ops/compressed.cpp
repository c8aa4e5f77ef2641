// Attention over compressed positions (DeepSeek-V4): the entries, and the attention over lists of positions and
// entries.
#include <algorithm>

#include "cuda/kernels/attention/compress.h"
#include "cuda/ops/fusion.h"

namespace as::cuda {
namespace {

int bind_compress(Binding& b, size_t i) {
  const OpNode& op = b.ops[i];
  Workspace& ws = b.workspace;
  const int rows_group = op.integer("rows_group"), group = op.integer("cache_group");
  Compressor p;
  p.rows = ws.cache_at(rows_group, op.integer("rows_layer"));
  p.entries = ws.entries_of(group, op.integer("layer"), op.integer("rate"));
  p.x = b.in(op).values(), p.bias = b.vector(op, 0), p.norm = {b.vector(op, 1), (float)op.number("eps")};
  if (op.integer("rotary_dim")) {
    const auto table = ws.rotary_tables.find(op.integer("table"));
    if (table == ws.rotary_tables.end())
      throw std::invalid_argument("no rotary table " + std::to_string(op.integer("table")));
    p.table = table->second;
  }
  p.parts = op.flag("overlapping") ? 2 : 1;
  p.positions = ws.data->positions(), p.where = ws.data->where(rows_group), p.row_tables = ws.data->row_tables();
  p.tables = ws.data->tables(rows_group), p.entry_tables = ws.data->tables(group);
  b.add_launch(kAllRows, [=, queue = b.queue](int rows) { compress(p, rows, queue); });
  return 0;
}

int bind_compressed_attention(Binding& b, size_t i) {
  const OpNode& op = b.ops[i];
  Workspace& ws = b.workspace;
  Attention a;
  a.cache = ws.cache_of(op), a.group = group_of(ws.program, op), a.queries = latent_heads(ws.program, op);
  a.scale = (float)op.number("scale"), a.sinks = b.vector(op, 0);
  a.qkv = b.in(op).values(), a.width = b.in(op).rows.width, a.out = b.out(op).rows, a.kept = b.in(op, 1).values();
  a.tables = ws.data->tables(op.integer("cache_group")), a.partials = ws.partials.as<float>();
  if (op.inputs.size() > 2) a.selected = b.in(op, 2).values(), a.selected_width = b.in(op, 2).rows.width;
  a.max_splits = ws.max_splits, a.arrivals = ws.arrivals.as<int>(), a.given_up = b.queue.scratch.given_up;
  const ListShape shape = list_shape(ws.program, op);
  a.listed = shape.window, a.positions = ws.data->positions();
  if (shape.rate) {
    a.entries = ws.entries_of(op.integer("entry_group"), op.integer("entry_layer"), shape.rate);
    a.entry_tables = ws.data->tables(op.integer("entry_group"));
  }
  if (a.out.values == a.qkv) refuse("op compressed_attention in place");
  const int* where = ws.data->where(op.integer("cache_group"));
  const int wanted = 3 * ws.device.sm_count(),
            most = (shape.length(ws.limits.max_length) + kKvSplitTokens - 1) / kKvSplitTokens;
  const int list = ws.list_of(shape);
  const AttentionAlgo algo = ws.kernels.compressed_attention(a.cache, a.group);
  b.launches.push_back([=, data = &*ws.data, queue = b.queue](const Binding::Size& size) {
    if (!size.rows) return;
    const int tiles = std::max(size.decode_tiles * a.cache.kv_heads, 1);
    const int sharers = size.kv_splits > 1 && most > 1 ? std::clamp(wanted / tiles, 2, most) : 1;
    store_latent(a, where, size.rows, queue);
    attend_latent_decode(a, algo, data->decode_lists(list), size.decode_tiles, sharers, queue);
    attend_latent_selected(a, algo, data->prefill_lists(list), size.selected_tiles, queue);
  });
  return 0;
}

const RegisterCudaOp kCompress(Op::compress, bind_compress),
    kCompressedAttention(Op::compressed_attention, bind_compressed_attention);

}  // namespace
}  // namespace as::cuda
