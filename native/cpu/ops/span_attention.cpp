// span_attention: writes the new keys and values, then attends over blocks of context (attention_work.h says who does
// which).
#include <algorithm>
#include <limits>

#include "cpu/ops/attention_work.h"
#include "cpu/ops/ops.h"

namespace as {
namespace {

// Nothing seen yet.
void clear(float* result, size_t floats) {
  std::fill_n(result, kTileRows, -std::numeric_limits<float>::infinity());
  std::fill(result + kTileRows, result + floats, 0.0f);
}

class SpanAttention : public BoundOp {
 public:
  SpanAttention(const Binding& b, std::shared_ptr<AttentionWork> work)
      : core_(b.core),
        shape_(work->shape),
        cache_(b.cache.layer(b.op.integer("layer"))),
        layout_(cache_.layout),
        in_(b.in()),
        out_(b.out()),
        work_(std::move(work)) {}

  void begin(const Batch& batch) override {
    if (this == work_->first) work_->begin(batch);
  }

  void run(const Batch& batch, int thread) override {
    core_.pool.guard([&] { write_cache(batch, thread); });
    if (thread == 0) work_->taken_groups.store(0, std::memory_order_relaxed);
    if (!core_.pool.barrier()) return;
    if (work_->split_blocks) attend_split(batch, thread);
    else attend_groups(batch, thread);
  }

 private:
  struct BlockSpans {
    const void *block[kBlockTokens / kKeyGroup], *next[kBlockTokens / kKeyGroup];
  };

  void write_cache(const Batch& batch, int thread);
  AttentionTile prepare_tile(const Tile& tile, char* queries) const;
  int block_spans(const Batch& batch, const Tile& tile, int block, const void** spans) const;
  BlockSpans spans_of(const Batch& batch, const Tile& tile, int block, const Tile& next, int next_block) const;
  void take_block(AttentionTile& a, const Tile& tile, int block, const BlockSpans& spans, bool cold,
                  float* partial) const;
  void merge_block(const Tile& tile, int block, int row0, int row1, const float* partial, float* result) const;
  void merge_ascending(const Tile& tile, int block, const float* partial, float* run, float* result) const;
  void finish_rows(const Tile& tile, int row0, int row1, const float* result) const;
  void attend_groups(const Batch& batch, int thread);
  void attend_split(const Batch& batch, int thread);

