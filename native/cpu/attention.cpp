// Span attention of a step: writes the new keys and values, then attends tile by tile over blocks of context.
//
// A tile is up to kTileRows query rows (positions x query heads) of one sequence that share a KV head, so that a key is
// read once for all of them. Enough tiles: threads take groups of a few adjacent ones and walk a group's context, block
// after block, so that a block comes once from far for all of them; groups are taken from a counter, as their contexts
// differ. Few tiles (decode): threads share out the (tile, block) pairs, and what they have of tiles that several of
// them share is merged afterwards.
//
// Partial results of blocks are merged in two levels, whoever does it: ascending within runs of kRunBlocks blocks, then
// the runs ascending. So the bits are the same either way, and of a shared tile a thread has to keep one result for
// each of its runs.
#include <algorithm>
#include <limits>

#include "cpu/executor.h"

namespace as {

namespace {

constexpr int kGroupTiles = 4;
constexpr int kRunBlocks = 8;

size_t partial_floats(const SpanLayout& layout) { return (size_t)kTileRows * (2 + layout.padded_dim); }

}  // namespace

// A layer's spans are adjacent, a span's KV heads within: [layer][span][kv head]{span_layout.h}.
char* Executor::span_address(int layer, int span, int kv_head) const {
  return cache_.as() + layout_.bytes * (((size_t)layer * num_spans_ + span) * shape_.kv_heads + kv_head);
}

void Executor::make_tiles(const Plan& plan) {
  tiles_.clear(), groups_.clear(), pairs_.clear();
  int row = 0;
  for (const Work& w : plan.work) {
    for (int kv = 0; kv < shape_.kv_heads; kv++) {
      // Local query heads of this KV head: global head h uses KV head h / group.
      const int global = kv + shape_.kv_begin;
      const int head0 = std::max(0, global * shape_.group - shape_.q_head_begin);
      const int head1 = std::min(shape_.q_heads, (global + 1) * shape_.group - shape_.q_head_begin);
      for (int h = head0; h < head1; h += kTileRows) {
        const int heads = std::min(kTileRows, head1 - h), step = std::max(1, kTileRows / heads);
        for (int i = 0; i < w.count; i += step) {
          const int positions = std::min(step, w.count - i), context = w.start + i + positions;
          tiles_.push_back(
              {w.slot, row + i, w.start + i, positions, kv, h, h + heads, (context + kBlockTokens - 1) / kBlockTokens});
        }
      }
    }
    row += w.count;
  }
  split_blocks_ = pool_.size() > 1 && (int)tiles_.size() < 4 * pool_.size();
  if (split_blocks_) {
    for (int t = 0; t < (int)tiles_.size(); t++)
      for (int b = 0; b < tiles_[t].blocks; b++) pairs_.push_back({t, b, Kept::nothing, 0});
    share_pairs();
    return;
  }
  const int most =
      std::min(kGroupTiles, std::max(1, (int)tiles_.size() / (8 * pool_.size())));  // some groups for each thread
  for (int t = 0; t < (int)tiles_.size(); t++) {
    const Tile& tile = tiles_[t];
    // Later positions of the same heads: so a group's last tile sees most.
    const bool joins = !groups_.empty() && groups_.back().count < most && tiles_[t - 1].slot == tile.slot &&
                       tiles_[t - 1].head0 == tile.head0;
    if (joins) groups_.back().count++;
    else groups_.push_back({t, 1});
  }
}

// What threads keep of the tiles that several of them have a part of: a partial result for each run of blocks, and for
// each block of a run that they share too.
void Executor::share_pairs() {
  std::vector<int> owner(pairs_.size());
  for (int thread = 0; thread < pool_.size(); thread++) {
    const auto [p0, p1] = part((long)pairs_.size(), thread, pool_.size());
    std::fill(owner.begin() + p0, owner.begin() + p1, thread);
  }
  int kept = 0;
  for (int first = 0, tile = 0; tile < (int)tiles_.size(); first += tiles_[tile++].blocks) {
    const int blocks = tiles_[tile].blocks;
    tiles_[tile].pair = first;
    tiles_[tile].shared = owner[first] != owner[first + blocks - 1];
    if (!tiles_[tile].shared) continue;
    for (int b = 0; b < blocks; b += kRunBlocks) {
      const int count = std::min(kRunBlocks, blocks - b), p = first + b;
      const bool shared = owner[p] != owner[p + count - 1];
      for (int i = 0; i < count; i++)
        pairs_[p + i].kept = shared ? Kept::block : Kept::run, pairs_[p + i].partial = kept + (shared ? i : 0);
      kept += shared ? count : 1;
    }
  }
  if (kept * partial_floats(layout_) * sizeof(float) > partials_.size())
    throw std::logic_error("attention keeps " + std::to_string(kept) + " partial results, more than there is room for");
}

void Executor::write_cache(const Op& op, int thread) {
  const int dim = shape_.head_dim, width = in(op).width;
  auto [r0, r1] = part((long)rows_.size(), thread, pool_.size());
  // Two tokens of a pair of values, which may share a byte, are one thread's: the one that has the first.
  auto splits = [&](int r) {
    return r > 0 && r < (int)rows_.size() && rows_[r].position % 2 && rows_[r - 1].slot == rows_[r].slot;
  };
  r0 += splits(r0), r1 += splits(r1);
  for (int r = r0; r < r1; r++) {
    const Row& row = rows_[r];
    const int span = slots_[row.slot].spans[row.position / span_size_], token = row.position % span_size_;
    const float* qkv = in(op).data + (size_t)r * width;
    for (int h = 0; h < shape_.kv_heads; h++) {
      const float* key = qkv + (size_t)(shape_.q_heads + h) * dim;
      write_token(layout_, span_address(op.layer, span, h), token, key, key + (size_t)shape_.kv_heads * dim);
    }
  }
}

AttentionTile Executor::prepare_tile(const Op& op, const Tile& tile, char* queries) const {
  const int heads = tile.head1 - tile.head0;
  AttentionTile a{};
  a.rows = tile.rows(), a.scale = shape_.scale, a.layout = &layout_;
  for (int i = 0; i < tile.positions; i++)
    for (int h = 0; h < heads; h++) {
      a.q[i * heads + h] =
          in(op).data + (size_t)(tile.row + i) * in(op).width + (size_t)(tile.head0 + h) * shape_.head_dim;
      a.context[i * heads + h] = tile.position + i + 1;
    }
  k_.prepare_queries(a, queries);
  a.prepared = queries;
  return a;
}

// Where the spans of a tile's block are; how many.
int Executor::block_spans(int layer, const Tile& tile, int block, const void** spans) const {
  const std::vector<int32_t>& slot_spans = slots_[tile.slot].spans;
  const int first = block * (kBlockTokens / span_size_),
            tokens = std::min(kBlockTokens, tile.context() - block * kBlockTokens);
  const int count = (tokens + span_size_ - 1) / span_size_;
  for (int i = 0; i < count; i++) spans[i] = span_address(layer, slot_spans[first + i], tile.kv_head);
  return count;
}

// The spans of a tile's block, and of the one to prefetch meanwhile.
Executor::BlockSpans Executor::spans_of(int layer, const Tile& tile, int block, const Tile& next,
                                        int next_block) const {
  BlockSpans found;
  const int count = block_spans(layer, tile, block, found.block);
  for (int i = block_spans(layer, next, next_block, found.next); i < count; i++) found.next[i] = found.block[i];
  return found;
}

// partial: kTileRows maxima, as many sums, then the rows' vectors.
void Executor::take_block(AttentionTile& a, const Tile& tile, int block, const BlockSpans& spans, bool cold,
                          float* partial) const {
  a.begin = block * kBlockTokens;
  a.tokens = std::min(kBlockTokens, tile.context() - a.begin);
  a.spans = spans.block, a.next = spans.next, a.cold = cold;
  a.maximum = partial, a.sum = partial + kTileRows, a.out = partial + 2 * kTileRows;
}

// Merges the partial result of a block, or of a run that begins with it, of rows [row0, row1).
void Executor::merge_block(const Tile& tile, int block, int row0, int row1, const float* partial, float* result) const {
  const int padded = shape_.padded_dim, heads = tile.head1 - tile.head0;
  row0 = std::max(row0, (block * kBlockTokens - tile.position) * heads);  // rows before see nothing of it
  if (row0 >= row1) return;
  k_.merge(row1 - row0, result + row0, result + kTileRows + row0, result + 2 * kTileRows + (size_t)row0 * padded,
           partial + row0, partial + kTileRows + row0, partial + 2 * kTileRows + (size_t)row0 * padded, padded);
}

void Executor::finish_rows(const Op& op, const Tile& tile, int row0, int row1, const float* result) const {
  const int heads = tile.head1 - tile.head0;
  for (int r = row0; r < row1; r++) {
    float* y = out(op).data + (size_t)(tile.row + r / heads) * out(op).width +
               (size_t)(tile.head0 + r % heads) * shape_.head_dim;
    const float inverse = 1.0f / result[kTileRows + r],
                *vector = result + 2 * kTileRows + (size_t)r * shape_.padded_dim;
    for (int d = 0; d < shape_.head_dim; d++) y[d] = vector[d] * inverse;
  }
}

namespace {

// Nothing seen yet.
void clear(float* result, size_t floats) {
  std::fill_n(result, kTileRows, -std::numeric_limits<float>::infinity());
  std::fill(result + kTileRows, result + floats, 0.0f);
}

// A thread's scratch memory: of a group's tiles partial results of a block, of a run and of all, then queries.
size_t scratch_bytes(const SpanLayout& layout) {
  return kGroupTiles * (3 * partial_floats(layout) * sizeof(float) + query_bytes(layout));
}

}  // namespace

// Merges the partial result of all of a tile's next block. The first run is the result's beginning.
void Executor::merge_ascending(const Tile& tile, int block, const float* partial, float* run, float* result) const {
  const int place = block % kRunBlocks, first = block - place;
  float* target = first ? run : result;
  if (place == 0) clear(target, partial_floats(layout_));
  merge_block(tile, block, 0, tile.rows(), partial, target);
  if (first && (place == kRunBlocks - 1 || block == tile.blocks - 1))
    merge_block(tile, first, 0, tile.rows(), run, result);
}

size_t Executor::partials_bytes(const SpanLayout& layout, int threads, int max_length) {
  // Where one thread's part ends and the next one's begins, at most one tile is shared and one of its runs.
  const size_t blocks = ((size_t)max_length + kBlockTokens - 1) / kBlockTokens,
               runs = (blocks + kRunBlocks - 1) / kRunBlocks;
  return (size_t)(threads - 1) * (runs + kRunBlocks - 1) * partial_floats(layout) * sizeof(float);
}

size_t Executor::attention_bytes(const SpanLayout& layout, int threads, int max_length) {
  return partials_bytes(layout, threads, max_length) + (size_t)threads * scratch_bytes(layout);
}

void Executor::attend_groups(const Op& op, int thread) {
  const size_t floats = partial_floats(layout_);
  float* partials = reinterpret_cast<float*>(attention_scratch_.as() + thread * scratch_bytes(layout_));
  float *runs = partials + kGroupTiles * floats, *results = runs + kGroupTiles * floats;
  char* queries = reinterpret_cast<char*>(results + kGroupTiles * floats);
  AttentionTile prepared[kGroupTiles];
  for (int taken; (taken = taken_groups_.fetch_add(1, std::memory_order_relaxed)) < (int)groups_.size();) {
    const TileGroup& group = groups_[groups_.size() - 1 - taken];  // a prompt's last positions see most: these first
    const Tile *tiles = &tiles_[group.first], &longest = tiles[group.count - 1];
    for (int i = 0; i < group.count; i++) {
      prepared[i] = prepare_tile(op, tiles[i], queries + i * query_bytes(layout_));
    }
    int first = 0;  // tiles before see nothing of the block
    for (int b = 0; b < longest.blocks; b++) {
      while (b >= tiles[first].blocks) first++;
      const BlockSpans spans = spans_of(op.layer, longest, b, longest, std::min(b + 1, longest.blocks - 1));
      for (int i = first; i < group.count; i++)
        take_block(prepared[i], tiles[i], b, spans, i == first, partials + i * floats);
      k_.attend(prepared + first, group.count - first);
      for (int i = first; i < group.count; i++)
        merge_ascending(tiles[i], b, partials + i * floats, runs + i * floats, results + i * floats);
    }
    for (int i = 0; i < group.count; i++) finish_rows(op, tiles[i], 0, tiles[i].rows(), results + i * floats);
  }
  k_.end_attention();
}

void Executor::attend_split(const Op& op, int thread) {
  const size_t floats = partial_floats(layout_);
  float* block_result = reinterpret_cast<float*>(attention_scratch_.as() + thread * scratch_bytes(layout_));
  float *run_result = block_result + floats, *result = run_result + floats;
  char* queries = reinterpret_cast<char*>(block_result + 3 * kGroupTiles * floats);
  auto kept = [&](const Pair& pair) { return partials_.as<float>() + pair.partial * floats; };
  const auto [p0, p1] = part((long)pairs_.size(), thread, pool_.size());
  AttentionTile prepared;
  for (int p = p0; p < p1; p++) {
    const Pair &pair = pairs_[p], &next = pairs_[std::min(p + 1, p1 - 1)];
    const Tile& tile = tiles_[pair.tile];
    const int block = pair.block;
    if (p == p0 || block == 0) prepared = prepare_tile(op, tile, queries);
    const BlockSpans spans = spans_of(op.layer, tile, block, tiles_[next.tile], next.block);
    take_block(prepared, tile, block, spans, true, pair.kept == Kept::block ? kept(pair) : block_result);
    k_.attend(&prepared, 1);
    if (pair.kept == Kept::block) continue;
    if (pair.kept == Kept::run) {
      if (block % kRunBlocks == 0) clear(kept(pair), floats);
      merge_block(tile, block, 0, tile.rows(), block_result, kept(pair));
      continue;
    }
    merge_ascending(tile, block, block_result, run_result, result);
    if (block == tile.blocks - 1) finish_rows(op, tile, 0, tile.rows(), result);
  }
  k_.end_attention();
  if (!pool_.barrier()) return;
  int rows = 0;
  for (const Tile& tile : tiles_) rows += tile.shared ? tile.rows() : 0;
  const auto [r0, r1] = part(rows, thread, pool_.size());
  int before = 0;  // rows of the tiles before
  for (const Tile& tile : tiles_) {
    if (!tile.shared) continue;
    const int row0 = std::max(0, r0 - before), row1 = std::min(tile.rows(), r1 - before);
    before += tile.rows();
    if (row0 >= row1) continue;
    for (int b = 0; b < tile.blocks; b += kRunBlocks) {
      const Pair* pairs = &pairs_[tile.pair + b];
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
    finish_rows(op, tile, row0, row1, result);
  }
}

void Executor::span_attention(const Op& op, int thread) {
  pool_.guard([&] { write_cache(op, thread); });
  if (thread == 0) taken_groups_.store(0, std::memory_order_relaxed);
  if (!pool_.barrier()) return;
  if (split_blocks_) attend_split(op, thread);
  else attend_groups(op, thread);
}

}  // namespace as
