// Prefill attention over 16-bit caches with heads of 256 features by wgmma. Registers do not hold the values of 64
// pairs and their total twice, once for each of two warpgroups (attention_prefill_wgmma.cu), so two warpgroups share 64
// pairs: each has half of the features of the values, and they take turns at scores. While one turns the scores of a
// block of 64 positions into weights, which it leaves in shared memory for both, products with the weights of the block
// before run, and behind them the scores of the block after it. A third warpgroup copies keys and values several blocks
// ahead and into the next tile, as CTAs are persistent. Algorithm and bits are those of attention_prefill_mma.cu.
#include <algorithm>
#include <type_traits>

#include "cuda/kernels/attention/attention_prefill_wgmma.h"
#include "cuda/kernels/attention/attention_wgmma.cuh"
#include "cuda/kernels/common/pipeline.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace prefill {
namespace {

constexpr int kDim = 256, kPairs = kBlock, kParts = kPrefillPairs / kPairs;
[[maybe_unused]] constexpr int kHalf = kDim / 2;  // features of a warpgroup's values
constexpr int kComputing = 256, kThreads = 128 + kComputing;
// Keys, or values, of 64 positions have a stage each: consecutive blocks of 64 features (tiles.h), as have the queries.
constexpr int kStages = 5, kTensorBytes = kDim / kBlock * kBlockBytes;
constexpr int kShared = kTensorBytes + 2 * kBlockBytes + kStages * kTensorBytes;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// What the warpgroup with a block's scores leaves for the other one, by thread.
struct Left {
  float4 sums[128];  // most and sum of SplitSums
  float2 by[128];
};

// A warpgroup copies the positions from `begin` to `last`: the keys of the first block; then the keys of the next block
// and the values of each.
__device__ void copy_context(const Attention& a, const int* table, int kv_head, int begin, int last, uint32_t stages,
                             const Stages& barriers, Pipeline<kStages>& ring) {
  constexpr int kChunks = kDim / 8, kStep = 128 / kChunks, kSide = 16, kBytes = kDim * 2;
  const int chunk = threadIdx.x % kChunks, own = threadIdx.x / kChunks, own_bytes = own * kBytes + chunk * 16;
  static_assert(2 * kStep == 8 && kSide % 8 == 0);  // a thread's chunks have two places in rows
  const int even = chunk / 8 * kBlockBytes + chunk_offset(own, chunk % 8),
            odd = chunk / 8 * kBlockBytes + chunk_offset(own + kStep, chunk % 8) - kStep * kRowBytes;
  const Positions positions(a, table, kv_head, kBytes, last);
  const auto copy = [&](uint64_t found, size_t behind, int begin) {
    barrier_wait(barriers.empty_at(ring.stage), ring.parity ^ 1);
    __syncwarp();
    const uint32_t to = stages + ring.stage * kTensorBytes;
#pragma unroll
    for (int side = 0; side < kTokens; side += kSide) {
      const char* from =
          reinterpret_cast<const char*>(__shfl_sync(0xffffffffu, found, side / kSide)) + own_bytes + behind;
#pragma unroll
      for (int i = 0; i < kSide; i += kStep)
        copy_16(to + (i / kStep % 2 ? odd : even) + (side + i) * kRowBytes, from + i * kBytes,
                begin + side + i + own <= last);
    }
    arrive_with_copies(barriers.full_at(ring.stage));
    if (threadIdx.x == 0) barrier_arrive(barriers.full_at(ring.stage));
    ring.next();
  };
  uint64_t now = positions.find(begin), next = positions.find(begin + kTokens);
  copy(now, 0, begin);
  for (; begin <= last; begin += kTokens) {
    const uint64_t later = positions.find(begin + 2 * kTokens);
    if (begin + kTokens <= last) copy(next, 0, begin + kTokens);
    copy(now, (size_t)a.cache.span_size * kBytes, begin);
    now = next, next = later;
  }
}

// The computing threads copy the queries of the tile.
__device__ void copy_queries(const Attention& a, const TileRows& rows, int kv_head, char* to) {
  constexpr int kChunks = kDim / 8, kEach = kComputing / kChunks, kTurns = kPairs / kEach;
  const int chunk = threadIdx.x % kChunks, own = (threadIdx.x - 128) / kChunks;
  float x[kTurns][8];
  uint32_t kept[kTurns];
#pragma unroll
  for (int turn = 0; turn < kTurns; turn++) {
    const int pair = own + turn * kEach;
    const bool there = pair < rows.count && rows.has(pair, kv_head);
    kept[turn] = there ? ~0u : 0;
    load_eight(a.qkv + (size_t)(there ? rows.row(pair) : rows.tile.row) * a.width +
                   (there ? rows.head(pair, kv_head) * kDim : 0) + chunk * 8,
               x[turn]);
  }
#pragma unroll
  for (int turn = 0; turn < kTurns; turn++) put_chunk(to, own + turn * kEach, chunk, x[turn], kept[turn]);
  written_for_products();
}
#endif

template <bool kCapped>
__global__ void __launch_bounds__(kThreads, 1)
    attend_prefill_wide_kernel(const __grid_constant__ Attention a, const AttentionTile* tiles, int count) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char shared[];
  __shared__ Barriers<kStages> barriers;
  __shared__ Left left[2];
  let_next_begin();
  if (threadIdx.x == 0) init_barriers(barriers, 2);
  __syncthreads();
  await_previous();
  const int group = warpgroup() - 1;
  const uint32_t queries = shared_address(shared), weights = queries + kTensorBytes, stages = weights + 2 * kBlockBytes;
  const Stages at_stage(barriers);
  if (group < 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    Pipeline<kStages> ring;
    copy_items<kDim, kPairs>(a, tiles, count, barriers, at_stage, ring, [&](const Item& item, const TileRows& rows) {
      copy_context(a, a.tables + rows.tile.table, item.kv_head, rows.begin_of(rows.first_split, kTokens), rows.last,
                   stages, at_stage, ring);
    });
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  const int thread = threadIdx.x % 128, lane = threadIdx.x % 32, pair = thread / 32 * 16 + lane / 4;
  // times: 2 if the other warpgroup does not read the stage.
  const auto release = [&](const PipelineStage& at, int times) {
    if (thread < times) barrier_arrive(at_stage.empty_at(at.stage));
  };
  const auto await = [&](const PipelineStage& at) {
    barrier_wait(at_stage.full_at(at.stage), at.parity);
    written_for_products();
  };
  const auto place = [&](const PipelineStage& at) { return stages + at.stage * kTensorBytes; };
  const auto all_here = [&] { asm volatile("bar.sync 1, %0;" ::"n"(kComputing) : "memory"); };
  PipelineStage next;  // of the next item
  for (int number = 0;; number++) {
    await(next);
    const Item item = barriers.items[number % kItems];
    if (item.kv_head < 0) return;
    const TileRows rows(a, item.tile, kPairs);
    const int start = rows.begin_of(rows.first_split, kTokens), blocks = (rows.last - start) / kTokens + 1;
    all_here();  // nobody uses the previous queries and weights any more
    copy_queries(a, rows, item.kv_head, shared);
    all_here();
    Scores<kCapped> scores(a, rows, pair);
    Values<kHalf> values;
    SplitSums split, ended;
    PipelineStage keys = next, value = next.after(blocks > 1 ? 2 : 1, kStages);  // the next ones that this one reads
    const auto begins_split = [&](int block) { return !block || (start + block * kTokens) % kKvSplitTokens == 0; };
    // Behind the last block the scores of anything: control flow that depends on blocks would keep the compiler from
    // having two products under way.
    const auto begin_scores = [&](int block) {
      if (block < blocks) await(keys);
      scores.template begin<kDim>(descriptor(queries), place(keys));
    };
    // Turns a block's scores into weights and leaves them, and the KV split's sums.
    const auto weigh = [&](int block) {
      if (begins_split(block)) ended = split, split = SplitSums();
      scores.weigh(start + block * kTokens, split);
#pragma unroll
      for (int i = 0; i < kTokens / 4; i++)
        store_shared(weights + block % 2 * kBlockBytes + chunk_offset(pair + i % 2 * 8, i / 2) + lane % 4 * 4,
                     scores.weights(i));
      left[block % 2].sums[thread] = make_float4(split.most[0], split.most[1], split.sum[0], split.sum[1]);
      left[block % 2].by[thread] = make_float2(split.by[0], split.by[1]);
      written_for_products();
    };
    // Multiplies a block's weights and values. kOwn: they are from this warpgroup's scores, so it begins those of the
    // block after the next one; otherwise it turns the next block's scores into weights.
    const auto multiply = [&](auto own, int block) {
      constexpr bool kOwn = decltype(own)::value;
      all_here();  // the weights are there, and nobody uses those of the block before
      if constexpr (!kOwn) {
        if (begins_split(block)) ended = split;
        const float4 sums = left[block % 2].sums[thread];
        const float2 by = left[block % 2].by[thread];
        split.most[0] = sums.x, split.most[1] = sums.y, split.sum[0] = sums.z, split.sum[1] = sums.w;
        split.by[0] = by.x, split.by[1] = by.y;
      }
      const bool first = begins_split(block);
      if (!first) values.shrink(split.by);
      else if (block) values.end_split(ended);
      await(value);
      begin_wgmma();
#pragma unroll
      for (int s = 0; s < kTokens / 16; s++)
        ColumnsTile<kHalf>::multiply(
            values.sums(), further(descriptor(weights + block % 2 * kBlockBytes), s * kStepBytes),
            further(descriptor_of_columns(place(value) + group * kTensorBytes / 2), s * 16 * kRowBytes),
            s > 0 || !first);
      commit_wgmma();
      if constexpr (!kOwn) {
        wait_wgmma<1>();
        scores.settle_scores();
        if (block + 1 < blocks) {
          release(keys, 2);
          keys.advance(4, kStages);
          weigh(block + 1);
        }
      }
      wait_wgmma<0>();
      settle(values.sums());
      release(value, 1);
      if constexpr (kOwn) begin_scores(block + 2);
      if (block + 1 < blocks) value.advance(block + 2 < blocks ? 2 : 1, kStages);
    };
    int block = 0;
    if (group == 0) {
      begin_scores(0);
      wait_wgmma<0>();
      scores.settle_scores();
      release(keys, 1);
      keys.advance(3, kStages);
      weigh(0);
    } else {
      release(keys, 1);  // both wait for the keys of the first block, which come with the item
      keys.advance(1, kStages);
      begin_scores(1);
      multiply(std::false_type(), block++);
    }
    while (block < blocks) {
      multiply(std::true_type(), block++);
      if (block == blocks) {
        wait_wgmma<0>();
        scores.settle_scores();
        break;
      }
      multiply(std::false_type(), block++);
    }
    next = value.after(1, kStages);
    values.end_split(split);
    values.write(a, rows, pair, item.kv_head, kDim, group * kHalf);
  }
#endif
}

}  // namespace
}  // namespace prefill

void attend_prefill_wide(const Attention& a, const AttentionTile* tiles, int count, const Queue& queue) {
  using namespace prefill;
  const auto kernel = a.soft_cap > 0 ? attend_prefill_wide_kernel<true> : attend_prefill_wide_kernel<false>;
  start(queue, kernel, dim3(std::min(count * a.cache.kv_heads * kParts, sm_count())), kThreads, kShared, a, tiles,
        count);
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
