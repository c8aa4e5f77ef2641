#include "cpu/ops/attention_work.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cpu/pool.h"

namespace as {
namespace {

size_t partial_floats_of(const SpanLayout& layout) { return (size_t)kTileRows * (2 + layout.padded_dim); }

size_t partials_bytes(const SpanLayout& layout, int threads, int max_length) {
  // Where one thread's part ends and the next one's begins, at most one tile is shared and one of its runs.
  const size_t blocks = ((size_t)max_length + kBlockTokens - 1) / kBlockTokens,
               runs = (blocks + kRunBlocks - 1) / kRunBlocks;
  return (size_t)(threads - 1) * (runs + kRunBlocks - 1) * partial_floats_of(layout) * sizeof(float);
}

}  // namespace

size_t attention_scratch_bytes(const SpanLayout& layout) {
  return kGroupTiles * (3 * partial_floats_of(layout) * sizeof(float) + query_bytes(layout));
}

size_t attention_bytes(const SpanLayout& layout, int threads, int max_length) {
  return partials_bytes(layout, threads, max_length) + (size_t)threads * attention_scratch_bytes(layout);
}

AttentionWork::AttentionWork(const AttentionShape& shape, const SpanLayout& layout, int threads, int max_length)
    : shape(shape),
      layout(layout),
      threads(threads),
      partials(partials_bytes(layout, threads, max_length), "partial results of attention"),
      scratch((size_t)threads * attention_scratch_bytes(layout), "scratch memory of attention") {}

size_t AttentionWork::partial_floats() const { return partial_floats_of(layout); }

void AttentionWork::begin(const Batch& batch) {
  tiles.clear(), groups.clear(), pairs.clear();
  for (const Item& w : batch.items) {
    for (int kv = 0; kv < shape.kv_heads; kv++) {
      // Local query heads of this KV head: global head h uses KV head h / group.
      const int global = kv + shape.kv_begin;
      const int head0 = std::max(0, global * shape.group - shape.q_head_begin);
      const int head1 = std::min(shape.q_heads, (global + 1) * shape.group - shape.q_head_begin);
      for (int h = head0; h < head1; h += kTileRows) {
        const int heads = std::min(kTileRows, head1 - h), step = std::max(1, kTileRows / heads);
        for (int i = 0; i < w.count; i += step) {
          const int positions = std::min(step, w.count - i), context = w.start + i + positions;
          tiles.push_back({w.slot, w.row + i, w.start + i, positions, kv, h, h + heads,
                           (context + kBlockTokens - 1) / kBlockTokens});
        }
      }
    }
  }
  split_blocks = threads > 1 && (int)tiles.size() < 4 * threads;
  if (split_blocks) {
    for (int t = 0; t < (int)tiles.size(); t++)
      for (int b = 0; b < tiles[t].blocks; b++) pairs.push_back({t, b, Kept::nothing, 0});
    share_pairs();
    return;
  }
  const int most =
      std::min(kGroupTiles, std::max(1, (int)tiles.size() / (8 * threads)));  // some groups for each thread
  for (int t = 0; t < (int)tiles.size(); t++) {
    const Tile& tile = tiles[t];
    // Later positions of the same heads: so a group's last tile sees most.
    const bool joins = !groups.empty() && groups.back().count < most && tiles[t - 1].slot == tile.slot &&
                       tiles[t - 1].head0 == tile.head0;
    if (joins) groups.back().count++;
    else groups.push_back({t, 1});
  }
}

// What threads keep of the tiles that several of them have a part of: a partial result for each run of blocks, and for
// each block of a run that they share too.
void AttentionWork::share_pairs() {
  std::vector<int> owner(pairs.size());
  for (int thread = 0; thread < threads; thread++) {
    const auto [p0, p1] = part((long)pairs.size(), thread, threads);
    std::fill(owner.begin() + p0, owner.begin() + p1, thread);
  }
  int kept = 0;
  for (int first = 0, tile = 0; tile < (int)tiles.size(); first += tiles[tile++].blocks) {
    const int blocks = tiles[tile].blocks;
    tiles[tile].pair = first;
    tiles[tile].shared = owner[first] != owner[first + blocks - 1];
    if (!tiles[tile].shared) continue;
    for (int b = 0; b < blocks; b += kRunBlocks) {
      const int count = std::min(kRunBlocks, blocks - b), p = first + b;
      const bool shared = owner[p] != owner[p + count - 1];
      for (int i = 0; i < count; i++)
        pairs[p + i].kept = shared ? Kept::block : Kept::run, pairs[p + i].partial = kept + (shared ? i : 0);
      kept += shared ? count : 1;
    }
  }
  if (kept * partial_floats() * sizeof(float) > partials.size())
    throw std::logic_error("attention keeps " + std::to_string(kept) + " partial results, more than there is room for");
}

}  // namespace as
