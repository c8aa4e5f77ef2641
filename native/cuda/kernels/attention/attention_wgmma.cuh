// Shared parts of prefill attention by wgmma: work items, barriers of stages, and what a warpgroup computes for 64
// pairs. In each warpgroup a thread has two pairs: element i of scores and of values belongs to pair 16 * warp + lane /
// 4 + 8 * (i % 4 / 2).
#pragma once
#include "cuda/kernels/attention/attention.cuh"
#include "cuda/kernels/common/exchange.cuh"
#include "cuda/kernels/common/wgmma.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace prefill {

constexpr int kTokens = kBlock;  // positions at a time

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// A tile and a KV head. A negative kv_head ends the work.
struct Item {
  AttentionTile tile;
  int kv_head;
};
// Enough places for the items in flight: each item has at least one stage.
constexpr int kItems = 8;
template <int kStages>
struct Barriers {
  static_assert(kItems >= kStages + 2);
  uint64_t full[kStages], empty[kStages];
  Item items[kItems];
};

// Makes shared memory that threads wrote visible to wgmma. Computing warps call it for copied data: in copying warps it
// would wait for all copies in flight.
__device__ inline void written_for_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Addresses of the stages' barriers, in registers: otherwise the compiler recomputes them for each use.
struct Stages {
  uint32_t full, empty;

  template <int kStages>
  __device__ explicit Stages(const Barriers<kStages>& barriers)
      : full(shared_address(barriers.full)), empty(shared_address(barriers.empty)) {
    asm volatile("" : "+r"(full), "+r"(empty));
  }
  __device__ uint32_t full_at(int stage) const { return full + stage * (int)sizeof(uint64_t); }
  __device__ uint32_t empty_at(int stage) const { return empty + stage * (int)sizeof(uint64_t); }
};

// Addresses of 64 positions in the cache, 16 by 16 (no span is smaller): each lane computes one, ahead of its use.
struct Positions {
  const char* head;
  const int* table;
  size_t stride;
  int shift, within, bytes, last;  // bytes: of a position's key

  __device__ Positions(const Attention& a, const int* table, int kv_head, int bytes, int last)
      : head(a.cache.data + kv_head * a.cache.head_bytes()),
        table(table),
        stride(a.cache.stride),
        shift(__ffs(a.cache.span_size) - 1),
        within(a.cache.span_size - 1),
        bytes(bytes),
        last(last) {}
  __device__ uint64_t find(int position) const {
    const int at = position + min((int)threadIdx.x % 32, kTokens / 16 - 1) * 16;
    return reinterpret_cast<uint64_t>(head + (at <= last ? table[at >> shift] : 0) * stride + (at & within) * bytes);
  }
};

// kept: a mask: all ones, or zero to write zeros.
__device__ inline void put_chunk(char* to, int pair, int chunk, const float (&x)[8], uint32_t kept) {
  *reinterpret_cast<uint4*>(to + chunk / 8 * kBlockBytes + chunk_offset(pair, chunk % 8)) =
      make_uint4(to_dtype16x2(x[0], x[1]) & kept, to_dtype16x2(x[2], x[3]) & kept, to_dtype16x2(x[4], x[5]) & kept,
                 to_dtype16x2(x[6], x[7]) & kept);
}
__device__ inline void load_eight(const float* from, float (&values)[8]) {
  const float4 low = reinterpret_cast<const float4*>(from)[0], high = reinterpret_cast<const float4*>(from)[1];
  values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
  values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
}

// Of a KV split's positions so far: the maximum, the sum of weights relative to it, and the factor that rescales
// earlier sums to it.
struct SplitSums {
  float most[2] = {-INFINITY, -INFINITY}, sum[2] = {}, by[2];
};

