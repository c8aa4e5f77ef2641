// How blocks of threads that stay share out what tiles of few rows have to see: runs of context, KV head by KV head.
#pragma once
#include "cuda/kernels/attention.cuh"

namespace as {
namespace cuda {
namespace few {

constexpr int kTokens = 64,
              kBlocks = kRunTokens / kTokens;  // of a stage; stages of keys of a run, and as many of values
constexpr int kConsumers = 8, kCopiers = 1, kPreparers = 3;  // warps
constexpr int kThreads = 32 * (kConsumers + kCopiers + kPreparers);
constexpr int kPrepared = 2;  // tiles' queries ahead
constexpr int kShortStages = 6, kMostStages = 24;

// Of the runs that a block of threads has: where they begin, how many, and the number of the first among all. Each
// block has so many, the first ones one more.
struct Begin {
  int tile, kv_head, run, count, number;
  int each, more;

  __device__ int begin_of(int block) const { return block * each + min(block, more); }
  __device__ int block_of(int number) const {
    const int larger = more * (each + 1);
    return number < larger ? number / (each + 1) : more + (number - larger) / each;
  }
};

struct Shared {
  uint64_t full[kMostStages], empty[kMostStages], prepared[kPrepared], released[kPrepared];
  uint4 weights[kRunTokens / 16][32];  // of 16 positions each, as mma.sync's first operand
  float maxima[kFewPairs][kConsumers], sums[kConsumers][kFewPairs][4];  // of a warp's positions
  float own_scales[kPrepared][4][kFewPairs];  // of the tile's own rows: keys' scales and minimums, and values'
  int runs[kThreads / 32];
  Begin begin;
};

// All threads: shares out the runs of all tiles, KV head by KV head.
__device__ inline void share_out(const Attention& a, const AttentionTile* tiles, int count, Shared& shared) {
  const auto runs_of = [&](int tile) {
    const FewRows rows(a, tiles[tile], kFewPairs);
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
    const FewRows rows(a, tiles[tile], kFewPairs);
    shared.begin = {
        tile,       within / runs, rows.first_run + within % runs, each_block + (block < more), begin + before * heads,
        each_block, more};
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
      number_ = shared.begin.number;
      if (left_) rows_ = FewRows(a, tiles[tile_], kFewPairs);
    } else {
      const int all = count * a.cache.kv_heads, block = blockIdx.x;
      left_ = block < all ? (all - block + gridDim.x - 1) / gridDim.x : 0;
      if (!left_) return;
      tile_ = block / a.cache.kv_heads, kv_head_ = block % a.cache.kv_heads;
      tiles_further_ = gridDim.x / a.cache.kv_heads, heads_further_ = gridDim.x % a.cache.kv_heads;
      take();
    }
  }

  __device__ int left() const { return left_; }  // this one, and those after it
  __device__ int tile() const { return tile_; }
  __device__ int kv_head() const { return kv_head_; }
  __device__ int run() const { return run_; }
  __device__ int number() const { return number_; }  // of this run among all
  __device__ const FewRows& rows() const { return rows_; }
  // Of this tile and KV head, the last that the block has; and on to what comes after it.
  __device__ int last_own() const { return min(rows_.last_run, run_ + left_ - 1); }
  __device__ void next_tile() {
    for (int i = last_own() - run_; i >= 0; i--) next();
  }
  __device__ void next() {
    if (!--left_) return;
    number_++;
    if (!several_) {
      tile_ += tiles_further_, kv_head_ += heads_further_;
      if (kv_head_ >= a_.cache.kv_heads) tile_++, kv_head_ -= a_.cache.kv_heads;
      return take();
    }
    if (run_ < rows_.last_run) {
      run_++;
      return;
    }
    if (++kv_head_ == a_.cache.kv_heads) {
      kv_head_ = 0;
      do rows_ = FewRows(a_, tiles_[++tile_], kFewPairs);
      while (!rows_.count);
    }
    run_ = rows_.first_run;
  }

 private:
  __device__ void take() { rows_ = FewRows(a_, tiles_[tile_], kFewPairs), run_ = rows_.first_run; }
  const Attention& a_;
  const AttentionTile* const tiles_;
  const bool several_;
  int tile_ = 0, kv_head_ = 0, run_ = 0, left_ = 0, number_ = 0, tiles_further_ = 0, heads_further_ = 0;
  FewRows rows_;
};

// Of a run: its positions, in blocks of 64, and which of them are in the cache: those of the tile's own rows are not
// yet, if they enter it here.
struct Extent {
  int begin, last, start, blocks;

  __device__ Extent(const FewRows& rows, int run) : begin(run * kRunTokens), start(rows.tile.start) {
    last = min(rows.position(rows.count - 1), begin + kRunTokens - 1);
    blocks = (last - begin) / kTokens + 1;
  }
};

__device__ inline void consumers_meet() { asm volatile("bar.sync 1, %0;" ::"n"(32 * kConsumers) : "memory"); }

// What a block of threads has of a tile and a KV head. The block that has the first runs merges them as it goes; what
// these are together lies where the last of them has its place.
struct Part {
  int tile, kv_head;
  FewRows rows;
  int blocks, own;  // that have a part; this one's number among them
  int merged;       // the last run that is merged

