// Prefill attention over 16-bit caches by wgmma (after Shah et al., "FlashAttention-3", 2024). Two warpgroups have 64
// pairs each. While one computes softmax weights, its previous product with the values and the products of the other
// warpgroup continue. A third warpgroup copies keys and values to shared memory, 64 positions at a time, several stages
// ahead and into the next tile, as CTAs are persistent. Algorithm and bits are those of attention_prefill_mma.cu:
// products add in the same order, and a thread has the same values.
#include <algorithm>

#include "cuda/kernels/attention/attention.cuh"
#include "cuda/kernels/attention/attention_prefill_wgmma.h"
#include "cuda/kernels/common/exchange.cuh"
#include "cuda/kernels/common/pipeline.cuh"
#include "cuda/kernels/common/wgmma.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace {

[[maybe_unused]] constexpr int kTokens = kBlock;  // positions at a time
constexpr int kGroups = kPrefillPairs / kBlock;   // computing warpgroups, kBlock pairs each
constexpr int kThreads = 128 * (1 + kGroups), kStages = 5;

// Keys of 64 positions are stored as consecutive blocks of 64 features (tiles.h). So are values and queries.
template <int kDim>
struct Shape {
  static constexpr int kBlocks = kDim / kBlock, kTensorBytes = kBlocks * kBlockBytes, kStageBytes = 2 * kTensorBytes;
  static constexpr int kShared = kGroups * kTensorBytes + kStages * kStageBytes;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// A tile and a KV head. A negative kv_head ends the work.
struct Item {
  AttentionTile tile;
  int kv_head;
};
// Enough places for the items in flight: each item has at least one stage.
constexpr int kItems = 8;
static_assert(kItems >= kStages + 2);
struct Barriers {
  uint64_t full[kStages], empty[kStages];
  Item items[kItems];
};

// Makes shared memory that threads wrote visible to wgmma. Computing warps call it for copied data: in copying warps it
// would wait for all copies in flight.
__device__ void written_for_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Addresses of the stages' barriers, in registers: otherwise the compiler recomputes them for each use.
struct Stages {
  uint32_t full, empty;

