// How a step's attention is cut up among threads: the same for all layers of one geometry.
//
// A tile is up to kTileRows query rows (positions x query heads) of one sequence that share a KV head, so that a key is
// read once for all of them. A few adjacent tiles make a group, whose context a thread walks block after block, so that
// a block comes once from far for all of them.
//
// Few tiles (decode): threads share out the (tile, block) pairs evenly. Many: they take pieces from a counter, as
// contexts differ; a piece is a group, or a part of the context of one that is long beside the others. What threads
// have of tiles that several of them share is merged afterwards.
//
// Partial results of blocks are merged in two levels, whoever does it: ascending within runs of kRunBlocks blocks, then
// the runs ascending. So the bits are the same however it is cut, and of a shared tile one result for each run is kept,
// and for each block of a run that is shared itself. With a window a tile begins with the block that its first row's
// window begins in: rows see nothing of blocks that they have no part in, and what is merged first is taken as it is.
#pragma once
#include <algorithm>
#include <vector>

#include "batch/batch.h"
#include "cpu/cache.h"
#include "cpu/core.h"
#include "cpu/kernels/kernels.h"

namespace as {

constexpr int kGroupTiles = 4;
constexpr int kRunBlocks = 8;

// Heads of one rank in a layer. q head h (counted over all ranks) uses KV head h / group.
struct AttentionShape {
  int q_heads = 0, kv_heads = 0, head_dim = 0, q_head_begin = 0, group = 1, kv_begin = 0;
  int window = 0;  // how many positions a row sees; 0: all
  bool operator==(const AttentionShape& o) const {
    return q_heads == o.q_heads && kv_heads == o.kv_heads && head_dim == o.head_dim && q_head_begin == o.q_head_begin &&
           group == o.group && kv_begin == o.kv_begin && window == o.window;
  }
  // The first position that one at `position` sees.
  int first_seen(int position) const { return window ? std::max(0, position + 1 - window) : 0; }
};

// Query rows of one sequence that share a KV head: positions [position, position + positions), local q heads [head0,
// head1). They see something of the context's blocks [first, blocks).
struct Tile {
  int slot, row, position, positions, kv_head, head0, head1, first, blocks;
  int pair = 0;      // with pairs shared out: its first
  int partial = -1;  // with pieces: of its first run, if several threads have parts of it
  int stride = 0;    // from one run's partial result to the next one's
  bool shared = false;
  int heads() const { return head1 - head0; }
  int rows() const { return positions * heads(); }
  int first_run() const { return first / kRunBlocks; }
  bool begins_run(int block) const { return block % kRunBlocks == 0 || block == first; }
  int context() const { return position + positions; }
};

// A tile's block, and what is kept of it for merging when threads share the tile.
enum class Kept { nothing, block, run };
struct TileBlock {
  int tile, block;
  Kept kept;
  int partial;
};

// Blocks [begin, end) of the context of `count` adjacent tiles of one sequence and the same heads, the last of which
// sees most to the end, the first most from the beginning.
struct WorkUnit {
  int first, count, begin, end;
};

struct AttentionWork {
  AttentionWork(const AttentionShape& shape, const SpanLayout& layout, int threads, int max_length);
  void begin(const Batch& batch);
  float* partial(int index) const { return partials.as<float>() + index * partial_floats(); }
  size_t partial_floats() const;

  const AttentionShape shape;
  const SpanLayout layout;
  const int threads;
  std::vector<Tile> tiles;
  bool by_pairs = false;
  std::vector<TileBlock> pairs;
  std::vector<WorkUnit> units;  // the most expensive first, as far as is easily known
  std::vector<int> shared;      // tiles that several threads have parts of
  // Of each sequence one row, and one tile for each KV head: who attends to its last block can write the key before.
  bool one_tile_a_key = false;
  Buffer partials;
  Buffer scratch;                  // of each thread
  const BoundOp* first = nullptr;  // of the layers that share this: begins it

 private:
  void make_tiles(const Batch& batch);
  void share_pairs();
  void make_units();
};

// Memory that attention of a geometry takes for partial results and queries.
size_t attention_bytes(const SpanLayout& layout, int threads, int max_length);
// A thread's scratch memory: of a group's tiles partial results of a block, of a run and of all, prepared queries, and
// the heads of queries; then one head more.
size_t attention_scratch_bytes(const SpanLayout& layout);

}  // namespace as