// The scores of 64 positions, which become their weights.
template <bool kCapped>
class Scores {
 public:
  // pair: the thread's first one
  __device__ Scores(const Attention& a, const TileRows& rows, int pair) : a_(a) {
#pragma unroll
    for (int h = 0; h < 2; h++, pair += 8) {
      const bool there = pair < rows.count;
      last_[h] = there ? last_seen(a, rows.row(pair), rows.position(pair)) : -1;
      least_[h] = there ? first_seen(a, rows.row(pair), rows.position(pair)) : 0;
    }
  }
  // Begins the products of queries and keys.
  template <int kDim>
  __device__ void begin(uint64_t queries, uint32_t keys) {
    begin_wgmma();
#pragma unroll
    for (int s = 0; s < kDim / 16; s++) {
      const int at = s / 4 * kBlockBytes + s % 4 * kStepBytes;
      Tile<kTokens>::multiply(scores_, further(queries, at), further(descriptor(keys), at), s > 0);
    }
    commit_wgmma();
  }
  __device__ void settle_scores() { settle(scores_); }
  // Turns scores into weights and adds them to the sums of their KV split. begin: the first position.
  __device__ void weigh(int begin, SplitSums& split) {
    const bool whole = begin + kTokens - 1 <= min(last_[0], last_[1]) && begin >= max(least_[0], least_[1]);
    if constexpr (kCapped) {
#pragma unroll
      for (int i = 0; i < kCount; i++) scores_[i] = capped(a_, scores_[i]);
    }
    if (!__all_sync(0xffffffffu, whole)) {
#pragma unroll
      for (int i = 0; i < kCount; i++) {
        const int at = begin + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2, h = i % 4 / 2;
        if (at > last_[h] || at < least_[h]) scores_[i] = -INFINITY;
      }
    }
    const float factor = score_factor(a_);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float now = scores_[2 * h], other = scores_[2 * h + 1];
#pragma unroll
      for (int i = 2 * h + 4; i < kCount; i += 4) now = fmaxf(now, scores_[i]), other = fmaxf(other, scores_[i + 1]);
      now = fmaxf(now, other);
      now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 1));
      now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 2));
      now = fmaxf(split.most[h], now * factor), split.by[h] = shrunk(split.most[h], now);
      split.most[h] = now;
    }
    float halves[2][2] = {};
#pragma unroll
    for (int i = 0; i < kCount; i++) {
      const int h = i % 4 / 2;
      scores_[i] = weight_of(scores_[i], factor, split.most[h]);
      halves[h][i / (kCount / 2)] += scores_[i];
    }
#pragma unroll
    for (int h = 0; h < 2; h++) split.sum[h] = summed(split.sum[h], split.by[h], halves[h]);
  }
  // Two adjacent positions' weights in 16 bits: number i of the thread's kCount / 2.
  __device__ uint32_t weights(int i) const { return to_dtype16x2(scores_[2 * i], scores_[2 * i + 1]); }

 private:
  static constexpr int kCount = kTokens / 2;

  const Attention& a_;
  int last_[2], least_[2];  // positions that the pairs see
  float scores_[kCount];
};

// Weighted sums of kFeatures features of the values: of a KV split, and of all merged ones.
template <int kFeatures>
class Values {
 public:
  static constexpr int kCount = kFeatures / 2;

