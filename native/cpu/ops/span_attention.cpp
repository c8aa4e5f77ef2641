// span_attention: writes the new keys and values, then attends over blocks of context (attention_work.h divides the
// work). Fused with head_norm and rope, heads are normed and rotated when they enter the cache or become queries.
// latent_attention: the same with a latent cache, whose one row a token is key and value for all heads. A thread packs
// each block for the kernels. Where an indexer selects a row's positions, the thread first gathers their rows.
// compressed_attention: the same, where all rows see lists of positions and entries.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>

#include "common/exact.h"
#include "cpu/ops/attention_work.h"
#include "cpu/ops/entries.h"
#include "cpu/ops/ops.h"

namespace as {
namespace {

// An empty partial result.
void clear(float* result, size_t floats) {
  std::fill_n(result, kTileRows, -std::numeric_limits<float>::infinity());
  std::fill(result + kTileRows, result + floats, 0.0f);
}

// A norm or rotation that is applied to the heads in columns [begin, end).
struct HeadStep {
  int begin, end;
  std::vector<float> norm;  // empty: a rotation
  float eps;
  std::shared_ptr<RotaryTable> table;
  Rotation rotate;
};

// A thread's memory for a step (attention_scratch_bytes).
struct Scratchpad {
  float *partials, *runs, *results;  // of each tile of a group
  char* queries;
  float *heads, *key;       // key: and a value after it
  char *packed, *gathered;  // a block of a latent cache; its rows, if they are selected
};

class SpanAttention : public BoundOp {
 public:
  SpanAttention(const Binding& b, std::shared_ptr<AttentionWork> work)
      : core_(b.core), work_(std::move(work)), shape_(work_->shape), layout_(work_->layout) {
    const Part *latent = b.part(Op::latent_attention), *compressed = b.part(Op::compressed_attention);
    const Part& op = latent ? *latent : compressed ? *compressed : *b.part(Op::span_attention);
    cache_ = b.cache.layer(op.op.integer("cache_group"), op.op.integer("layer"));
    cache_group_ = op.op.integer("cache_group");
    in_ = op.in(), out_ = op.out();
    one_tile_ = layout_, one_tile_.for_one_tile = latent || compressed;
    scale_ = (float)op.op.number("scale");
    if (latent) {
      rotated_ = op.in(1), rows_ = op.in(2);
      if (shape_.selected) selected_ = op.in(3);
      return;
    }
    if (compressed) {
      rows_ = op.in(1), sinks_ = op.vector(0);
      if (shape_.selected) selected_ = op.in(2);
      if (!shape_.rate) return;
      entries_.group = op.op.integer("entry_group"), entries_.rate = shape_.rate;
      entries_.cache = b.cache.layer(entries_.group, op.op.integer("entry_layer"));
      entries_.span_size = cache_.layout.span_size;
      return;
    }
    soft_cap_ = (float)op.op.number("soft_cap"), logn_ = op.op.number("logn");
    writes_ = op.op.integer("kv_heads") > 0;
    if (op.op.flag("sinks")) sinks_ = op.vector(0);
    if (op.op.flag("alibi")) slopes_ = op.vector(op.op.flag("sinks"));
    for (const Part& part : b.parts) {
      if (&part == &b.parts.back()) break;
      HeadStep step{};
      step.begin = part.op.integer("offset");
      step.end = step.begin + part.op.integer("heads") * part.op.integer("head_dim");
      if (part.is(Op::head_norm)) step.norm = norm_weight(part), step.eps = (float)part.op.number("eps");
      else step.table = rotary_table(b, part.op.integer("table")), step.rotate = rotation(b, part.op);
      steps_.push_back(std::move(step));
    }
  }

  void begin(const Batch& batch) override {
    if (this == work_->first) work_->begin(batch);
    taken_.store(0, std::memory_order_relaxed);
  }

  void run(const Batch& batch, int thread) override {
    if (writes_ && !work_->one_tile_a_key) {
      core_.pool.guard([&] { write_cache(batch, {0, (int)batch.rows.size()}, thread); });
      if (!core_.pool.barrier()) return;
    }
    core_.pool.guard([&] {
      const AttentionScope scope(core_.k);
      if (work_->by_pairs) attend_pairs(batch, thread);
      else attend_units(batch, (int)work_->units.size(), thread);
    });
    const int rows = (int)batch.rows.size();
    const bool converts = out_.is_converted(rows);
    if ((work_->shared.empty() && !converts) || !core_.pool.barrier()) return;
    if (converts) finish_by_rows({0, rows}, thread);
    else finish_by_tiles(thread);
  }

