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

__device__ inline void consumers_meet() { asm volatile("bar.sync 1, %0;" ::"n"(32 * kConsumers) : "memory"); }

// By the warps that compute: what all runs of a tile and a KV head have left becomes the result.
// 32 runs at a time. What each is worth in the sum is found by a warp for a pair, a lane for a run; then threads have
// four features each.
template <int kDim>
__device__ void merge_runs(const Attention& a, const Runs& runs, Shared& shared) {
  constexpr int kAtOnce = 16, kFours = kDim / 4, kItems = (kFewPairs * kFours - 1) / (32 * kConsumers) + 1;
  const TileRows& rows = runs.rows();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float4* factors = reinterpret_cast<float4*>(shared.weights);  // [pair][run]: of the sum before, of the run; its sum
  if (threadIdx.x < kFewPairs) shared.most[threadIdx.x] = -INFINITY;
  float4 totals[kItems];
  float sums[kItems];
#pragma unroll
  for (int i = 0; i < kItems; i++) totals[i] = make_float4(0, 0, 0, 0), sums[i] = 0;
  for (int first = rows.first_run; first <= rows.last_run; first += 32) {
    consumers_meet();
    for (int pair = warp; pair < rows.count; pair += kConsumers) {
      const float* from = partial_of(a, runs.tile(), runs.kv_head(), min(first + lane, rows.last_run));
      const float most = __ldcg(from + pair), sum = __ldcg(from + kFewPairs + pair);
      const float before = shared.most[pair];
      float now = fmaxf(before, most);
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const float other = __shfl_up_sync(0xffffffffu, now, step);
        if (lane >= step) now = fmaxf(now, other);
      }
      const float earlier = __shfl_up_sync(0xffffffffu, now, 1);
      factors[pair * 32 + lane] = make_float4(shrunk(lane ? earlier : before, now), shrunk(most, now), sum, 0);
      if (lane == 31) shared.most[pair] = now;
    }
    consumers_meet();
    const int count = min(32, rows.last_run - first + 1);
#pragma unroll
    for (int i = 0; i < kItems; i++) {
      const int item = i * 32 * kConsumers + threadIdx.x, pair = item / kFours;
      if (pair >= rows.count) continue;
      for (int begin = 0; begin < count; begin += kAtOnce) {
        float4 values[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; j++)
          values[j] = __ldcg(reinterpret_cast<const float4*>(
              partial_of(a, runs.tile(), runs.kv_head(), min(first + begin + j, rows.last_run)) + 2 * kFewPairs +
              item * 4));
#pragma unroll
        for (int j = 0; j < kAtOnce; j++) {
          if (begin + j >= count) break;
          const float4 by = factors[pair * 32 + begin + j];
          sums[i] = merged(sums[i], by.x, by.z, by.y);
          totals[i].x = merged(totals[i].x, by.x, values[j].x, by.y);
          totals[i].y = merged(totals[i].y, by.x, values[j].y, by.y);
          totals[i].z = merged(totals[i].z, by.x, values[j].z, by.y);
          totals[i].w = merged(totals[i].w, by.x, values[j].w, by.y);
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kItems; i++) {
    const int item = i * 32 * kConsumers + threadIdx.x, pair = item / kFours;
    if (pair >= rows.count || !rows.has(pair, runs.kv_head())) continue;
    const float4& x = totals[i];
    const int head = rows.head(pair, runs.kv_head());
    const float sum = with_sink(a, head, sums[i], shared.most[pair]);
    put_four(a.out, rows.row(pair), head * kDim + item % kFours * 4, a.out.width,
             make_float4(share(x.x, sum), share(x.y, sum), share(x.z, sum), share(x.w, sum)));
  }
}

}  // namespace few
}  // namespace cuda
}  // namespace as