  __device__ explicit Stages(const Barriers& barriers)
      : full(shared_address(barriers.full)), empty(shared_address(barriers.empty)) {
    asm volatile("" : "+r"(full), "+r"(empty));
  }
  __device__ uint32_t full_at(int stage) const { return full + stage * (int)sizeof(uint64_t); }
  __device__ uint32_t empty_at(int stage) const { return empty + stage * (int)sizeof(uint64_t); }
};

// A warpgroup copies the positions from `begin` to `last`.
template <int kDim>
__device__ void copy_context(const Attention& a, const int* table, int kv_head, int begin, int last, uint32_t stages,
                             const Stages& barriers, Pipeline<kStages>& ring) {
  constexpr int kChunks = kDim / 8, kStep = 128 / kChunks;  // 16-byte chunks of a head; positions copied at once
  constexpr int kSide = 16;                                 // adjacent positions: no span is smaller
  constexpr int kBytes = kDim * 2;                          // of a position
  const int shift = __ffs(a.cache.span_size) - 1, within = a.cache.span_size - 1, lane = threadIdx.x % 32;
  const int chunk = threadIdx.x % kChunks, own = threadIdx.x / kChunks;
  static_assert(kStep % 8 == 0 && kSide % kStep == 0);  // a thread's chunks have one place in all rows
  const int place = chunk / 8 * kBlockBytes + chunk_offset(own, chunk % 8), own_bytes = own * kBytes + chunk * 16;
  const char* head = a.cache.data + kv_head * a.cache.head_bytes();
  const size_t stride = a.cache.stride, values_behind = (size_t)a.cache.span_size * kBytes;
  // Addresses of 64 positions, 16 by 16: each lane computes one, ahead of its use.
  const auto find = [&](int position) {
    const int at = position + min(lane, kTokens / kSide - 1) * kSide;
    return reinterpret_cast<uint64_t>(head + (at <= last ? table[at >> shift] : 0) * stride + (at & within) * kBytes);
  };
  for (uint64_t found = find(begin); begin <= last; begin += kTokens, ring.next()) {
    const uint64_t next = find(begin + kTokens);
    barrier_wait(barriers.empty_at(ring.stage), ring.parity ^ 1);
    __syncwarp();
    const uint32_t to = stages + ring.stage * Shape<kDim>::kStageBytes + place;
#pragma unroll
    for (int side = 0; side < kTokens; side += kSide) {
      const char* keys = reinterpret_cast<const char*>(__shfl_sync(0xffffffffu, found, side / kSide)) + own_bytes;
      const char* values = keys + values_behind;
#pragma unroll
      for (int i = 0; i < kSide; i += kStep) {
        const bool there = begin + side + i + own <= last;
        copy_16(to + (side + i) * kRowBytes, keys + i * kBytes, there);
        copy_16(to + (side + i) * kRowBytes + Shape<kDim>::kTensorBytes, values + i * kBytes, there);
      }
    }
    arrive_with_copies(barriers.full_at(ring.stage));
    if (threadIdx.x == 0) barrier_arrive(barriers.full_at(ring.stage));
    found = next;
  }
}

// kept: a mask: all ones, or zero to write zeros.
__device__ void put_chunk(char* to, int pair, int chunk, const float (&x)[8], uint32_t kept) {
  *reinterpret_cast<uint4*>(to + chunk / 8 * kBlockBytes + chunk_offset(pair, chunk % 8)) =
      make_uint4(to_dtype16x2(x[0], x[1]) & kept, to_dtype16x2(x[2], x[3]) & kept, to_dtype16x2(x[4], x[5]) & kept,
                 to_dtype16x2(x[6], x[7]) & kept);
}

// A warpgroup copies the queries of 64 pairs from `first` on. rotates: with RoPE that pairs the halves of heads, as in
// store_cache(). All loads are issued before the first result is used, since no products hide their latency.
template <int kDim, bool rotates>
__device__ void copy_queries(const Attention& a, const TileRows& rows, int first, int kv_head, const RotaryTable& t,
                             char* to) {
  constexpr int kHalfDim = kDim / 2, kChunks = kHalfDim / 8, kTurns = kBlock * kChunks / 128;
  const int chunk = threadIdx.x % kChunks, own = threadIdx.x % 128 / kChunks;
  float x[kTurns][8], y[kTurns][8], cosine[kTurns][8], sine[kTurns][8];
  uint32_t kept[kTurns];
  const auto eight = [](const float* from, float(&values)[8]) {
    const float4 low = reinterpret_cast<const float4*>(from)[0], high = reinterpret_cast<const float4*>(from)[1];
    values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
    values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
  };
#pragma unroll
  for (int turn = 0; turn < kTurns; turn++) {
    const int pair = first + own + turn * (128 / kChunks);
    const bool there = pair < rows.count && rows.has(pair, kv_head);
    const int row = there ? rows.row(pair) : rows.tile.row, column = there ? rows.head(pair, kv_head) * kDim : 0;
    kept[turn] = there ? ~0u : 0;
    const float* head = a.qkv + (size_t)row * a.width + column;
    eight(head + chunk * 8, x[turn]), eight(head + kHalfDim + chunk * 8, y[turn]);
    if (!rotates) continue;
    const size_t at = (size_t)row * kHalfDim + chunk * 8;
    eight(t.cosine + at, cosine[turn]), eight(t.sine + at, sine[turn]);
  }
#pragma unroll
  for (int turn = 0; turn < kTurns; turn++) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
      if (!rotates) continue;
      const float was = x[turn][j];
      x[turn][j] = __fmul_rn(was, cosine[turn][j]) - __fmul_rn(y[turn][j], sine[turn][j]);
      y[turn][j] = __fmul_rn(y[turn][j], cosine[turn][j]) + __fmul_rn(was, sine[turn][j]);
    }
    const int pair = own + turn * (128 / kChunks);
    put_chunk(to, pair, chunk, x[turn], kept[turn]), put_chunk(to, pair, kChunks + chunk, y[turn], kept[turn]);
  }
  written_for_products();
}