  // Keys and values are written first, then units are attended to in the order of the list, then rows are converted for
  // the following linear.
  void run_share(const Batch& batch, const Share& share, int thread) override {
    if (work_->by_pairs || work_->one_tile_a_key) return BoundOp::run_share(batch, share, thread);
    const AttentionWork::Done from = work_->at(share.begin), to = work_->at(share.end);
    if (writes_ && from.written < to.written) {
      core_.pool.guard([&] { write_cache(batch, {from.written, to.written}, thread); });
      if (!core_.pool.barrier()) return;
    }
    if (from.units < to.units) {
      core_.pool.guard([&] {
        const AttentionScope scope(core_.k);
        attend_units(batch, to.units, thread);
      });
      if (!core_.pool.barrier()) return;
    }
    if (out_.is_converted((int)batch.rows.size())) finish_by_rows({from.converted, to.converted}, thread);
    else if (share.ends()) finish_by_tiles(thread);
  }

 private:
  struct BlockSpans {
    const void *block[kBlockTokens / kKeyGroup], *next[kBlockTokens / kKeyGroup];
    const void* packed = nullptr;  // of a latent cache
  };

  Scratchpad scratch(int thread) const;
  const float* head(int row, int index, float* room) const;
  void write_row(const Batch& batch, int row, int kv_head, float* room) const;
  void write_cache(const Batch& batch, const RowRange& range, int thread) const;
  AttentionTile make_tile(const Tile& tile, const SpanLayout& layout, char* queries, float* heads) const;
  int block_spans(const Batch& batch, const Tile& tile, int block, const void** spans) const;
  BlockSpans spans_of(const Batch& batch, const Tile& tile, const SpanLayout& layout, int block, const Tile& next,
                      int next_block, const Scratchpad& s) const;
  void gather(const Batch& batch, const Tile& tile, int block, char* rows) const;
  const char* listed_row(const Batch& batch, const Tile& tile, int index) const;
  void take_block(AttentionTile& a, const Tile& tile, int block, const BlockSpans& spans, bool cold,
                  float* partial) const;
  void merge_block(const Tile& tile, int block, int row0, int row1, const float* partial, float* result) const;
  void merge_run(const Tile& tile, int run, int row0, int row1, const float* partial, float* result) const;
  void merge_blocks(const Tile& tile, int begin, int end, int row0, int row1, const float* partial,
                    float* result) const;
  void merge_ascending(const Tile& tile, int block, const float* partial, float* run, float* result) const;
  void finish_rows(const Tile& tile, int row0, int row1, const float* result) const;
  void attend_unit(const Batch& batch, const WorkUnit& unit, const Scratchpad& s) const;
  void attend_units(const Batch& batch, int end, int thread);
  void attend_pairs(const Batch& batch, int thread) const;
  void copy_rows(const float* from, int row0, int row1, float* to) const;
  void finish_shared(const Tile& tile, int row0, int row1, const Scratchpad& s) const;
  void finish_by_tiles(int thread) const;
  void finish_by_rows(const RowRange& range, int thread) const;