  const Core& core_;
  const AttentionShape shape_;
  const LayerCache cache_;
  const SpanLayout layout_;
  const Tensor in_, out_;
  const std::shared_ptr<AttentionWork> work_;
};

void SpanAttention::write_cache(const Batch& batch, int thread) {
  const int dim = shape_.head_dim, width = in_.width;
  auto [r0, r1] = part((long)batch.rows.size(), thread, core_.pool.size());
  // Two tokens of a pair of values, which may share a byte, are one thread's: the one that has the first.
  auto splits = [&](int r) {
    return r > 0 && r < (int)batch.rows.size() && batch.rows[r].position % 2 &&
           batch.rows[r - 1].slot == batch.rows[r].slot;
  };
  r0 += splits(r0), r1 += splits(r1);
  for (int r = r0; r < r1; r++) {
    const Row& row = batch.rows[r];
    const int span = batch.slot(row.slot).spans[shape_.cache_group][row.position / layout_.span_size],
              token = row.position % layout_.span_size;
    const float* qkv = in_.data + (size_t)r * width;
    for (int h = 0; h < shape_.kv_heads; h++) {
      const float* key = qkv + (size_t)(shape_.q_heads + h) * dim;
      write_token(layout_, cache_.span(span, h), token, key, key + (size_t)shape_.kv_heads * dim);
    }
  }
}

AttentionTile SpanAttention::prepare_tile(const Tile& tile, char* queries) const {
  const int heads = tile.head1 - tile.head0;
  AttentionTile a{};
  a.rows = tile.rows(), a.scale = shape_.scale, a.layout = &layout_;
  for (int i = 0; i < tile.positions; i++)
    for (int h = 0; h < heads; h++) {
      a.q[i * heads + h] = in_.data + (size_t)(tile.row + i) * in_.width + (size_t)(tile.head0 + h) * shape_.head_dim;
      a.context[i * heads + h] = tile.position + i + 1;
    }
  core_.k.prepare_queries(a, queries);
  a.prepared = queries;
  return a;
}

// Where the spans of a tile's block are; how many.
int SpanAttention::block_spans(const Batch& batch, const Tile& tile, int block, const void** spans) const {
  const std::vector<int32_t>& slot_spans = batch.slot(tile.slot).spans[shape_.cache_group];
  const int first = block * (kBlockTokens / layout_.span_size),
            tokens = std::min(kBlockTokens, tile.context() - block * kBlockTokens);
  const int count = (tokens + layout_.span_size - 1) / layout_.span_size;
  for (int i = 0; i < count; i++) spans[i] = cache_.span(slot_spans[first + i], tile.kv_head);
  return count;
}

// The spans of a tile's block, and of the one to prefetch meanwhile.
SpanAttention::BlockSpans SpanAttention::spans_of(const Batch& batch, const Tile& tile, int block, const Tile& next,
                                                  int next_block) const {
  BlockSpans found;
  const int count = block_spans(batch, tile, block, found.block);
  for (int i = block_spans(batch, next, next_block, found.next); i < count; i++) found.next[i] = found.block[i];
  return found;
}

// partial: kTileRows maxima, as many sums, then the rows' vectors.
void SpanAttention::take_block(AttentionTile& a, const Tile& tile, int block, const BlockSpans& spans, bool cold,
                               float* partial) const {
  a.begin = block * kBlockTokens;
  a.tokens = std::min(kBlockTokens, tile.context() - a.begin);
  a.spans = spans.block, a.next = spans.next, a.cold = cold;
  a.maximum = partial, a.sum = partial + kTileRows, a.out = partial + 2 * kTileRows;
}

// Merges the partial result of a block, or of a run that begins with it, of rows [row0, row1).
void SpanAttention::merge_block(const Tile& tile, int block, int row0, int row1, const float* partial,
                                float* result) const {
  const int padded = layout_.padded_dim, heads = tile.head1 - tile.head0;
  row0 = std::max(row0, (block * kBlockTokens - tile.position) * heads);  // rows before see nothing of it
  if (row0 >= row1) return;
  core_.k.merge(row1 - row0, result + row0, result + kTileRows + row0, result + 2 * kTileRows + (size_t)row0 * padded,
                partial + row0, partial + kTileRows + row0, partial + 2 * kTileRows + (size_t)row0 * padded, padded);
}

void SpanAttention::finish_rows(const Tile& tile, int row0, int row1, const float* result) const {
  const int heads = tile.head1 - tile.head0;
  for (int r = row0; r < row1; r++) {
    float* y =
        out_.data + (size_t)(tile.row + r / heads) * out_.width + (size_t)(tile.head0 + r % heads) * shape_.head_dim;
    const float inverse = 1.0f / result[kTileRows + r],
                *vector = result + 2 * kTileRows + (size_t)r * layout_.padded_dim;
    for (int d = 0; d < shape_.head_dim; d++) y[d] = vector[d] * inverse;
  }
}

// Merges the partial result of all of a tile's next block. The first run is the result's beginning.
void SpanAttention::merge_ascending(const Tile& tile, int block, const float* partial, float* run,
                                    float* result) const {
  const int place = block % kRunBlocks, first = block - place;
  float* target = first ? run : result;
  if (place == 0) clear(target, work_->partial_floats());
  merge_block(tile, block, 0, tile.rows(), partial, target);
  if (first && (place == kRunBlocks - 1 || block == tile.blocks - 1))
    merge_block(tile, first, 0, tile.rows(), run, result);
}

void SpanAttention::attend_groups(const Batch& batch, int thread) {
  AttentionWork& work = *work_;
  const size_t floats = work.partial_floats();
  float* partials = reinterpret_cast<float*>(work_->scratch.as() + thread * attention_scratch_bytes(layout_));
  float *runs = partials + kGroupTiles * floats, *results = runs + kGroupTiles * floats;
  char* queries = reinterpret_cast<char*>(results + kGroupTiles * floats);
  AttentionTile prepared[kGroupTiles];
  for (int taken; (taken = work.taken_groups.fetch_add(1, std::memory_order_relaxed)) < (int)work.groups.size();) {
    const TileGroup& group =
        work.groups[work.groups.size() - 1 - taken];  // a prompt's last positions see most: these first
    const Tile *tiles = &work.tiles[group.first], &longest = tiles[group.count - 1];
    for (int i = 0; i < group.count; i++) { prepared[i] = prepare_tile(tiles[i], queries + i * query_bytes(layout_)); }
    int first = 0;  // tiles before see nothing of the block
    for (int b = 0; b < longest.blocks; b++) {
      while (b >= tiles[first].blocks) first++;
      const BlockSpans spans = spans_of(batch, longest, b, longest, std::min(b + 1, longest.blocks - 1));
      for (int i = first; i < group.count; i++)
        take_block(prepared[i], tiles[i], b, spans, i == first, partials + i * floats);
      core_.k.attend(prepared + first, group.count - first);
      for (int i = first; i < group.count; i++)
        merge_ascending(tiles[i], b, partials + i * floats, runs + i * floats, results + i * floats);
    }
    for (int i = 0; i < group.count; i++) finish_rows(tiles[i], 0, tiles[i].rows(), results + i * floats);
  }
  core_.k.end_attention();
}

void SpanAttention::attend_split(const Batch& batch, int thread) {
  AttentionWork& work = *work_;
  const size_t floats = work.partial_floats();
  float* block_result = reinterpret_cast<float*>(work_->scratch.as() + thread * attention_scratch_bytes(layout_));
  float *run_result = block_result + floats, *result = run_result + floats;
  char* queries = reinterpret_cast<char*>(block_result + 3 * kGroupTiles * floats);
  auto kept = [&](const TileBlock& pair) { return work.partial(pair.partial); };
  const auto [p0, p1] = part((long)work.pairs.size(), thread, core_.pool.size());
  AttentionTile prepared;
  for (int p = p0; p < p1; p++) {
    const TileBlock &pair = work.pairs[p], &next = work.pairs[std::min(p + 1, p1 - 1)];
    const Tile& tile = work.tiles[pair.tile];
    const int block = pair.block;
    if (p == p0 || block == 0) prepared = prepare_tile(tile, queries);
    const BlockSpans spans = spans_of(batch, tile, block, work.tiles[next.tile], next.block);
    take_block(prepared, tile, block, spans, true, pair.kept == Kept::block ? kept(pair) : block_result);
    core_.k.attend(&prepared, 1);
    if (pair.kept == Kept::block) continue;
    if (pair.kept == Kept::run) {
      if (block % kRunBlocks == 0) clear(kept(pair), floats);
      merge_block(tile, block, 0, tile.rows(), block_result, kept(pair));
      continue;
    }
    merge_ascending(tile, block, block_result, run_result, result);
    if (block == tile.blocks - 1) finish_rows(tile, 0, tile.rows(), result);
  }
  core_.k.end_attention();
  if (!core_.pool.barrier()) return;
  int rows = 0;
  for (const Tile& tile : work.tiles) rows += tile.shared ? tile.rows() : 0;
  const auto [r0, r1] = part(rows, thread, core_.pool.size());
  int before = 0;  // rows of the tiles before
  for (const Tile& tile : work.tiles) {
    if (!tile.shared) continue;
    const int row0 = std::max(0, r0 - before), row1 = std::min(tile.rows(), r1 - before);
    before += tile.rows();
    if (row0 >= row1) continue;
    for (int b = 0; b < tile.blocks; b += kRunBlocks) {
      const TileBlock* pairs = &work.pairs[tile.pair + b];
      const float* run = kept(*pairs);
      if (pairs->kept == Kept::block) {
        clear(run_result, floats);
        for (int i = 0; i < std::min(kRunBlocks, tile.blocks - b); i++)
          merge_block(tile, b + i, row0, row1, kept(pairs[i]), run_result);
        run = run_result;
      }
      if (b == 0) std::copy_n(run, floats, result);
      else merge_block(tile, b, row0, row1, run, result);
    }
    finish_rows(tile, row0, row1, result);
  }
}

AttentionShape shape_of(const OpNode& op) {
  AttentionShape s;
  s.q_heads = op.integer("q_heads"), s.kv_heads = op.integer("kv_heads"), s.head_dim = op.integer("head_dim");
  s.q_head_begin = op.integer("q_head_begin"), s.group = op.integer("group"), s.kv_begin = op.integer("kv_begin");
  s.scale = (float)op.number("scale");
  return s;
}

}  // namespace

std::unique_ptr<BoundOp> bind_span_attention(const Binding& b) {
  const AttentionShape shape = shape_of(b.op);
  for (const auto& work : b.attention)
    if (work->shape == shape) return std::make_unique<SpanAttention>(b, work);
  const SpanLayout& layout = b.cache.layer(b.op.integer("layer")).layout;
  auto work = std::make_shared<AttentionWork>(shape, layout, b.core.pool.size(), b.limits.max_length);
  b.attention.push_back(work);
  auto op = std::make_unique<SpanAttention>(b, work);
  work->first = op.get();
  return op;
}

}  // namespace as
