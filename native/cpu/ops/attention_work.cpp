#include "cpu/ops/attention_work.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cpu/pool.h"

namespace as {
namespace {

size_t partial_floats_of(const SpanLayout& layout) { return (size_t)kTileRows * (2 + layout.padded_dim); }

int runs_of(int blocks) { return (blocks + kRunBlocks - 1) / kRunBlocks; }
int runs_of(int begin, int end) { return runs_of(end) - begin / kRunBlocks; }

// Estimates of what takes as long as a tile's block: writing a key and a value takes a part of it, and so does
// converting a tile's queries.
constexpr double kWritingBlocks = 0.02, kQueryBlocks = 0.5;

// Where one thread's part ends and the next one's begins, at most one tile and one of its runs are shared. This memory
// also suffices for the parts of the longest context.
size_t partials_of(int threads, int max_length) {
  return (size_t)(threads - 1) * (runs_of(context_blocks(max_length)) + kRunBlocks - 1);
}

// Rows [first, last) of an item, by position, which see positions from `begin` on at most. They see as many as the op
// says, in a sequence that ends at `end`, or all up to `end` if `whole`.
struct Piece {
  int first, last, begin, end;
  bool whole = false;
};

std::vector<Piece> pieces_of(const Item& item, const Slot& slot, const AttentionShape& shape) {
  const int end = item.start + item.count;
  std::vector<Piece> pieces;
  int first = item.start;
  if (shape.segments && !slot.segments.empty()) {
    int begin = 0;
    for (int last : slot.segments) pieces.push_back({begin, last, begin, last, true}), begin = last;
    return pieces;
  }
  for (size_t i = 0; shape.images && i < slot.images.size(); i += 2) {
    const int begin = slot.images[i], last = slot.images[i + 1];
    if (last <= first || begin >= end) continue;
    if (first < begin) pieces.push_back({first, begin, 0, end});
    pieces.push_back({std::max(first, begin), last, 0, last, true});
    first = last;
  }
  if (first < end) pieces.push_back({first, end, 0, end, shape.bidirectional && !shape.window});
  return pieces;
}

}  // namespace

size_t attention_scratch_bytes(const SpanLayout& layout) {
  const size_t heads = kGroupTiles * kTileRows + 2;
  return kGroupTiles * (3 * partial_floats_of(layout) * sizeof(float) + query_bytes(layout)) +
         heads * layout.query_dim() * sizeof(float) +
         (layout.row_bytes ? layout.bytes + kBlockTokens * layout.row_bytes : 0);
}

size_t attention_bytes(const SpanLayout& layout, int threads, int max_length) {
  return partials_of(threads, max_length) * partial_floats_of(layout) * sizeof(float) +
         (size_t)threads * attention_scratch_bytes(layout);
}

AttentionWork::AttentionWork(const AttentionShape& shape, const SpanLayout& layout, int threads, int max_length)
    : shape(shape),
      layout(layout),
      threads(threads),
      partials(partials_of(threads, std::max(max_length, shape.longest(max_length))) * partial_floats_of(layout) *
                   sizeof(float),
               "partial results of attention"),
      scratch((size_t)threads * attention_scratch_bytes(layout), "scratch memory of attention") {}

size_t AttentionWork::partial_floats() const { return partial_floats_of(layout); }

void AttentionWork::begin(const Batch& batch) {
  tiles.clear(), units.clear(), pairs.clear(), shared.clear();
  make_tiles(batch);
  by_pairs = threads > 1 && (int)tiles.size() < 4 * threads;
  rows = (int)batch.rows.size();
  if (by_pairs) share_pairs();
  else make_units();
}

int AttentionWork::blocks_together(const TileBlock* run, int blocks) {
  int together = 1;
  while (together < blocks && run[together].partial == run->partial) together++;
  return together;
}

AttentionWork::Done AttentionWork::at(int position) const {
  const int count = (int)units.size();
  if (position == kOpPositions) return {rows, count, rows};
  const double writing = kWritingBlocks * shape.kv_heads * rows, converting = kWritingBlocks * shape.q_heads * rows,
               attending = costs.empty() ? 0 : costs.back();
  double done = (writing + attending + converting) * position / kOpPositions;
  if (done < writing) return {(int)(done / writing * rows), 0, 0};
  done -= writing;
  if (done < attending) return {rows, (int)(std::upper_bound(costs.begin(), costs.end(), done) - costs.begin()), 0};
  return {rows, count, std::min(rows, (int)((done - attending) / converting * rows))};
}

void AttentionWork::make_tiles(const Batch& batch) {
  one_tile_a_key = true;
  for (const Item& item : batch.items) {
    one_tile_a_key &= item.count == 1;
    const std::vector<Piece> pieces = pieces_of(item, batch.slot(item.slot), shape);
    one_tile_a_key &= !shape.listed;  // lists begin with the row's own position
    // So many rows see all positions.
    const int whole = shape.listed     ? 0
                      : shape.selected ? std::clamp(shape.selected - item.start, 0, item.count)
                                       : item.count;
    for (int kv = 0; kv < shape.kv_heads; kv++) {
      // Local query heads of this KV head. Global head h uses KV head h / group.
      const int global = kv + shape.kv_begin;
      const int head0 = std::max(0, global * shape.group - shape.q_head_begin);
      const int head1 = std::min(shape.q_heads, (global + 1) * shape.group - shape.q_head_begin);
      one_tile_a_key &= head1 > head0 && head1 - head0 <= kTileRows;
      for (int h = head0; h < head1; h += kTileRows) {
        const int heads = std::min(kTileRows, head1 - h), step = std::max(1, kTileRows / heads);
        for (const Piece& piece : pieces)
          for (int p = piece.first; p < std::min(piece.last, item.start + whole); p += step) {
            Tile tile{};
            tile.slot = item.slot, tile.row = item.row + p - item.start, tile.position = p;
            tile.positions = std::min({step, piece.last - p, item.start + whole - p});
            tile.kv_head = kv, tile.head0 = h, tile.head1 = h + heads;
            tile.begin = piece.begin, tile.end = piece.end, tile.whole = piece.whole;
            tile.first = std::max(piece.begin, shape.first_seen(p)) / kBlockTokens;
            tile.context = tile.end_seen(shape, p + tile.positions - 1);
            tile.blocks = context_blocks(tile.context);
            tiles.push_back(tile);
          }
      }
      for (int i = whole; i < item.count; i++) {
        const int list = shape.list_of(item.start + i);
        for (int h = head0; h < head1; h += kTileRows)
          tiles.push_back({item.slot, item.row + i, item.start + i, 1, kv, h, std::min(h + kTileRows, head1), 0, 0,
                           item.start + item.count, list, context_blocks(list), shape.listed > 0, list});
      }
    }
  }
}

// Assigns memory for the partial results of shared tiles: one for each run of blocks or, if a run is itself shared, one
// for the first thread's blocks and one for each later block.
void AttentionWork::share_pairs() {
  for (int t = 0; t < (int)tiles.size(); t++)
    for (int b = tiles[t].first; b < tiles[t].blocks; b++) pairs.push_back({t, b, Kept::nothing, 0});
  divide_pairs();
  std::vector<int> owner(pairs.size());
  for (int thread = 0; thread < threads; thread++) {
    const auto [p0, p1] = pairs_of(thread);
    std::fill(owner.begin() + p0, owner.begin() + p1, thread);
  }
  int kept = 0;
  int next = 0;
  for (int t = 0; t < (int)tiles.size(); t++) {
    Tile& tile = tiles[t];
    tile.pair = next, next += tile.blocks - tile.first;
    tile.shared = owner[tile.pair] != owner[next - 1];
    if (!tile.shared) continue;
    shared.push_back(t);
    for (int b = tile.first, end; b < tile.blocks; b = end) {
      end = std::min(tile.blocks, (b / kRunBlocks + 1) * kRunBlocks);
      const int count = end - b, p = tile.pair + b - tile.first;
      // The thread of the run's first blocks merges them, in their order. Later ones are merged after these.
      int together = 1;
      while (together < count && owner[p + together] == owner[p]) together++;
      for (int i = 0; i < count; i++)
        pairs[p + i].kept = i < together ? Kept::run : Kept::block,
                  pairs[p + i].partial = kept + std::max(0, i - together + 1);
      kept += 1 + count - together;
    }
  }
  if (kept * partial_floats() * sizeof(float) > partials.size())
    throw std::logic_error("attention keeps " + std::to_string(kept) + " partial results, more than its memory holds");
}

// Gives threads whole runs, which keep one result, if no thread then has over a thirtieth more than the most pairs of
// an equal division.
void AttentionWork::divide_pairs() {
  const int count = (int)pairs.size(), most = (count + threads - 1) / threads;
  std::vector<int> runs;  // where each begins, then where the last one ends
  for (int p = 0; p < count; p++)
    if (tiles[pairs[p].tile].begins_run(pairs[p].block)) runs.push_back(p);
  runs.push_back(count);
  ends.clear();
  int longest = 0;
  for (int thread = 0; thread < threads; thread++) {
    const int begin = thread ? ends.back() : 0;
    ends.push_back(runs[part((int)runs.size() - 1, thread, threads).second]);
    longest = std::max(longest, ends.back() - begin);
  }
  if (30 * longest <= 31 * most) return;
  for (int thread = 0; thread < threads; thread++) ends[thread] = part(count, thread, threads).second;
}

// Makes groups, longest contexts first. Groups that would keep one thread busy for long are divided between runs.
void AttentionWork::make_units() {
  const int most =
      std::min(kGroupTiles, std::max(1, (int)tiles.size() / (8 * threads)));  // several groups for each thread
  double total = 0;  // blocks; a group's are counted once, because reading them dominates
  for (int t = 0; t < (int)tiles.size(); t++) {
    const Tile& tile = tiles[t];
    // A group's tiles have ascending positions of the same heads, so its last tile sees most. Or they have the heads of
    // one row, for which positions are selected.
    const auto follows = [&](const Tile& last) {
      if (tile.selected || last.selected) return tile.selected && tile.row == last.row;
      return last.slot == tile.slot && last.head0 == tile.head0;
    };
    const bool joins = !units.empty() && units.back().count < most && follows(tiles[t - 1]);
    if (joins) total -= units.back().end - units.back().begin, units.back().count++;
    else units.push_back({t, 1, tile.first, 0});
    units.back().end = tile.blocks;
    total += tile.blocks - units.back().begin;
  }
  const int share = (int)(total / (4 * threads)), longest = kRunBlocks * std::max(1, share / kRunBlocks);
  const int room = (int)(partials.size() / (partial_floats() * sizeof(float)));
  std::vector<WorkUnit> cut;
  int kept = 0;
  for (const WorkUnit& whole : units) {
    const int results = runs_of(whole.begin, whole.end) * whole.count;
    if (threads == 1 || whole.end - whole.begin <= 2 * longest || kept + results > room) {
      cut.push_back(whole);
      continue;
    }
    for (int i = 0; i < whole.count; i++) {
      Tile& tile = tiles[whole.first + i];
      tile.shared = true, tile.stride = whole.count;
      tile.partial = kept + i + (tile.first_run() - whole.begin / kRunBlocks) * whole.count;
      shared.push_back(whole.first + i);
    }
    kept += results;
    for (int begin = whole.begin, end; begin < whole.end; begin = end) {
      end = std::min(whole.end, begin / kRunBlocks * kRunBlocks + longest);
      cut.push_back({whole.first, whole.count, begin, end});
    }
  }
  units = std::move(cut);
  std::stable_sort(units.begin(), units.end(),
                   [](const WorkUnit& a, const WorkUnit& b) { return a.end - a.begin > b.end - b.begin; });
  double total_cost = 0;
  costs.clear();
  for (const WorkUnit& unit : units) costs.push_back(total_cost += unit.count * (unit.end - unit.begin + kQueryBlocks));
}

}  // namespace as