  __device__ Values() {
#pragma unroll
    for (int i = 0; i < kCount; i++) total_[i] = 0;
  }
  // The products' result. Nothing else may touch it while they run.
  __device__ float (&sums())[kCount] { return values_; }
  // Rescales the KV split's sums to a new maximum.
  __device__ void shrink(const float (&by)[2]) {
    if (!__any_sync(0xffffffffu, by[0] != 1 || by[1] != 1)) return;
#pragma unroll
    for (int i = 0; i < kCount; i++) values_[i] *= by[i % 4 / 2];
  }
  // Merges the KV split into the total.
  __device__ void end_split(const SplitSums& split) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float most = split.most[h];
      float sum = split.sum[h];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      const float now = fmaxf(total_most_[h], most), by = shrunk(total_most_[h], now), split_by = shrunk(most, now);
      total_most_[h] = now, total_sum_[h] = merged(total_sum_[h], by, sum, split_by);
#pragma unroll
      for (int i = 2 * h; i < kCount; i += 4) {
        total_[i] = merged(total_[i], by, values_[i], split_by);
        total_[i + 1] = merged(total_[i + 1], by, values_[i + 1], split_by);
      }
    }
  }
  // pair: the thread's first one; dim: of heads; feature: the first of a head that is here.
  __device__ void write(const Attention& a, const TileRows& rows, int pair, int kv_head, int dim, int feature) {
    const int quarter = threadIdx.x % 4;
#pragma unroll
    for (int h = 0; h < 2; h++, pair += 8) {
      const bool there = pair < rows.count && rows.has(pair, kv_head);
      const int row = there ? rows.row(pair) : 0, column = rows.head(pair, kv_head) * dim + feature;
      const float sum = there ? with_sink(a, rows.head(pair, kv_head), total_sum_[h], total_most_[h]) : 1.0f;
      const float inverse = inverse_of(sum);
#pragma unroll
      for (int v = 0; v < kFeatures / 8; v += 4) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float* values = total_ + (v + i) * 4 + 2 * h;
          const float first = __fmul_rn(values[0], inverse), second = __fmul_rn(values[1], inverse);
          words[i] = to_dtype16x2(first, second);
          if (there && !a.out.tiles)
            *reinterpret_cast<float2*>(a.out.values + (size_t)row * a.out.width + column + (v + i) * 8 + 2 * quarter) =
                make_float2(first, second);
        }
        exchange(words);
        if (there && a.out.tiles)
          *reinterpret_cast<uint4*>(a.out.tiles +
                                    tile_offset(row, column + (v + quarter) * 8, blocks_of(a.out.width))) =
              make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }

 private:
  float values_[kCount], total_[kCount], total_most_[2] = {-INFINITY, -INFINITY}, total_sum_[2] = {};
};
#endif

// Prefetches a tile's queries into the L2 cache, by 128 threads.
template <int kDim>
__device__ void ask_for_queries(const Attention& a, const TileRows& rows, int kv_head) {
  constexpr int kLines = kDim / 32;
  for (unsigned i = threadIdx.x; i < rows.count * kLines; i += 128)
    if (const int pair = i / kLines; rows.has(pair, kv_head))
      asm volatile("prefetch.global.L2 [%0];" ::"l"(a.qkv + (size_t)rows.row(pair) * a.width +
                                                    rows.head(pair, kv_head) * kDim + i % kLines * 32));
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// readers: warpgroups that tell that they have read a stage.
template <int kStages>
__device__ void init_barriers(Barriers<kStages>& barriers, int readers) {
  for (int i = 0; i < kStages; i++) barrier_init(&barriers.full[i], 128 + 1), barrier_init(&barriers.empty[i], readers);
  barriers_are_there();
}

// The work of the copying warpgroup: gives the computing ones the CTA's items, kPairs pairs each, copies the context of
// each by copy(item, rows), and ends the work. Tiles that see most positions come first, and the parts of a tile at
// once, as they read the same positions. CTAs reverse their order every turn, which balances the work.
template <int kDim, int kPairs, int kStages, typename Copy>
__device__ __forceinline__ void copy_items(const Attention& a, const AttentionTile* tiles, int count,
                                           Barriers<kStages>& barriers, const Stages& at_stage, Pipeline<kStages>& ring,
                                           const Copy& copy) {
  constexpr int kParts = kPrefillPairs / kPairs;
  int number = 0;
  const auto put = [&](const Item& item) {
    if (threadIdx.x == 0) barriers.items[number % kItems] = item;
    number++;
  };
  for (int turn = 0;; turn++) {
    const int own = turn % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x, i = turn * gridDim.x + own;
    if (i >= count * a.cache.kv_heads * kParts) break;
    const int head = i / kParts;
    Item item{tiles[count - 1 - head / a.cache.kv_heads], head % a.cache.kv_heads};
    item.tile.first += i % kParts * kPairs;
    const TileRows rows(a, item.tile, kPairs);
    if (rows.count == 0) continue;
    put(item);
    if (turn) ask_for_queries<kDim>(a, rows, item.kv_head);
    copy(item, rows);
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
  barrier_wait(at_stage.empty_at(ring.stage), ring.parity ^ 1);
  put({{}, -1});
  barrier_arrive(at_stage.full_at(ring.stage));
  if (threadIdx.x == 0) barrier_arrive(at_stage.full_at(ring.stage));
}
#endif

}  // namespace prefill
}  // namespace AS_DTYPE16
}  // namespace as::cuda
