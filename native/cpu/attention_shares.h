// Which thread attends to which blocks of which tiles, when tiles differ in context by orders of magnitude: one
// sequence of 128k tokens among 32 short ones.
//
// All blocks of all tiles, tile after tile, are cut into one piece for each thread, of about equal cost. A tile that is
// cut leaves partial results, which are merged in the fixed tree: ascending within runs of kRunBlocks blocks, then the
// runs ascending. So a run that one thread has leaves one partial result; a run that is itself cut leaves one for each
// of its blocks. What is merged does not depend on where the cuts are: neither do the bits.
//
// A cut costs merging, so it moves to the end of a tile, or else of a run, if one is near (kSlack of a thread's share).
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

namespace as {

constexpr int kSharedRunBlocks = 8;

// What is shared out: a tile, or a group of tiles that read each block together.
struct SharedTile {
  int blocks;      // >= 1
  int block_cost;  // >= 1, in any unit: what is read of a block and what its rows compute
  bool whole;      // not to be cut
};

// Blocks [first, last) of a tile.
struct BlockRange {
  int tile, first, last;
};

struct AttentionShares {
  // Thread t has ranges [begin[t], begin[t + 1]), ascending.
  std::vector<BlockRange> ranges;
  std::vector<int> begin;

  // A tile that several threads have a part of, and where the partial results of its runs are.
  struct Run {
    int partial;
    bool cut;  // `partial` is its first block's, the others' follow
  };
  struct Cut {
    int tile, first_run;  // its runs are runs[first_run, ...)
  };
  std::vector<Cut> cuts;  // ascending by tile
  std::vector<Run> runs;
  int partials = 0;  // at most most_partials()

  // Of up to `threads` threads and tiles of up to `blocks` blocks.
  static size_t most_partials(int threads, size_t blocks) {
    const size_t runs = (blocks + kSharedRunBlocks - 1) / kSharedRunBlocks;
    return (size_t)(threads - 1) * (runs + kSharedRunBlocks - 1);
  }
};

inline AttentionShares share_attention(const std::vector<SharedTile>& tiles, int threads) {
  constexpr int64_t kSlack = 32;
  std::vector<int64_t> before{0};  // cost of the tiles before each, and of all
  for (const SharedTile& tile : tiles) {
    if (tile.blocks < 1 || tile.block_cost < 1)
      throw std::invalid_argument("a tile of attention has " + std::to_string(tile.blocks) + " blocks of cost " +
                                  std::to_string(tile.block_cost) + "; both must be positive");
    before.push_back(before.back() + (int64_t)tile.blocks * tile.block_cost);
  }
  const int64_t total = before.back(), slack = total / threads / kSlack;

  struct Place {
    int tile, block;
    bool operator<(const Place& o) const { return tile != o.tile ? tile < o.tile : block < o.block; }
  };
  const auto place_of = [&](int64_t cost) -> Place {  // where about `cost` lies before
    const int t = (int)(std::upper_bound(before.begin(), before.end(), cost) - before.begin()) - 1;
    if (t >= (int)tiles.size()) return {(int)tiles.size(), 0};
    const SharedTile& tile = tiles[t];
    const int64_t left = cost - before[t], right = before[t + 1] - cost;
    const Place start{t, 0}, end{t + 1, 0};
    if (tile.whole || std::min(left, right) <= slack) return left <= right ? start : end;
    const int block = (int)((left + tile.block_cost / 2) / tile.block_cost);
    const int run = (block + kSharedRunBlocks / 2) / kSharedRunBlocks * kSharedRunBlocks;
    const bool near = std::abs((int64_t)run * tile.block_cost - left) <= slack;
    const int at = near ? run : block;
    return at <= 0 ? start : at >= tile.blocks ? end : Place{t, at};
  };

  AttentionShares shares;
  std::vector<int> owners(tiles.size(), 0);
  std::vector<Place> edges;  // between threads, within tiles
  Place from{0, 0};
  for (int thread = 0; thread < threads; thread++) {
    Place to = thread + 1 == threads ? Place{(int)tiles.size(), 0} : place_of(total * (thread + 1) / threads);
    if (to < from) to = from;
    shares.begin.push_back((int)shares.ranges.size());
    for (int t = from.tile; t < (int)tiles.size() && !(to < Place{t, 0}); t++) {
      const int first = t == from.tile ? from.block : 0, last = t == to.tile ? to.block : tiles[t].blocks;
      if (first >= last) continue;
      shares.ranges.push_back({t, first, last});
      owners[t]++;
    }
    if (to.block > 0 && from < to) edges.push_back(to);
    from = to;
  }
  shares.begin.push_back((int)shares.ranges.size());

  auto edge = edges.begin();
  for (int t = 0; t < (int)tiles.size(); t++) {
    if (owners[t] < 2) continue;
    shares.cuts.push_back({t, (int)shares.runs.size()});
    for (int b = 0; b < tiles[t].blocks; b += kSharedRunBlocks) {
      const int end = std::min(tiles[t].blocks, b + kSharedRunBlocks);
      while (edge != edges.end() && *edge < Place{t, b + 1}) ++edge;
      const bool cut = edge != edges.end() && edge->tile == t && edge->block < end;
      shares.runs.push_back({shares.partials, cut});
      shares.partials += cut ? end - b : 1;
    }
  }
  return shares;
}

}  // namespace as
