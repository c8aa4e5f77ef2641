// The tiles of prefill GEMMs and the choice of their shape. Persistent CTAs compute one tile after the other, and share
// the tiles that remain at the end equally. A CTA starts a shared tile long before the CTA that continues from its
// sums.
#pragma once
#include <algorithm>
#include <cstdint>

#include "cuda/kernels/common/wgmma.cuh"
#include "cuda/kernels/gemm/gemm.h"

namespace as::cuda {
namespace AS_DTYPE16 {

// The tiles of a product, counted in clusters. Tiles from number `whole` on are shared: each cluster computes an equal
// part, at least one unit's work. unit: parts are multiples of this many blocks of K, so that no split-K part is cut.
struct Walk {
  int down, across, whole, unit;

  AS_BOTH int count() const { return down * across; }
};

// Split-K parts of a sum: there is only one, or a CTA adds one after the other, or CTAs of a cluster compute one each.
enum class Sums { whole, chained, beside };

// S: a tile's shape (TileScheduler); unit_of(k): blocks of a unit.
template <typename S>
Walk walk_of(int rows, const SplitK& k, int columns) {
  const int down = ceil_div(rows, S::kDown * S::kTileRows), across = ceil_div(columns, S::kAcross * S::kColumns);
  return {down, across, down * across, S::unit_of(k)};
}

// Nanoseconds that a cluster takes: for a tile, for a unit of it, and for a tile's epilogue.
struct TileTimes {
  int64_t tile, unit, end;
};
constexpr int kHandOver = 4000;  // nanoseconds to wait for another cluster's sums and to leave sums for a third

// Plans which of `clusters` clusters that run at once compute which tiles, and returns the estimated nanoseconds. If
// the last round would leave many clusters idle, all share the tiles of the last two rounds (if `shares`), or of a
// single one (if `shares_one`).
inline int64_t plan_walk(Walk& walk, int blocks, int clusters, const TileTimes& times, bool shares, bool shares_one) {
  const int count = walk.count(), over = count % clusters, turns = ceil_div(count, clusters);
  const int64_t whole = turns * times.tile;
  // With less than most of a tile for each cluster, clusters would wait for one another.
  if (over == 0 || !(turns > 1 ? shares : shares_one && 4 * count >= 3 * clusters)) return whole;
  const int tiles = turns > 1 ? clusters + over : count;
  const int part = ceil_div((size_t)tiles * ceil_div(blocks, walk.unit), clusters);
  const int64_t shared = std::max(turns - 2, 0) * times.tile + part * times.unit + 2 * times.end + kHandOver;
  if (shared >= whole) return whole;
  walk.whole = count - tiles;
  return shared;
}

// A shape of tiles, the nanoseconds of one of its stages, and its kernel's estimate and launch.
struct Choice {
  int columns;
  Sums sums;
  int down, across, nanoseconds;
  int64_t (*cost)(const Matrix& w, int rows, int nanoseconds);
  void (*start)(const GemmArgs&, int rows, int nanoseconds, const Queue&);
};
template <int kCount>
void start_best(const Choice (&choices)[kCount], const GemmArgs& p, int rows, const Queue& queue) {
  const SplitK k(p.w.k, p.w.max_split_k);
  const Choice* best = nullptr;
  int64_t least = INT64_MAX;
  for (const Choice& choice : choices) {
    const bool fits = choice.sums != Sums::beside || k.count <= kMaxSplitK;
    if ((choice.sums == Sums::whole) != (k.count == 1) || !fits) continue;
    const int64_t cost = choice.cost(p.w, rows, choice.nanoseconds);
    if (cost < least) best = &choice, least = cost;
  }
  best->start(p, rows, best->nanoseconds, queue);
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// A CTA's part of a tile: its first row and column, and blocks [begin, end) of K.
struct TilePart {
  int row, column, begin, end;
};

// The parts of tiles that a cluster computes, in order. A part that another cluster continues comes first among the
// shared ones, and a part that continues from another cluster's sums comes last. S: shape of the tiles (kTileRows x
// kColumns), kDown x kAcross of them in a cluster; kBand tiles of rows share a column of tiles before the next column.
// kFirst: parts that others continue come before all other tiles, so that clusters do not end and write their tiles at
// the same time; otherwise after the tiles that are not shared. down, across: the CTA's position in its cluster.
template <typename S, bool kFirst>
class TileScheduler {
 public:
  __device__ TileScheduler(const Walk& walk, int blocks, int cluster, int clusters, int down, int across)
      : walk_(walk),
        blocks_(blocks),
        units_((blocks + walk.unit - 1) / walk.unit),
        cluster_(cluster),
        clusters_(clusters),
        down_(down),
        across_(across) {
    const int64_t shared = (int64_t)(walk.count() - walk.whole) * units_;
    turns_ = (walk.whole - cluster + clusters - 1) / clusters;
    begin_ = (int)(shared * cluster / clusters), end_ = (int)(shared * (cluster + 1) / clusters);
  }
  __device__ int count() const {
    return turns_ + (end_ % units_ != 0) + end_ / units_ - (begin_ + units_ - 1) / units_ + (begin_ % units_ != 0);
  }
  __device__ TilePart operator[](int i) const {
    if (kFirst && end_ % units_ && i-- == 0) return continued();
    if (i < turns_) return part(i * clusters_ + cluster_, 0, units_);
    i -= turns_;
    if (!kFirst && end_ % units_ && i-- == 0) return continued();
    const int whole = (begin_ + units_ - 1) / units_ + i;
    if (whole < end_ / units_) return part(walk_.whole + whole, 0, units_);
    return part(walk_.whole + begin_ / units_, begin_ % units_, units_);
  }

 private:
  // The part that another cluster continues. If it is less than a tile, it may itself continue from another one's sums.
  __device__ TilePart continued() const {
    const int tile = end_ / units_;
    return part(walk_.whole + tile, max(begin_ - tile * units_, 0), end_ % units_);
  }
  __device__ TilePart part(int tile, int begin, int end) const {
    const int first = tile / (S::kBand * walk_.across) * S::kBand, there = min(S::kBand, walk_.down - first);
    const int within = tile - first * walk_.across;
    return {((first + within % there) * S::kDown + down_) * S::kTileRows,
            (within / there * S::kAcross + across_) * S::kColumns, begin * walk_.unit, min(end * walk_.unit, blocks_)};
  }
  const Walk& walk_;
  const int blocks_, units_, cluster_, clusters_, down_, across_;
  int turns_, begin_, end_;  // begin_, end_: units of the shared tiles
};

// For gemm_8bit_prefill: a warpgroup's sums that another CTA continues from, and the sums of another CTA to continue
// from. group: the
// warpgroup's number in its CTA. barrier: a named barrier of its own. Values are copied one by one: with vectors the
// compiler keeps sums in groups of four, which costs registers.
template <typename Sums>
__device__ void hand_over(const Scratch& scratch, int group, int barrier, const Sums& sums) {
  constexpr int kCount = Sums::kCount;
  const int thread = threadIdx.x % 128;
  float* to = scratch.sums + blockIdx.x * kScratchFloats + group * 128 * kCount + thread;
#pragma unroll
  for (int i = 0; i < kCount; i++) __stcg(to + i * 128, sums.get(i));
  asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory");
  if (thread == 0) set_flag(scratch.flags + blockIdx.x * kScratchFlags + group, 1);
}
template <typename Sums>
__device__ void go_on_from(const Scratch& scratch, int block, int group, int barrier, Sums& sums) {
  constexpr int kCount = Sums::kCount;
  const int thread = threadIdx.x % 128;
  if (thread == 0) {
    int* flag = scratch.flags + block * kScratchFlags + group;
    await_flag(flag, Waiter::gemm_8bit_prefill, scratch.given_up);
    set_flag(flag, 0);
  }
  asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory");
  const float* from = scratch.sums + block * kScratchFloats + group * 128 * kCount + thread;
#pragma unroll
  for (int i = 0; i < kCount; i++) sums.set(i, __ldcg(from + i * 128));
}
#endif

}  // namespace AS_DTYPE16
}  // namespace as::cuda