// A warpgroup's state for its 64 pairs. Each thread has two pairs: element i of `values` and `scores` belongs to pair
// 16 * warp + lane / 4 + 8 * (i % 4 / 2).
template <int kDim, bool kCapped>
class Attender {
 public:
  __device__ Attender(const Attention& a, const TileRows& rows, int first, uint32_t queries)
      : a_(a),
        rows_(rows),
        queries_(descriptor(queries)),
        pair_(first + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int pair = pair_ + 8 * h;
      const bool there = pair < rows.count;
      last_[h] = there ? last_seen(a, rows.row(pair), rows.position(pair)) : -1;
      least_[h] = there ? first_seen(a, rows.row(pair), rows.position(pair)) : 0;
    }
    clear(total_);
  }

  __device__ void begin_scores(uint32_t keys) {
    begin_wgmma();
#pragma unroll
    for (int s = 0; s < kDim / 16; s++) {
      const int at = s / 4 * kBlockBytes + s % 4 * kStepBytes;
      Tile<kTokens>::multiply(scores_, further(queries_, at), further(descriptor(keys), at), s > 0);
    }
    commit_wgmma();
  }
  // Turns scores into weights, while products with the previous weights may still run. shrink_values() rescales the KV
  // split's earlier values to the new maximum afterwards. first: first scores of a KV split; the previous KV split may
  // not have ended yet.
  __device__ void weigh(int begin, bool first) {
    const bool whole = begin + kTokens - 1 <= min(last_[0], last_[1]) && begin >= max(least_[0], least_[1]);
    if constexpr (kCapped) {
#pragma unroll
      for (int i = 0; i < kScores; i++) scores_[i] = capped(a_, scores_[i]);
    }
    if (!__all_sync(0xffffffffu, whole)) {
#pragma unroll
      for (int i = 0; i < kScores; i++) {
        const int at = begin + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2, h = i % 4 / 2;
        if (at > last_[h] || at < least_[h]) scores_[i] = -INFINITY;
      }
    }
    const float factor = score_factor(a_);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      if (first) ended_most_[h] = most_[h], ended_sum_[h] = sum_[h], most_[h] = -INFINITY, sum_[h] = 0;
      float now = scores_[2 * h], other = scores_[2 * h + 1];
#pragma unroll
      for (int i = 2 * h + 4; i < kScores; i += 4) now = fmaxf(now, scores_[i]), other = fmaxf(other, scores_[i + 1]);
      now = fmaxf(now, other);
      now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 1));
      now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 2));
      now = fmaxf(most_[h], now * factor), by_[h] = shrunk(most_[h], now);
      most_[h] = now;
    }
    float halves[2][2] = {};
#pragma unroll
    for (int i = 0; i < kScores; i++) {
      const int h = i % 4 / 2;
      scores_[i] = weight_of(scores_[i], factor, most_[h]);
      halves[h][i / (kScores / 2)] += scores_[i];
    }
#pragma unroll
    for (int h = 0; h < 2; h++) sum_[h] = summed(sum_[h], by_[h], halves[h]);
  }
  // Rescales the KV split's earlier values to its new maximum. Call it when no products with weights are running.
  __device__ void shrink_values() {
    if (!__any_sync(0xffffffffu, by_[0] != 1 || by_[1] != 1)) return;
#pragma unroll
    for (int i = 0; i < kValues; i++) values_[i] *= by_[i % 4 / 2];
  }
  // Converts weights for the next product. Call it when no products with weights are running.
  __device__ void take_weights() {
#pragma unroll
    for (int i = 0; i < kScores / 2; i++) weights_[i / 4][i % 4] = to_dtype16x2(scores_[2 * i], scores_[2 * i + 1]);
  }
  __device__ void begin_values(uint32_t values, bool first) {
    begin_wgmma();
#pragma unroll
    for (int s = 0; s < kTokens / 16; s++)
      WeighedTile<kDim>::multiply(values_, weights_[s], further(descriptor_of_columns(values), s * 16 * kRowBytes),
                                  s > 0 || !first);
    commit_wgmma();
  }
  // kValuesToo: products with values, begun after those for the scores, may still run.
  template <bool kValuesToo>
  __device__ void wait_scores() {
    wait_wgmma<kValuesToo ? 1 : 0>();
    settle(scores_);
  }
  __device__ void wait_values() {
    wait_wgmma<0>();
    settle(values_);
  }
  // Merges the KV split into the total. begun: weigh() has already begun the next KV split.
  __device__ void end_split(bool begun) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float most = begun ? ended_most_[h] : most_[h], sum = begun ? ended_sum_[h] : sum_[h];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      const float now = fmaxf(total_most_[h], most), by = shrunk(total_most_[h], now), split_by = shrunk(most, now);
      total_most_[h] = now, total_sum_[h] = merged(total_sum_[h], by, sum, split_by);