  const Core& core_;
  const std::shared_ptr<AttentionWork> work_;
  const AttentionShape& shape_;
  const SpanLayout& layout_;
  SpanLayout one_tile_;  // the same for blocks that a single tile takes
  LayerCache cache_;
  int cache_group_;     // which of a slot's span tables to use
  bool writes_ = true;  // keys and values; otherwise an earlier op has written them
  Tensor in_, out_;
  // Of latent_attention: the rotated part of queries; what the cache keeps; positions that an indexer selects.
  // compressed_attention has the latter two, and entries.
  Tensor rotated_, rows_, selected_;
  EntryCache entries_;
  std::vector<HeadStep> steps_;
  float scale_, soft_cap_ = 0;
  double logn_ = 0;
  const float *sinks_ = nullptr, *slopes_ = nullptr;  // of each head
  std::atomic<int> taken_{0};
};

Scratchpad SpanAttention::scratch(int thread) const {
  const size_t floats = kGroupTiles * work_->partial_floats();
  Scratchpad s;
  s.partials = reinterpret_cast<float*>(work_->scratch.as() + thread * attention_scratch_bytes(layout_));
  s.runs = s.partials + floats, s.results = s.runs + floats;
  s.queries = reinterpret_cast<char*>(s.results + floats);
  s.heads = reinterpret_cast<float*>(s.queries + kGroupTiles * query_bytes(layout_));
  s.key = s.heads + (size_t)kGroupTiles * kTileRows * layout_.query_dim();
  s.packed = reinterpret_cast<char*>(s.key + 2 * layout_.query_dim());
  s.gathered = s.packed + layout_.bytes;
  return s;
}

// A head of a row after norm and rotation: either in place or in `room`. Latent attention: both parts of a query.
const float* SpanAttention::head(int row, int index, float* room) const {
  const int dim = shape_.head_dim, column = index * dim;
  const float* x = in_.row(row) + column;
  if (shape_.rope_dim) {
    std::copy_n(x, dim, room);
    std::copy_n(rotated_.row(row) + (size_t)index * shape_.rope_dim, shape_.rope_dim, room + dim);
    return room;
  }
  bool copied = false;
  for (const HeadStep& step : steps_) {
    if (column < step.begin || column >= step.end) continue;
    if (!copied) std::copy_n(x, dim, room);
    copied = true;
    if (!step.norm.empty()) core_.k.rms_norm(room, step.norm.data(), room, dim, step.eps);
    else {
      const size_t at = (size_t)row * step.table->half;
      step.rotate(room, step.table->cosine.data() + at, step.table->sine.data() + at, step.table->half);
    }
  }
  return copied ? room : x;
}

void SpanAttention::write_row(const Batch& batch, int row, int kv_head, float* room) const {
  const Row& r = batch.rows[row];
  const SpanLayout& stored = cache_.layout;
  const int span = batch.slot(r.slot).spans[cache_group_][r.position / stored.span_size];
  char* to = cache_.span(span, kv_head);
  if (stored.row_bytes) return write_latent(stored, to, r.position % stored.span_size, rows_.row(row));
  const float* key = head(row, shape_.q_heads + kv_head, room);
  const float* value = head(row, shape_.q_heads + shape_.kv_heads + kv_head, room + layout_.query_dim());
  write_token(stored, to, r.position % stored.span_size, key, value);
}

void SpanAttention::write_cache(const Batch& batch, const RowRange& range, int thread) const {
  const auto& rows = batch.rows;
  auto [r0, r1] = range.of(thread, core_.pool.size());
  // Both tokens of a pair of values belong to the thread of the first one, because they may share a byte.
  const auto splits = [&](int r) {
    return r > 0 && r < (int)rows.size() && rows[r].position % 2 && rows[r - 1].slot == rows[r].slot;
  };
  r0 += splits(r0), r1 += splits(r1);
  float* room = scratch(thread).key;
  for (int r = r0; r < r1; r++)
    for (int h = 0; h < shape_.kv_heads; h++) write_row(batch, r, h, room);
}

AttentionTile SpanAttention::make_tile(const Tile& tile, const SpanLayout& layout, char* queries, float* heads) const {
  AttentionTile a{};
  a.rows = tile.rows(), a.scale = scale_, a.soft_cap = soft_cap_, a.sloped = slopes_, a.layout = &layout;
  for (int i = 0; i < tile.positions; i++) {
    const int position = tile.position + i;
    for (int h = 0; h < tile.heads(); h++) {
      const int r = i * tile.heads() + h;
      float* room = heads + (size_t)r * layout_.query_dim();
      a.q[r] = head(tile.row + i, tile.head0 + h, room);
      if (logn_ && position + 1 > logn_) {
        if (a.q[r] != room) std::copy_n(a.q[r], shape_.head_dim, room), a.q[r] = room;
        core_.k.scale(room, (float)(exact::log(position + 1) / exact::log(logn_)), shape_.head_dim);
      }
      a.context[r] = tile.selected ? tile.selected : tile.end_seen(shape_, position);
      a.first[r] = std::max(tile.begin, shape_.first_seen(position));
      if (slopes_) a.slopes[r] = slopes_[tile.head0 + h];
    }
  }
  core_.k.convert_queries(a, queries);
  a.converted = queries;
  return a;
}

// Finds the spans of a tile's block; returns their number. A span before all rows' windows may belong to another
// sequence by now. The first visible span takes its place, where its tokens get weight 0.
int SpanAttention::block_spans(const Batch& batch, const Tile& tile, int block, const void** spans) const {
  const std::vector<int32_t>& slot_spans = batch.slot(tile.slot).spans[cache_group_];
  const int span_size = cache_.layout.span_size, first = block * (kBlockTokens / span_size),
            tokens = std::min(kBlockTokens, tile.context - block * kBlockTokens);
  const int count = (tokens + span_size - 1) / span_size;
  const int seen = shape_.first_seen(tile.position) / span_size;
  for (int i = 0; i < count; i++) spans[i] = cache_.span(slot_spans[std::max(first + i, seen)], tile.kv_head);
  return count;
}

// The spans of a tile's block, and of the block to prefetch meanwhile. The block of a latent cache is packed.
SpanAttention::BlockSpans SpanAttention::spans_of(const Batch& batch, const Tile& tile, const SpanLayout& layout,
                                                  int block, const Tile& next, int next_block,
                                                  const Scratchpad& s) const {
  BlockSpans found;
  int span_size = cache_.layout.span_size;
  if (tile.selected) {
    gather(batch, tile, block, s.gathered);
    found.block[0] = found.next[0] = s.gathered, span_size = kBlockTokens;
  } else {
    const int count = block_spans(batch, tile, block, found.block);
    int i = next.selected ? 0 : block_spans(batch, next, next_block, found.next);
    for (; i < count; i++) found.next[i] = found.block[i];
  }
  if (!cache_.layout.row_bytes) return found;
  const int tokens = std::min(kBlockTokens, tile.context - block * kBlockTokens);
  core_.k.pack_latent(layout, found.block, found.next, span_size, tokens, s.packed);
  found.packed = s.packed;
  return found;
}

// Copies the cache's rows of a block of a list, and zeros for the rest of the rows that kernels read.
void SpanAttention::gather(const Batch& batch, const Tile& tile, int block, char* rows) const {
  const size_t bytes = cache_.layout.row_bytes;
  const int begin = block * kBlockTokens, tokens = std::min(kBlockTokens, tile.context - begin);
  for (int i = 0; i < tokens; i++) std::memcpy(rows + i * bytes, listed_row(batch, tile, begin + i), bytes);
  std::memset(rows + tokens * bytes, 0, (kBlockTokens - tokens) * bytes);
}

// A row of a tile's list: of the positions that an indexer selects or, in compressed_attention, of the last positions
// and then of entries, all of them or those that an indexer selects.
const char* SpanAttention::listed_row(const Batch& batch, const Tile& tile, int index) const {
  const Slot& slot = batch.slot(tile.slot);
  int position;
  if (const int last = std::min(tile.position + 1, shape_.listed); !last) {
    position = (int)selected_.row(tile.row)[index];
  } else if (index < last) {
    position = tile.position + 1 - last + index;
  } else {
    const int entry = index - last;
    return entries_.row(slot, shape_.selected ? (int)selected_.row(tile.row)[entry] : entry);
  }
  const SpanLayout& stored = cache_.layout;
  return cache_.span(slot.spans[cache_group_][position / stored.span_size], 0) +
         position % stored.span_size * stored.row_bytes;
}

// partial: kTileRows maxima, then kTileRows sums, then the rows' vectors.
void SpanAttention::take_block(AttentionTile& a, const Tile& tile, int block, const BlockSpans& spans, bool cold,
                               float* partial) const {
  a.begin = block * kBlockTokens;
  a.tokens = std::min(kBlockTokens, tile.context - a.begin);
  a.spans = spans.block, a.next = spans.next, a.cold = cold;
  if (spans.packed) a.spans = a.next = &spans.packed, a.cold = false;  // packing has prefetched the next block
  a.maximum = partial, a.sum = partial + kTileRows, a.out = partial + 2 * kTileRows;
}

// Merges the partial result of blocks [begin, end) into rows [row0, row1).
void SpanAttention::merge_blocks(const Tile& tile, int begin, int end, int row0, int row1, const float* partial,
                                 float* result) const {
  const int padded = layout_.padded_dim;
  // What rows before row0 see ends before these blocks. The windows of rows from row1 on begin after them.
  const int seen_after = shape_.end_seen(tile.position, tile.end) - tile.position;  // by the tile's first row
  if (!tile.whole) row0 = std::max(row0, (begin * kBlockTokens - tile.position - seen_after + 1) * tile.heads());
  if (shape_.window)
    row1 = std::min((int64_t)row1, (end * (int64_t)kBlockTokens + shape_.window - 1 - tile.position) * tile.heads());
  if (row0 >= row1) return;
  core_.k.merge(row1 - row0, result + row0, result + kTileRows + row0, result + 2 * kTileRows + (size_t)row0 * padded,
                partial + row0, partial + kTileRows + row0, partial + 2 * kTileRows + (size_t)row0 * padded, padded);
}

void SpanAttention::merge_block(const Tile& tile, int block, int row0, int row1, const float* partial,
                                float* result) const {
  merge_blocks(tile, block, block + 1, row0, row1, partial, result);
}

void SpanAttention::merge_run(const Tile& tile, int run, int row0, int row1, const float* partial,
                              float* result) const {
  merge_blocks(tile, std::max(tile.first, run * kRunBlocks), std::min(tile.blocks, (run + 1) * kRunBlocks), row0, row1,
               partial, result);
}

// Merges the partial result of a tile's next block. Blocks of the first run are merged directly into `result`.
void SpanAttention::merge_ascending(const Tile& tile, int block, const float* partial, float* run,
                                    float* result) const {
  const int number = block / kRunBlocks;
  const bool later = number > tile.first_run();
  float* target = later ? run : result;
  if (tile.begins_run(block)) clear(target, work_->partial_floats());
  merge_block(tile, block, 0, tile.rows(), partial, target);
  if (later && (block % kRunBlocks == kRunBlocks - 1 || block == tile.blocks - 1))
    merge_run(tile, number, 0, tile.rows(), run, result);
}

void SpanAttention::finish_rows(const Tile& tile, int row0, int row1, const float* result) const {
  for (int r = row0; r < row1; r++) {
    float* y = out_.row(tile.row + r / tile.heads()) + (size_t)(tile.head0 + r % tile.heads()) * shape_.head_dim;
    const float* sums = result + 2 * kTileRows + (size_t)r * layout_.padded_dim;
    float sum = result[kTileRows + r];
    if (sinks_) sum += (float)exact::exp((double)sinks_[tile.head0 + r % tile.heads()] - result[r]);
    const float inverse = 1.0f / sum;
    for (int d = 0; d < shape_.head_dim; d++) y[d] = sums[d] * inverse;
  }
}

void SpanAttention::attend_unit(const Batch& batch, const WorkUnit& unit, const Scratchpad& s) const {
  const size_t floats = work_->partial_floats();
  const Tile *tiles = &work_->tiles[unit.first], &longest = tiles[unit.count - 1];
  const SpanLayout& layout = unit.count == 1 ? one_tile_ : layout_;
  AttentionTile converted[kGroupTiles];
  for (int i = 0; i < unit.count; i++)
    converted[i] = make_tile(tiles[i], layout, s.queries + i * query_bytes(layout_),
                             s.heads + (size_t)i * kTileRows * layout_.query_dim());
  if (writes_ && work_->one_tile_a_key && unit.end == longest.blocks)
    write_row(batch, longest.row, longest.kv_head, s.key);
  Tile all = longest;  // covers all tiles' positions, to locate the spans
  all.position = tiles->position, all.positions = longest.position + longest.positions - all.position;
  int first = 0, last = 0;  // tiles [first, last) see the block
  for (int b = unit.begin; b < unit.end; b++) {
    while (b >= tiles[first].blocks) first++;
    while (last < unit.count && tiles[last].first <= b) last++;
    const BlockSpans spans = spans_of(batch, all, layout, b, all, std::min(b + 1, unit.end - 1), s);
    for (int i = first; i < last; i++)
      take_block(converted[i], tiles[i], b, spans, i == first, s.partials + i * floats);
    core_.k.attend(converted + first, last - first);
    for (int i = first; i < last; i++) {
      const Tile& tile = tiles[i];
      if (!tile.shared) {
        merge_ascending(tile, b, s.partials + i * floats, s.runs + i * floats, s.results + i * floats);
        continue;
      }
      float* run = work_->partial(tile.partial + (b / kRunBlocks - tile.first_run()) * tile.stride);
      if (tile.begins_run(b)) clear(run, floats);
      merge_block(tile, b, 0, tile.rows(), s.partials + i * floats, run);
    }
  }
  for (int i = 0; i < unit.count; i++)
    if (!tiles[i].shared) finish_rows(tiles[i], 0, tiles[i].rows(), s.results + i * floats);
}

// Attends to the next units up to `end`, which threads take in turn. None is taken beyond it: the next share begins
// there.
void SpanAttention::attend_units(const Batch& batch, int end, int thread) {
  const Scratchpad s = scratch(thread);
  for (int next = taken_.load(std::memory_order_relaxed); next < end;)
    if (taken_.compare_exchange_weak(next, next + 1, std::memory_order_relaxed)) {
      attend_unit(batch, work_->units[next], s);
      next = taken_.load(std::memory_order_relaxed);
    }
}

void SpanAttention::attend_pairs(const Batch& batch, int thread) const {
  const AttentionWork& work = *work_;
  const size_t floats = work.partial_floats();
  const Scratchpad s = scratch(thread);
  const auto [p0, p1] = work.pairs_of(thread);
  AttentionTile converted;
  for (int p = p0; p < p1; p++) {
    const TileBlock &pair = work.pairs[p], &next = work.pairs[std::min(p + 1, p1 - 1)];
    const Tile& tile = work.tiles[pair.tile];
    const int block = pair.block;
    if (p == p0 || block == tile.first) converted = make_tile(tile, one_tile_, s.queries, s.heads);
    if (writes_ && work.one_tile_a_key && block == tile.blocks - 1) write_row(batch, tile.row, tile.kv_head, s.key);
    const BlockSpans spans = spans_of(batch, tile, one_tile_, block, work.tiles[next.tile], next.block, s);
    float* partial = pair.kept == Kept::block ? work.partial(pair.partial) : s.partials;
    take_block(converted, tile, block, spans, true, partial);
    core_.k.attend(&converted, 1);
    if (pair.kept == Kept::block) continue;
    if (pair.kept == Kept::run) {
      float* run = work.partial(pair.partial);
      if (tile.begins_run(block)) clear(run, floats);
      merge_block(tile, block, 0, tile.rows(), partial, run);
      continue;
    }
    merge_ascending(tile, block, partial, s.runs, s.results);
    if (block == tile.blocks - 1) finish_rows(tile, 0, tile.rows(), s.results);
  }
}

// Merges the threads' partial results of rows [row0, row1) of a shared tile.
void SpanAttention::finish_shared(const Tile& tile, int row0, int row1, const Scratchpad& s) const {
  for (int b = tile.first, end; b < tile.blocks; b = end) {
    const int number = b / kRunBlocks;
    end = std::min(tile.blocks, (number + 1) * kRunBlocks);
    const float* run;
    if (!work_->by_pairs) {
      run = work_->partial(tile.partial + (number - tile.first_run()) * tile.stride);
    } else {
      const TileBlock* pairs = &work_->pairs[tile.pair + b - tile.first];
      run = work_->partial(pairs->partial);
      const int together = work_->blocks_together(pairs, end - b);
      if (together < end - b) {
        copy_rows(run, row0, row1, s.runs);
        for (int i = together; i < end - b; i++)
          merge_block(tile, b + i, row0, row1, work_->partial(pairs[i].partial), s.runs);
        run = s.runs;
      }
    }
    if (b == tile.first) copy_rows(run, row0, row1, s.results);
    else merge_run(tile, number, row0, row1, run, s.results);
  }
  finish_rows(tile, row0, row1, s.results);
}

// Copies rows [row0, row1) of a partial result.
void SpanAttention::copy_rows(const float* from, int row0, int row1, float* to) const {
  const size_t padded = layout_.padded_dim, values = 2 * kTileRows + row0 * padded;
  std::copy(from + row0, from + row1, to + row0);
  std::copy(from + kTileRows + row0, from + kTileRows + row1, to + kTileRows + row0);
  std::copy_n(from + values, (row1 - row0) * padded, to + values);
}

void SpanAttention::finish_by_tiles(int thread) const {
  const Scratchpad s = scratch(thread);
  int rows = 0;
  for (int t : work_->shared) rows += work_->tiles[t].rows();
  const auto [r0, r1] = part(rows, thread, core_.pool.size());
  int before = 0;  // rows of the previous tiles
  for (int t : work_->shared) {
    const Tile& tile = work_->tiles[t];
    const int row0 = std::max(0, r0 - before), row1 = std::min(tile.rows(), r1 - before);
    before += tile.rows();
    if (row0 < row1) finish_shared(tile, row0, row1, s);
  }
}

// The same by whole rows of the output, which are converted for the following linear.
void SpanAttention::finish_by_rows(const RowRange& range, int thread) const {
  const Scratchpad s = scratch(thread);
  const auto [r0, r1] = range.of(thread, core_.pool.size());
  for (int t : work_->shared) {
    const Tile& tile = work_->tiles[t];
    const int first = std::max(r0, tile.row) - tile.row, last = std::min(r1, tile.row + tile.positions) - tile.row;
    if (first < last) finish_shared(tile, first * tile.heads(), last * tile.heads(), s);
  }
  for (int r = r0; r < r1; r++) core_.k.convert_row(*out_.converted_for, out_.row(r), out_.bytes(r));
}

AttentionShape shape_of(const OpNode& op) {
  AttentionShape s;
  const HeadRange keys = kv_heads_of(op);
  s.q_heads = op.integer("q_heads"), s.kv_heads = keys.count, s.head_dim = op.integer("head_dim");
  s.q_head_begin = op.integer("q_head_begin"), s.group = op.integer("group"), s.kv_begin = keys.begin;
  s.window = op.integer("window"), s.bidirectional = op.flag("bidirectional"), s.segments = op.flag("segments");
  s.images = op.flag("images");
  return s;
}

std::unique_ptr<BoundOp> bind_attention(const Binding& b, const AttentionShape& shape, const SpanLayout& layout) {
  for (const auto& work : b.attention)
    if (work->shape == shape) return std::make_unique<SpanAttention>(b, work);
  auto work = std::make_shared<AttentionWork>(shape, layout, b.core.pool.size(), b.limits.max_length);
  b.attention.push_back(work);
  auto attention = std::make_unique<SpanAttention>(b, work);
  work->first = attention.get();
  return attention;
}

}  // namespace

static std::unique_ptr<BoundOp> bind_span_attention(const Binding& b) {
  const OpNode& op = b.part(Op::span_attention)->op;
  return bind_attention(b, shape_of(op), b.cache.layer(op.integer("cache_group"), op.integer("layer")).layout);
}

static std::unique_ptr<BoundOp> bind_latent_attention(const Binding& b) {
  const Part& part = *b.part(Op::latent_attention);
  AttentionShape shape;
  shape.head_dim = part.op.integer("latent_dim"), shape.rope_dim = part.op.integer("rope_dim");
  shape.q_heads = shape.group = part.out().width / shape.head_dim, shape.kv_heads = 1;
  if (part.inputs.size() > 3) shape.selected = part.in(3).width, shape.rate = part.op.integer("rate");
  const SpanLayout& stored = b.cache.layer(part.op.integer("cache_group"), part.op.integer("layer")).layout;
  return bind_attention(b, shape, packed_layout(stored, kBlockTokens, shape.head_dim));
}

static std::unique_ptr<BoundOp> bind_compressed_attention(const Binding& b) {
  const Part& part = b.parts[0];
  AttentionShape shape;
  shape.head_dim = part.in(1).width;
  shape.q_heads = shape.group = part.out().width / shape.head_dim, shape.kv_heads = 1;
  shape.listed = part.op.integer("window"), shape.rate = part.op.integer("rate");
  if (part.inputs.size() > 2) shape.selected = part.in(2).width;
  const SpanLayout& stored = b.cache.layer(part.op.integer("cache_group"), part.op.integer("layer")).layout;
  return bind_attention(b, shape, packed_layout(stored, kBlockTokens, shape.head_dim));
}

const RegisterCpuOp kCompressedAttention({{Op::compressed_attention}}, bind_compressed_attention);
const RegisterCpuOp kSpanAttention({{Op::span_attention}}, bind_span_attention);
const RegisterCpuOp kLatentAttention({{Op::latent_attention}}, bind_latent_attention);

}  // namespace as