  // run: one of the block's; number: of this run among all.
  __device__ Part(const Attention& a, const AttentionTile* tiles, int tile, int kv_head, int run, int number,
                  const Begin& begin)
      : tile(tile), kv_head(kv_head), rows(a, tiles[tile], kFewPairs) {
    const int first = number - (run - rows.first_run), last = first + rows.last_run - rows.first_run;
    const int block = begin.block_of(first);
    blocks = begin.block_of(last) - block + 1, own = blockIdx.x - block;
    merged = rows.first_run + min(begin.begin_of(block + 1) - 1, last) - first;
  }
};

constexpr int kMergeBytes = 32 * 32 * 4;  // of 32 runs 32 features

__device__ inline int arrived(const int* arrivals) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(arrivals) : "memory");
  return value;
}
// A warp has left its part of a tile and a KV head for the merge.
__device__ inline void leave_part(const Attention& a, const Runs& runs) {
  __syncwarp();
  if (threadIdx.x % 32) return;
  __threadfence();
  atomicAdd(a.arrivals + runs.tile() * a.cache.kv_heads + runs.kv_head(), 1);
}

__device__ inline void copy_4(uint32_t to, const float* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ inline uint32_t load_shared_word(uint32_t address) {
  uint32_t x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}

// By a warp that computes, of each block that shares a tile and a KV head: some of the results. It waits for all of
// these blocks, which are there: there are no more than processors, and none waits before it has left its own parts.
// memory: shared, kMergeBytes of each warp. Loops are not unrolled far: a kernel's instructions are not in the
// processor's cache when they are first wanted.
template <int kDim>
__device__ void merge_part(const Attention& a, const Part& part, uint32_t memory) {
  constexpr int kChunks = (kDim + 31) / 32, kLeaving = 1 << 16;
  const FewRows& rows = part.rows;
  const int lane = threadIdx.x % 32, kv_head = part.kv_head, warps = kConsumers * part.blocks;
  const int chunks = rows.count * kChunks;
  int* arrivals = a.arrivals + part.tile * a.cache.kv_heads + kv_head;
  int chunk = threadIdx.x / 32 * part.blocks + part.own;
  if (chunk >= chunks) return;
  memory += threadIdx.x / 32 * kMergeBytes + lane * 4;
  while ((arrived(arrivals) & (kLeaving - 1)) != warps) {}
  __syncwarp();
  if (lane == 0 && atomicAdd(arrivals, kLeaving) == (min(warps, chunks) - 1) * kLeaving + warps) *arrivals = 0;
  for (; chunk < chunks; chunk += warps) {
    const int pair = chunk / kChunks, feature = chunk % kChunks * 32 + lane;
    const auto read = [&](int run, int at) { return __ldcg(partial_of(a, part.tile, kv_head, run) + at); };
    const int at = 2 * kFewPairs + pair * kDim + min(feature, kDim - 1);
    float most = read(part.merged, pair), sum = read(part.merged, kFewPairs + pair), total = read(part.merged, at);
#pragma unroll 1
    for (int first = part.merged + 1; first <= rows.last_run; first += 32) {
      const int own = min(first + lane, rows.last_run), count = min(32, rows.last_run - first + 1);
      const float own_most = read(own, pair), own_sum = read(own, kFewPairs + pair);
#pragma unroll 4
      for (int i = 0; i < count; i++) copy_4(memory + i * 128, partial_of(a, part.tile, kv_head, first + i) + at);
      commit_copies();
      // A lane has the factors of a run.
      float now = fmaxf(most, own_most);
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const float other = __shfl_up_sync(0xffffffffu, now, step);
        if (lane >= step) now = fmaxf(now, other);
      }
      const float earlier = __shfl_up_sync(0xffffffffu, now, 1);
      const float own_by = shrunk(lane ? earlier : most, now), own_run_by = shrunk(own_most, now);
      most = __shfl_sync(0xffffffffu, now, 31);
      wait_copies<0>();
#pragma unroll 4
      for (int i = 0; i < count; i++) {
        const float by = __shfl_sync(0xffffffffu, own_by, i), run_by = __shfl_sync(0xffffffffu, own_run_by, i),
                    run_sum = __shfl_sync(0xffffffffu, own_sum, i);
        sum = merged(sum, by, run_sum, run_by);
        total = merged(total, by, __uint_as_float(load_shared_word(memory + i * 128)), run_by);
      }
    }
    if (feature >= kDim || !rows.has(pair, kv_head)) continue;
    const int head = rows.head(pair, kv_head);
    put(a.out, rows.row(pair), head * kDim + feature, share(total, with_sink(a, head, sum, most)));
  }
}

}  // namespace few
}  // namespace cuda
}  // namespace as
