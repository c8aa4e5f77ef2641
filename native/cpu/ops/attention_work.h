// How threads divide a step's attention. The division is the same for all layers of one geometry.
//
// A tile is up to kTileRows query rows (positions x query heads) of one sequence that share a KV head, so that a key is
// read once for all of them. A group is a few adjacent tiles. A thread processes a group's context block by block, so
// that a block comes from memory once for all of its tiles.
//
// With few tiles (decode), threads get equal numbers of (tile, block) pairs. With many, they take work units from a
// counter, because contexts differ. A work unit is a group, or a part of a long group's context. The results of tiles
// that several threads share are merged afterwards.
//
// Partial results of blocks are merged in a fixed tree: ascending within runs of kRunBlocks blocks, then the runs
// ascending. So the bits do not depend on the division. A shared tile keeps one result for each run. Of a run that is
// itself shared it keeps one for the first thread's blocks and one for each later block. With a window, a tile starts
// at the first block that its first row sees. Blocks that a row does not see do not change its result; the first block
// merged is copied.
#pragma once
#include <algorithm>
#include <utility>
#include <vector>

#include "batch/batch.h"
#include "cpu/cache.h"
#include "cpu/core.h"
#include "cpu/kernels/kernels.h"
#include "cpu/ops/entries.h"

namespace as {

constexpr int kGroupTiles = 4;
constexpr int kRunBlocks = 8;

// The heads of one rank in a layer. Query head h (counted over all ranks) uses KV head h / group.
struct AttentionShape {
  int q_heads = 0, kv_heads = 0, head_dim = 0, q_head_begin = 0, group = 1, kv_begin = 0;
  int window = 0;              // how many positions a row sees up to its own; 0: all
  bool bidirectional = false;  // a row sees as many after its own
  bool segments = false;       // a row sees those of its segment
  bool images = false;         // a row of an image sees all of it
  int rope_dim = 0;            // of a latent cache: features of keys after the head_dim that are values, too
  int selected = 0;            // how many positions an indexer selects for a row that sees more; 0: there is none
  // A row sees a list: as many last positions and, with a rate, entries of `rate` positions each, all of them or those
  // that an indexer selects. 0: no list. Then an indexer with a rate selects the positions of entries, and those behind
  // the last entry, rate - 1 at most.
  int listed = 0;
  int rate = 0;
  bool operator==(const AttentionShape& o) const {
    return q_heads == o.q_heads && kv_heads == o.kv_heads && head_dim == o.head_dim && q_head_begin == o.q_head_begin &&
           group == o.group && kv_begin == o.kv_begin && window == o.window && bidirectional == o.bidirectional &&
           segments == o.segments && images == o.images && rope_dim == o.rope_dim && selected == o.selected &&
           listed == o.listed && rate == o.rate;
  }
  // How long the list of a row at `position` is, of those for which an indexer selects positions if there is no list.
  int list_of(int position) const {
    if (!listed) return rate ? selected - (rate - 1) + (position + 1) % rate : selected;
    const int entries = entries_seen(position + 1, rate);
    return std::min(position + 1, listed) + (selected ? std::min(entries, selected) : entries);
  }
  // How many positions and entries a row of a context of that length sees at most.
  int longest(int context) const { return listed ? std::min(context, listed) + entries_seen(context, rate) : context; }
  // The first position that a row at `position` sees.
  int first_seen(int position) const { return window ? std::max(0, position + 1 - window) : 0; }
  // Where the positions end that a row at `position` sees, of a sequence with `end` positions.
  int end_seen(int position, int end) const {
    if (!bidirectional) return position + 1;
    return window ? std::min(end, position + window) : end;
  }
};

// Query rows of one sequence that share a KV head: positions [position, position + positions), local query heads
// [head0, head1). They see some of the blocks [first, blocks) of the context, which ends at position `context`, in a
// sequence, or a segment of one, with positions [begin, end). A row for which an indexer selects positions, or one that
// sees a list, has tiles of its own, whose context is the list.
struct Tile {
  int slot, row, position, positions, kv_head, head0, head1, first, begin, end, context, blocks;
  bool whole = false;  // its rows see all positions up to `end`
  int selected = 0;    // how long the list of what its row sees is; 0: it sees a range
  int pair = 0;        // if pairs are divided: its first pair
  int partial = -1;    // if several threads share it: the partial result of its first run
  int stride = 0;      // from one run's partial result to the next
  bool shared = false;
  // Where the positions end that its row at `position` sees.
  int end_seen(const AttentionShape& shape, int position) const { return whole ? end : shape.end_seen(position, end); }
  int heads() const { return head1 - head0; }
  int rows() const { return positions * heads(); }
  int first_run() const { return first / kRunBlocks; }
  bool begins_run(int block) const { return block % kRunBlocks == 0 || block == first; }
};

// What is kept of a tile's block for merging when threads share the tile; `run`: it is merged with the run's blocks
// before it.
enum class Kept { nothing, block, run };
struct TileBlock {
  int tile, block;
  Kept kept;
  int partial;
};

// Blocks [begin, end) of the context of `count` adjacent tiles with the same sequence and heads. The last tile's
// context ends last, the first one's begins first.
struct WorkUnit {
  int first, count, begin, end;
};

struct AttentionWork {
  AttentionWork(const AttentionShape& shape, const SpanLayout& layout, int threads, int max_length);
  void begin(const Batch& batch);
  // What shares have computed up to a position of the op: how many rows are written to the cache, how many units are
  // attended to, and then how many rows are converted for the op that reads them. Not of work that is divided by pairs.
  struct Done {
    int written, units, converted;
  };
  Done at(int position) const;
  // If pairs are divided: those of a thread, [first, end).
  std::pair<int, int> pairs_of(int thread) const { return {thread ? ends[thread - 1] : 0, ends[thread]}; }
  // If pairs are divided: how many of a run's blocks, from the first on, have one partial result.
  static int blocks_together(const TileBlock* run, int blocks);
  float* partial(int index) const { return partials.as<float>() + index * partial_floats(); }
  size_t partial_floats() const;

  const AttentionShape shape;
  const SpanLayout layout;
  const int threads;
  std::vector<Tile> tiles;
  bool by_pairs = false;
  std::vector<TileBlock> pairs;
  std::vector<int> ends;        // of each thread's pairs
  std::vector<WorkUnit> units;  // roughly the most expensive first
  std::vector<int> shared;      // tiles that several threads share
  // Every sequence has one row, and one tile for each KV head. So the thread that attends to the last block can write
  // the key first.
  bool one_tile_a_key = false;
  int rows = 0;               // of the step
  std::vector<double> costs;  // of the units up to each, its own included, in a tile's blocks
  Buffer partials;
  Buffer scratch;                  // of each thread
  const BoundOp* first = nullptr;  // first of the layers that share this: it initializes the step

 private:
  void make_tiles(const Batch& batch);
  void share_pairs();
  void divide_pairs();
  void make_units();
};

// Bytes that attention of a geometry uses for partial results and queries.
size_t attention_bytes(const SpanLayout& layout, int threads, int max_length);
// Bytes of a thread's scratch memory: for a group's tiles, partial results of a block, a run and the total, converted
// queries and the queries' heads; a key and a value; a packed block of a latent cache, and its selected rows.
size_t attention_scratch_bytes(const SpanLayout& layout);

}  // namespace as