#pragma unroll
      for (int i = 2 * h; i < kValues; i += 4) {
        total_[i] = merged(total_[i], by, values_[i], split_by);
        total_[i + 1] = merged(total_[i + 1], by, values_[i + 1], split_by);
      }
    }
  }
  __device__ void write(int kv_head) {
    const int quarter = threadIdx.x % 4;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int pair = pair_ + 8 * h;
      const bool there = pair < rows_.count && rows_.has(pair, kv_head);
      const int row = there ? rows_.row(pair) : 0, column = rows_.head(pair, kv_head) * kDim;
      const float inverse = inverse_of(total_sum_[h]);
#pragma unroll
      for (int v = 0; v < kDim / 8; v += 4) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float* values = total_ + (v + i) * 4 + 2 * h;
          const float first = __fmul_rn(values[0], inverse), second = __fmul_rn(values[1], inverse);
          words[i] = to_dtype16x2(first, second);
          if (there && !a_.out.tiles)
            *reinterpret_cast<float2*>(a_.out.values + (size_t)row * a_.out.width + column + (v + i) * 8 +
                                       2 * quarter) = make_float2(first, second);
        }
        exchange(words);
        if (there && a_.out.tiles)
          *reinterpret_cast<uint4*>(a_.out.tiles +
                                    tile_offset(row, column + (v + quarter) * 8, blocks_of(a_.out.width))) =
              make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }

 private:
  static constexpr int kScores = kTokens / 2, kValues = kDim / 2;

  template <int kCount>
  __device__ static void clear(float (&values)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; i++) values[i] = 0;
  }
  const Attention& a_;
  const TileRows& rows_;
  const uint64_t queries_;
  const int pair_;
  int last_[2], least_[2];  // positions that the pairs see
  float scores_[kScores], values_[kValues], total_[kValues];
  float most_[2] = {-INFINITY, -INFINITY}, sum_[2] = {}, by_[2], ended_most_[2], ended_sum_[2];
  float total_most_[2] = {-INFINITY, -INFINITY}, total_sum_[2] = {};
  uint32_t weights_[kTokens / 16][4];
};
#endif

// Prefetches a tile's queries into the L2 cache.
template <int kDim>
__device__ void ask_for_queries(const Attention& a, const TileRows& rows, int kv_head) {
  constexpr int kLines = kDim / 32;
  for (unsigned i = threadIdx.x; i < rows.count * kLines; i += 128)
    if (const int pair = i / kLines; rows.has(pair, kv_head))
      asm volatile("prefetch.global.L2 [%0];" ::"l"(a.qkv + (size_t)rows.row(pair) * a.width +
                                                    rows.head(pair, kv_head) * kDim + i % kLines * 32));
}

