// How blocks of threads that stay share out what tiles of few rows have to see: runs of context, KV head by KV head.
#pragma once
#include "cuda/kernels/attention.cuh"

namespace as {
namespace cuda {
namespace few {

constexpr int kTokens = 64,
              kBlocks = kRunTokens / kTokens;  // of a stage; stages of keys of a run, and as many of values
constexpr int kConsumers = 8, kProducers = 4;  // warps
constexpr int kThreads = 32 * (kConsumers + kProducers);
constexpr int kShortStages = 6, kMostStages = 24;

// Of the runs that a block of threads has: where they begin, and how many.
struct Begin {
  int tile, kv_head, run, count;
};

struct Shared {
  uint64_t full[kMostStages], empty[kMostStages];
  uint4 weights[kRunTokens / 16][32];  // of 16 positions each, as mma.sync's first operand; or factors of a merge
  float maxima[kFewPairs][kConsumers], sums[kConsumers][kFewPairs][4];  // of a warp's positions
  float most[kFewPairs];                                                // of what is merged
  float own_scales[4][kFewPairs];  // of the tile's own rows: keys' scales and minimums, and values'
  int runs[kThreads / 32];
  Begin begin;
  bool last;
};

// All threads: shares out the runs of all tiles, KV head by KV head.
__device__ inline void share_out(const Attention& a, const AttentionTile* tiles, int count, Shared& shared) {
  const auto runs_of = [&](int tile) {
    const TileRows rows(a, tiles[tile], kFewPairs);
    return rows.count ? rows.last_run - rows.first_run + 1 : 0;
  };
  const int each = (count + kThreads - 1) / kThreads, first = threadIdx.x * each, end = min(first + each, count);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int own = 0;
  for (int i = first; i < end; i++) own += runs_of(i);
  int before = own, all = 0;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, before, step);
    if (lane >= step) before += other;
  }
  if (lane == 31) shared.runs[warp] = before;
  __syncthreads();
  before -= own;
#pragma unroll
  for (int i = 0; i < kThreads / 32; i++) {
    const int runs = shared.runs[i];
    if (i < warp) before += runs;
    all += runs;
  }
  const int heads = a.cache.kv_heads, each_block = all * heads / gridDim.x, more = all * heads % gridDim.x;
  const int block = blockIdx.x, begin = block * each_block + min(block, more) - before * heads;
  if (begin >= 0 && begin < own * heads) {
    int tile = first, within = begin, runs = runs_of(tile);
    for (; within >= runs * heads; runs = runs_of(++tile)) within -= runs * heads;
    const TileRows rows(a, tiles[tile], kFewPairs);
    shared.begin = {tile, within / runs, rows.first_run + within % runs, each_block + (block < more)};
  } else if (threadIdx.x == 0 && all * heads <= block) {
    shared.begin.count = 0;
  }
  __syncthreads();
}

// The runs that a block of threads has, one after the other. Without several of a tile all are taken in turn.
class Runs {
 public:
  __device__ Runs(const Attention& a, const AttentionTile* tiles, int count, bool several, const Shared& shared)
      : a_(a), tiles_(tiles), several_(several) {
    if (several) {
      tile_ = shared.begin.tile, kv_head_ = shared.begin.kv_head, run_ = shared.begin.run, left_ = shared.begin.count;
      if (left_) rows_ = TileRows(a, tiles[tile_], kFewPairs);
    } else {
      const int all = count * a.cache.kv_heads, block = blockIdx.x;
      left_ = block < all ? (all - block + gridDim.x - 1) / gridDim.x : 0;
      if (left_) take(block);
    }
  }

  __device__ int left() const { return left_; }  // this one, and those after it
  __device__ int tile() const { return tile_; }
  __device__ int kv_head() const { return kv_head_; }
  __device__ int run() const { return run_; }
  __device__ const TileRows& rows() const { return rows_; }
  // Of this tile and KV head, the last that the block has.
  __device__ int last_own() const { return min(rows_.last_run, run_ + left_ - 1); }
  __device__ void next() {
    if (!--left_) return;
    if (!several_) return take(tile_ * a_.cache.kv_heads + kv_head_ + gridDim.x);
    if (run_ < rows_.last_run) {
      run_++;
      return;
    }
    if (++kv_head_ == a_.cache.kv_heads) {
      kv_head_ = 0;
      do rows_ = TileRows(a_, tiles_[++tile_], kFewPairs);
      while (!rows_.count);
    }
    run_ = rows_.first_run;
  }

 private:
  __device__ void take(int number) {
    tile_ = number / a_.cache.kv_heads, kv_head_ = number % a_.cache.kv_heads;
    rows_ = TileRows(a_, tiles_[tile_], kFewPairs), run_ = rows_.first_run;
  }
  const Attention& a_;
  const AttentionTile* const tiles_;
  const bool several_;
  int tile_ = 0, kv_head_ = 0, run_ = 0, left_ = 0;
  TileRows rows_;
};

// Of a run: its positions, in blocks of 64, and which of them are in the cache: those of the tile's own rows are not
// yet, if they enter it here.
struct Extent {
  int begin, last, start, blocks;

  __device__ Extent(const TileRows& rows, int run) : begin(run * kRunTokens), start(rows.tile.start) {
    last = min(rows.position(rows.count - 1), begin + kRunTokens - 1);
    blocks = (last - begin) / kTokens + 1;
  }
};

}  // namespace few
}  // namespace cuda
}  // namespace as
