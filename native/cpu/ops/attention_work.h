// How a step's attention is cut up among threads: the same for all layers of one geometry.
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
#pragma once
#include <atomic>
#include <vector>

#include "batch/batch.h"
#include "cpu/cache.h"
#include "cpu/core.h"
#include "cpu/kernels/kernels.h"
#include "cpu/memory.h"

namespace as {

constexpr int kGroupTiles = 4;
constexpr int kRunBlocks = 8;

// Heads of one rank in a layer. q head h (counted over all ranks) uses KV head h / group.
struct AttentionShape {
  int q_heads = 0, kv_heads = 0, head_dim = 0, q_head_begin = 0, group = 1, kv_begin = 0;
  float scale = 1;
  int cache_group = 0;
  bool operator==(const AttentionShape& o) const {
    return q_heads == o.q_heads && kv_heads == o.kv_heads && head_dim == o.head_dim && q_head_begin == o.q_head_begin &&
           group == o.group && kv_begin == o.kv_begin && scale == o.scale && cache_group == o.cache_group;
  }
};

// Query rows of one sequence that share a KV head: positions [position, position + positions), local q heads [head0,
// head1).
struct Tile {
  int slot, row, position, positions, kv_head, head0, head1, blocks;
  int pair = 0;         // with blocks shared out: its first
  bool shared = false;  // several threads have blocks of it
  int rows() const { return positions * (head1 - head0); }
  int context() const { return position + positions; }
};

// A tile's block, and what is kept of it for merging when threads share the tile.
enum class Kept { nothing, block, run };
struct TileBlock {
  int tile, block;
  Kept kept;
  int partial;
};

// Adjacent tiles of one sequence and the same heads.
struct TileGroup {
  int first, count;
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
  std::vector<TileGroup> groups;
  std::atomic<int> taken_groups{0};
  bool split_blocks = false;  // few tiles: threads share out (tile, block) pairs
  std::vector<TileBlock> pairs;
  Buffer partials;
  Buffer scratch;                  // of each thread
  const BoundOp* first = nullptr;  // of the layers that share this: begins it

 private:
  void share_pairs();
};

// Memory that attention of a geometry takes for partial results and queries.
size_t attention_bytes(const SpanLayout& layout, int threads, int max_length);
// A thread's scratch memory: of a group's tiles partial results of a block, of a run and of all, then queries.
size_t attention_scratch_bytes(const SpanLayout& layout);

}  // namespace as
