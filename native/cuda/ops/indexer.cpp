// indexer: stores the keys of a step's rows, scores the positions that each row sees, and selects the best. With a
// rate, it scores the entries that a compress op keeps.
#include "cuda/kernels/attention/indexer.h"

#include <algorithm>

#include "cuda/ops/ops.h"

namespace as::cuda {
namespace {

int bind_indexer(Binding& b, size_t i) {
  const OpNode& op = b.ops[i];
  Workspace& ws = b.workspace;
  if (op.flag("positions")) refuse("op indexer that outputs the positions of entries");
  const int rate = op.integer("rate"),
            max_length = rate ? std::max(ws.limits.max_length / rate, 1) : ws.limits.max_length;
  Attention stored;
  stored.cache = ws.cache_of(op), stored.kept = rate ? nullptr : b.in(op, 2).values();
  Indexer p;
  p.keys = stored.cache, p.queries = b.in(op).values(), p.weights = b.in(op, 1).values();
  if (rate) p.entries = ws.entries_of(op.integer("cache_group"), op.integer("layer"), rate);
  p.heads = b.in(op, 1).rows.width, p.selected = b.out(op).values(), p.width = b.out(op).rows.width;
  p.positions = ws.data->positions(), p.row_tables = ws.data->row_tables();
  p.tables = ws.data->tables(op.integer("cache_group")), p.scores = ws.index_scores.as<float>();
  p.stride = index_stride(max_length);
  p.most_rows = (int)std::min<size_t>(ws.limits.max_rows, ws.index_scores.size() / (p.stride * sizeof(float)));
  const int* where = ws.data->where(op.integer("cache_group"));
  b.launches.push_back([=, queue = b.queue](const Binding::Size& size) {
    if (!size.rows) return;
    if (!rate) store_latent(stored, where, size.rows, queue);
    for (int first = 0; first < size.rows; first += p.most_rows) {
      const int rows = std::min(p.most_rows, size.rows - first);
      score_positions(p, first, rows, size.prefills(), queue);
      select_positions(p, first, rows, queue);
    }
  });
  return 0;
}

const RegisterCudaOp kIndexer(Op::indexer, bind_indexer);

}  // namespace
}  // namespace as::cuda
