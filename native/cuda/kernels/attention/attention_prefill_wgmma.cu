// Prefill attention over caches of 16 bits and of float8 by wgmma (after Shah et al., "FlashAttention-3", 2024). Two
// warpgroups have 64 pairs each. While one computes softmax weights, its previous product with the values and the
// products of the other warpgroup continue. A third warpgroup copies keys and values to shared memory, 64 positions at
// a time, several stages ahead and into the next tile, as CTAs are persistent; values of float8 it widens, which is
// exact. Algorithm and bits are those of attention_prefill_mma.cu: products add in the same order, and a thread has the
// same values.
#include <algorithm>

#include "cuda/kernels/attention/attention_prefill_wgmma.h"
#include "cuda/kernels/attention/attention_wgmma.cuh"
#include "cuda/kernels/common/pipeline.cuh"
#include "cuda/kernels/quantize/quantized.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace prefill {
namespace {

constexpr int kGroups = kPrefillPairs / kBlock;  // computing warpgroups, kBlock pairs each
constexpr int kThreads = 128 * (1 + kGroups);

// Keys of 64 positions are stored as consecutive blocks of 64 features (tiles.h). So are values and queries.
template <int kDim, CacheType kType>
struct Shape {
  static constexpr bool kWidens = kType == CacheType::float8;
  static constexpr int kBlocks = kDim / kBlock, kTensorBytes = kBlocks * kBlockBytes, kStageBytes = 2 * kTensorBytes;
  // Blocks of 64 positions as they are in the cache: one that is widened, and those on their way.
  static constexpr int kStages = kWidens ? 4 : 5, kNarrow = kWidens ? 3 : 0, kNarrowBytes = kStageBytes / 2;
  static constexpr int kShared = kGroups * kTensorBytes + kStages * kStageBytes + kNarrow * kNarrowBytes;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// A warpgroup copies the positions from `begin` to `last`.
template <int kDim, int kStages>
__device__ void copy_context(const Attention& a, const int* table, int kv_head, int begin, int last, uint32_t stages,
                             const Stages& barriers, Pipeline<kStages>& ring) {
  using S = Shape<kDim, CacheType::dtype16>;
  constexpr int kChunks = kDim / 8, kStep = 128 / kChunks;  // 16-byte chunks of a head; positions copied at once
  constexpr int kSide = 16;                                 // adjacent positions
  constexpr int kBytes = kDim * 2;                          // of a position
  const int chunk = threadIdx.x % kChunks, own = threadIdx.x / kChunks;
  static_assert(kStep % 8 == 0 && kSide % kStep == 0);  // a thread's chunks have one place in all rows
  const int place = chunk / 8 * kBlockBytes + chunk_offset(own, chunk % 8), own_bytes = own * kBytes + chunk * 16;
  const Positions positions(a, table, kv_head, kBytes, last);
  const size_t values_behind = (size_t)a.cache.span_size * kBytes;
  for (uint64_t found = positions.find(begin); begin <= last; begin += kTokens, ring.next()) {
    const uint64_t next = positions.find(begin + kTokens);
    barrier_wait(barriers.empty_at(ring.stage), ring.parity ^ 1);
    __syncwarp();
    const uint32_t to = stages + ring.stage * S::kStageBytes + place;
#pragma unroll
    for (int side = 0; side < kTokens; side += kSide) {
      const char* keys = reinterpret_cast<const char*>(__shfl_sync(0xffffffffu, found, side / kSide)) + own_bytes;
      const char* values = keys + values_behind;
#pragma unroll
      for (int i = 0; i < kSide; i += kStep) {
        const bool there = begin + side + i + own <= last;
        copy_16(to + (side + i) * kRowBytes, keys + i * kBytes, there);
        copy_16(to + (side + i) * kRowBytes + S::kTensorBytes, values + i * kBytes, there);
      }
    }
    arrive_with_copies(barriers.full_at(ring.stage));
    if (threadIdx.x == 0) barrier_arrive(barriers.full_at(ring.stage));
    found = next;
  }
}

// The same for float8. A thread copies chunks of 16 values, and widens them itself when they have arrived, while those
// of the next blocks are on their way. narrow: where they arrive.
template <int kDim, int kStages>
__device__ void widen_context(const Attention& a, const int* table, int kv_head, int begin, int last, uint32_t stages,
                              uint32_t narrow, const Stages& barriers, Pipeline<kStages>& ring) {
  using S = Shape<kDim, CacheType::float8>;
  constexpr int kChunks = kDim / 16, kStep = 128 / kChunks, kTurns = kTokens / kStep;  // positions copied at once
  constexpr int kSide = 16;                                                            // adjacent positions
  static_assert(kStep % kSide == 0);
  const int chunk = threadIdx.x % kChunks, own = threadIdx.x / kChunks;
  const int place = chunk / 4 * kBlockBytes + own * kRowBytes, first = chunk % 4 * 2 ^ own % 8, other = first ^ 1;
  const Positions positions(a, table, kv_head, kDim, last);
  const size_t values_behind = (size_t)a.cache.span_size * kDim;
  narrow += threadIdx.x * 16;
  const auto fetch = [&](int begin, uint64_t found, int block) {
    const uint32_t to = narrow + block * S::kNarrowBytes;
#pragma unroll
    for (int turn = 0; turn < kTurns; turn++) {
      const char* keys = reinterpret_cast<const char*>(__shfl_sync(0xffffffffu, found, (turn * kStep + own) / kSide)) +
                         own % kSide * kDim + chunk * 16;
      const bool there = begin + turn * kStep + own <= last;
      copy_16(to + turn * 2 * 2048, keys, there);
      copy_16(to + (turn * 2 + 1) * 2048, keys + values_behind, there);
    }
    commit_copies();
  };
  uint64_t found = positions.find(begin + (S::kNarrow - 1) * kTokens);
#pragma unroll
  for (int block = 0; block < S::kNarrow - 1; block++)
    fetch(begin + block * kTokens, positions.find(begin + block * kTokens), block);
  for (int block = 0; begin <= last; begin += kTokens, ring.next()) {
    const int next = block == 0 ? S::kNarrow - 1 : block - 1;
    fetch(begin + (S::kNarrow - 1) * kTokens, found, next);
    found = positions.find(begin + S::kNarrow * kTokens);
    barrier_wait(barriers.empty_at(ring.stage), ring.parity ^ 1);
    wait_copies<S::kNarrow - 1>();
    const uint32_t from = narrow + block * S::kNarrowBytes, to = stages + ring.stage * S::kStageBytes + place;
#pragma unroll
    for (int i = 0; i < 2 * kTurns; i++) {  // keys and values of positions in turn
      const uint4 values = load_16(from + i * 2048);
      const uint32_t row = to + i / 2 * kStep * kRowBytes + i % 2 * S::kTensorBytes;
      const float4 x = four_from_e4m3(values.x), y = four_from_e4m3(values.y), z = four_from_e4m3(values.z),
                   w = four_from_e4m3(values.w);
      store_16(row + first * 16, make_uint4(to_dtype16x2(x.x, x.y), to_dtype16x2(x.z, x.w), to_dtype16x2(y.x, y.y),
                                            to_dtype16x2(y.z, y.w)));
      store_16(row + other * 16, make_uint4(to_dtype16x2(z.x, z.y), to_dtype16x2(z.z, z.w), to_dtype16x2(w.x, w.y),
                                            to_dtype16x2(w.z, w.w)));
    }
    written_for_products();
    barrier_arrive(barriers.full_at(ring.stage));
    if (threadIdx.x == 0) barrier_arrive(barriers.full_at(ring.stage));
    block = block == S::kNarrow - 1 ? 0 : block + 1;
  }
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
#pragma unroll
  for (int turn = 0; turn < kTurns; turn++) {
    const int pair = first + own + turn * (128 / kChunks);
    const bool there = pair < rows.count && rows.has(pair, kv_head);
    const int row = there ? rows.row(pair) : rows.tile.row, column = there ? rows.head(pair, kv_head) * kDim : 0;
    kept[turn] = there ? ~0u : 0;
    const float* head = a.qkv + (size_t)row * a.width + column;
    load_eight(head + chunk * 8, x[turn]), load_eight(head + kHalfDim + chunk * 8, y[turn]);
    if (!rotates) continue;
    const size_t at = (size_t)row * kHalfDim + chunk * 8;
    load_eight(t.cosine + at, cosine[turn]), load_eight(t.sine + at, sine[turn]);
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

// A warpgroup's state for its 64 pairs.
template <int kDim, bool kCapped>
class Attender {
 public:
  __device__ Attender(const Attention& a, const TileRows& rows, int first, uint32_t queries)
      : a_(a),
        rows_(rows),
        queries_(descriptor(queries)),
        pair_(first + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4),
        scores_(a, rows, pair_) {}

  __device__ void begin_scores(uint32_t keys) { scores_.template begin<kDim>(queries_, keys); }
  // Turns scores into weights, while products with the previous weights may still run. shrink_values() rescales the KV
  // split's earlier values to the new maximum afterwards. first: first scores of a KV split; the previous KV split may
  // not have ended yet.
  __device__ void weigh(int begin, bool first) {
    if (first) ended_ = split_, split_ = SplitSums();
    scores_.weigh(begin, split_);
  }
  // Rescales the KV split's earlier values to its new maximum. Call it when no products with weights are running.
  __device__ void shrink_values() { values_.shrink(split_.by); }
  // Converts weights for the next product. Call it when no products with weights are running.
  __device__ void take_weights() {
#pragma unroll
    for (int i = 0; i < kTokens / 4; i++) weights_[i / 4][i % 4] = scores_.weights(i);
  }
  __device__ void begin_values(uint32_t values, bool first) {
    begin_wgmma();
#pragma unroll
    for (int s = 0; s < kTokens / 16; s++)
      WeighedTile<kDim>::multiply(values_.sums(), weights_[s],
                                  further(descriptor_of_columns(values), s * 16 * kRowBytes), s > 0 || !first);
    commit_wgmma();
  }
  // kValuesToo: products with values, begun after those for the scores, may still run.
  template <bool kValuesToo>
  __device__ void wait_scores() {
    wait_wgmma<kValuesToo ? 1 : 0>();
    scores_.settle_scores();
  }
  __device__ void wait_values() {
    wait_wgmma<0>();
    settle(values_.sums());
  }
  // Merges the KV split into the total. begun: weigh() has already begun the next KV split.
  __device__ void end_split(bool begun) { values_.end_split(begun ? ended_ : split_); }
  __device__ void write(int kv_head) { values_.write(a_, rows_, pair_, kv_head, kDim, 0); }

 private:
  const Attention& a_;
  const TileRows& rows_;
  const uint64_t queries_;
  const int pair_;
  Scores<kCapped> scores_;
  Values<kDim> values_;
  SplitSums split_, ended_;
  uint32_t weights_[kTokens / 16][4];
};
#endif

template <int kDim, CacheType kType, bool kCapped>
__global__ void __launch_bounds__(kThreads, 1)
    attend_prefill_wgmma_kernel(const __grid_constant__ Attention a, const AttentionTile* tiles, int count,
                                bool rotates, const __grid_constant__ RotaryTable table) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = Shape<kDim, kType>;
  constexpr int kStages = S::kStages;
  extern __shared__ __align__(1024) char shared[];
  __shared__ Barriers<kStages> barriers;
  let_next_begin();
  if (threadIdx.x == 0) init_barriers(barriers, kGroups);
  __syncthreads();
  await_previous();
  const int group = warpgroup() - 1;
  const uint32_t queries = shared_address(shared), stages = queries + kGroups * S::kTensorBytes;
  const Stages at_stage(barriers);
  Pipeline<kStages> ring;
  if (group < 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    copy_items<kDim, kPrefillPairs>(
        a, tiles, count, barriers, at_stage, ring, [&](const Item& item, const TileRows& rows) {
          const int* table = a.tables + rows.tile.table;
          const int begin = rows.begin_of(rows.first_split, kTokens);
          if constexpr (S::kWidens)
            widen_context<kDim>(a, table, item.kv_head, begin, rows.last, stages, stages + kStages * S::kStageBytes,
                                at_stage, ring);
          else copy_context<kDim>(a, table, item.kv_head, begin, rows.last, stages, at_stage, ring);
        });
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
    int begin = rows.begin_of(rows.first_split, kTokens);
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
      const bool first = begin % kKvSplitTokens == 0 || before < 0;
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

template <int kDim, CacheType kType>
void start_dim(const Attention& a, const AttentionTile* tiles, int count, const Rope* rope, const Queue& queue) {
  const auto kernel =
      a.soft_cap > 0 ? attend_prefill_wgmma_kernel<kDim, kType, true> : attend_prefill_wgmma_kernel<kDim, kType, false>;
  const int blocks = std::min(count * a.cache.kv_heads, sm_count());
  start(queue, kernel, dim3(blocks), kThreads, Shape<kDim, kType>::kShared, a, tiles, count, rope != nullptr,
        rope ? rope->table : RotaryTable());
}

}  // namespace
}  // namespace prefill

void attend_prefill_wgmma(const Attention& a, const AttentionTile* tiles, int count, const Rope* rope,
                          const Queue& queue) {
  constexpr CacheType kFloat8 = CacheType::float8, kDtype16 = CacheType::dtype16;
  if (a.cache.type == kFloat8)
    (a.cache.head_dim == 64 ? prefill::start_dim<64, kFloat8> : prefill::start_dim<128, kFloat8>)(a, tiles, count, rope,
                                                                                                  queue);
  else if (a.cache.head_dim == 64) prefill::start_dim<64, kDtype16>(a, tiles, count, rope, queue);
  else if (a.cache.head_dim == 128) prefill::start_dim<128, kDtype16>(a, tiles, count, rope, queue);
  else attend_prefill_wide(a, tiles, count, queue);
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