template <int kDim, bool kCapped>
__global__ void __launch_bounds__(kThreads, 1)
    attend_prefill_wgmma_kernel(const __grid_constant__ Attention a, const AttentionTile* tiles, int count,
                                bool rotates, const __grid_constant__ RotaryTable table) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = Shape<kDim>;
  extern __shared__ __align__(1024) char shared[];
  __shared__ Barriers barriers;
  let_next_begin();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; i++)
      barrier_init(&barriers.full[i], 128 + 1), barrier_init(&barriers.empty[i], kGroups);
    barriers_are_there();
  }
  __syncthreads();
  await_previous();
  const int group = warpgroup() - 1;
  const uint32_t queries = shared_address(shared), stages = queries + kGroups * S::kTensorBytes;
  const Stages at_stage(barriers);
  Pipeline<kStages> ring;
  if (group < 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    int number = 0;
    const auto put = [&](const Item& item) {
      if (threadIdx.x == 0) barriers.items[number % kItems] = item;
      number++;
    };
    // Tiles that see most positions come first. CTAs reverse their order every turn, which balances the work.
    for (int turn = 0;; turn++) {
      const int own = turn % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x, i = turn * gridDim.x + own;
      if (i >= count * a.cache.kv_heads) break;
      const Item item{tiles[count - 1 - i / a.cache.kv_heads], i % a.cache.kv_heads};
      const TileRows rows(a, item.tile, kPrefillPairs);
      if (rows.count == 0) continue;
      put(item);
      if (turn) ask_for_queries<kDim>(a, rows, item.kv_head);
      copy_context<kDim>(a, a.tables + rows.tile.table, item.kv_head, rows.first_split * kKvSplitTokens, rows.last,
                         stages, at_stage, ring);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    barrier_wait(at_stage.empty_at(ring.stage), ring.parity ^ 1);
    put({{}, -1});
    barrier_arrive(at_stage.full_at(ring.stage));
    if (threadIdx.x == 0) barrier_arrive(at_stage.full_at(ring.stage));
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  const auto release = [&](int stage) {
    if (threadIdx.x % 128 == 0) barrier_arrive(at_stage.empty_at(stage));
  };
  const auto await = [&](const Pipeline<kStages>& at) {
    barrier_wait(at_stage.full_at(at.stage), at.parity);
    written_for_products();
  };
  const auto all_here = [&] { asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory"); };
  for (int number = 0;; number++) {
    await(ring);
    const Item item = barriers.items[number % kItems];
    if (item.kv_head < 0) return;
    const TileRows rows(a, item.tile, kPrefillPairs);
    const int last = rows.last;
    int begin = rows.first_split * kKvSplitTokens;
    if (group * kBlock >= rows.count) {
      // No products synchronize the warps here. Without all_here(), a warp that falls more than a turn of the ring
      // behind the others would miss the phase of a stage and wait forever.
      for (; begin <= last; begin += kTokens, ring.next()) {
        barrier_wait(at_stage.full_at(ring.stage), ring.parity);
        all_here();
        release(ring.stage);
      }
      continue;
    }
    all_here();  // no warp uses the previous queries any more
    char* own = shared + group * S::kTensorBytes;
    if (rotates) copy_queries<kDim, true>(a, rows, group * kBlock, item.kv_head, table, own);
    else copy_queries<kDim, false>(a, rows, group * kBlock, item.kv_head, table, own);
    all_here();
    Attender<kDim, kCapped> attender(a, rows, group * kBlock, queries + group * S::kTensorBytes);
    // If both warpgroups have pairs, they take turns at beginning products for scores and values: one computes weights
    // while the products of the other run.
    const bool both = rows.count > kBlock;
    const auto await_turn = [&] {
      if (both) asm volatile("bar.sync %0, 256;" ::"r"(3 + group) : "memory");
    };
    const auto give_turn = [&] {
      if (both) asm volatile("bar.arrive %0, 256;" ::"r"(4 - group) : "memory");
    };
    const auto next_of = [](Pipeline<kStages> at) {
      at.next();
      return at;
    };
    const auto place = [&] { return stages + ring.stage * S::kStageBytes; };
    attender.begin_scores(place());
    if (begin + kTokens <= last) {
      if (group == 1) give_turn();
      await(next_of(ring));
    }
    attender.template wait_scores<false>();
    attender.weigh(begin, true);
    int before = -1;  // the stage of the previous values
    const auto take_weights = [&] {
      attender.wait_values();
      if (before >= 0) release(before);
      attender.take_weights();
    };
    const auto go_on = [&](int stage) {
      const bool first = begin % kKvSplitTokens == 0;
      if (!first) attender.shrink_values();
      else if (before >= 0) attender.end_split(true);
      attender.begin_values(stages + stage * S::kStageBytes + S::kTensorBytes, first);
      before = stage;
    };
    for (; begin + kTokens <= last; begin += kTokens) {
      const bool goes_further = begin + 2 * kTokens <= last;
      const int stage = ring.stage;
      take_weights();
      ring.next();
      await_turn();
      attender.begin_scores(place());
      go_on(stage);  // while scores are computed
      if (group == 0 || goes_further) give_turn();
      if (goes_further) await(next_of(ring));
      attender.template wait_scores<true>();
      attender.weigh(begin + kTokens, (begin + kTokens) % kKvSplitTokens == 0);
    }
    take_weights();
    go_on(ring.stage);
    ring.next();
    attender.wait_values();
    release(before);
    attender.end_split(false);
    attender.write(item.kv_head);
  }
#endif
}

template <int kDim>
void start_dim(const Attention& a, const AttentionTile* tiles, int count, const Rope* rope, const Queue& queue) {
  const auto kernel =
      a.soft_cap > 0 ? attend_prefill_wgmma_kernel<kDim, true> : attend_prefill_wgmma_kernel<kDim, false>;
  const int blocks = std::min(count * a.cache.kv_heads, sm_count());
  start(queue, kernel, dim3(blocks), kThreads, Shape<kDim>::kShared, a, tiles, count, rope != nullptr,
        rope ? rope->table : RotaryTable());
}

}  // namespace

void attend_prefill_wgmma(const Attention& a, const AttentionTile* tiles, int count, const Rope* rope,
                          const Queue& queue) {
  if (a.cache.head_dim == 64) start_dim<64>(a, tiles, count, rope, queue);
  else start_dim<128>(a, tiles, count, rope, queue);
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
