// Decode attention: few rows of a sequence, up to 16 (row, query head) pairs. Persistent CTAs share the KV splits of
// all tiles and KV heads evenly. Keys and values are prefetched into a ring in shared memory, without a break between
// splits: on Hopper the copy engine does it for one thread, elsewhere some warps. Eight warps compute: each has the
// scores of 32 positions of a split, and some features of the values. On Hopper others prepare the next tile meanwhile.
// The CTA with a tile's first splits merges its splits as it computes them. When the later splits have arrived, all
// CTAs with a part of the tile merge them. Many tiles of one split each are bound by load latency: a lean kernel with
// few registers runs two CTAs on an SM for them.
//
// Results have the bits of WarpPairs: scores and sums are added in the same order, and values of a quantized cache are
// rounded to 16 bits.
#pragma once
#include <algorithm>

#include "cuda/kernels/attention/attention_decode_split.cuh"
#include "cuda/kernels/attention/decode_plan.h"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace decode {

static_assert(sizeof(Shared) == kDecodeFixed && kTokens == kDecodeTokens && kBlocks == kDecodeStages);

// Bytes of shared memory before the own rows.
template <typename Shape>
__host__ __device__ constexpr int fixed_bytes(bool ahead) {
  const int bytes = sizeof(Shared) + (ahead ? 2 : 1) * kDecodePairs * 2 * Shape::kStride;
  return Shape::kRow % 128 ? bytes : (bytes + 1023) / 1024 * 1024;  // boxes begin at multiples of 1 KB
}
// What describes the cache to the copy engine, if that copies.
template <bool kBulk>
struct Boxes {};
template <>
struct Boxes<true> {
  CUtensorMap map;
};

// own: the kernel also stores the tiles' rows in the cache, as store_cache() does. rotates: with RoPE. has_splits:
// tiles may have several KV splits (not with kLean). own_rows: most own rows of a tile, if own. kPairs: two CTAs run on
// an SM, so that one computes while the other waits; heads of few features leave registers for that. kAlone: for a
// single tile, whose CTAs have little to do: code is short, and no warps prepare tiles ahead.
template <int kDim, CacheType kType, bool kLean, bool kPairs, bool kAlone, bool kBulk>
__global__ void __launch_bounds__(threads(kPairs, kBulk, prepares_ahead(kLean, kAlone, kBulk)), kPairs ? 2 : 1)
    attend_decode_kernel(const __grid_constant__ Attention a, const AttentionTile* tiles, int count, bool has_splits,
                         bool own, bool rotates, const __grid_constant__ Rope rope, int own_rows, int stages,
                         const __grid_constant__ Boxes<kBulk> boxes) {
  using S = Shape<kDim, kType, kBulk>;
  const bool several = !kLean && has_splits;
  extern __shared__ __align__(1024) char memory[];
  let_next_begin();
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  constexpr bool kAhead = prepares_ahead(kLean, kAlone, kBulk), kShort = is_short(kDim, kPairs || kAlone);
  const auto memory_of = [&](int tile) {
    char* own = memory + fixed_bytes<S>(kAhead) + tile % 2 * 2 * own_rows * S::kRow;
    uint16_t* queries = reinterpret_cast<uint16_t*>(memory + sizeof(Shared)) + tile % 2 * kDecodePairs * S::kStride;
    return TileMemory{queries, own, own + own_rows * S::kRow};
  };
  const uint32_t ring = shared_address(memory_of(kAhead).own_values + own_rows * S::kRow);
  const uint32_t full = shared_address(shared.full), empty = shared_address(shared.empty);
  // One thread of each warp: in a single warp the threads ran in turn, which took half a microsecond for 24 barriers.
  constexpr int kThreads = threads(kPairs, kBulk, kAhead), kArrivals = kBulk ? 1 : 32 * producers(kPairs, false);
  for (int stage = threadIdx.x / 32; threadIdx.x % 32 == 0 && stage < stages; stage += kThreads / 32)
    init_barrier(full + 8 * stage, kArrivals), init_barrier(empty + 8 * stage, kConsumers);
  if (kAhead && threadIdx.x < 2)
    init_barrier(shared_address(shared.ready + threadIdx.x), preparers(kPairs)),
        init_barrier(shared_address(shared.done + threadIdx.x), kConsumers);
  // No wait yet: tiles, tables and earlier positions in the cache were written before the step's first kernel.
  Begin begin = share_out_tiles(a, count);
  if (several && threadIdx.x < 32) {
    begin = share_out(a, tiles, count);
    if (threadIdx.x == 0) shared.begin = begin;
  }
  __syncthreads();
  if (several) begin = shared.begin;
  KvSplits splits(a, tiles, several, begin);
  if (!splits.left()) return;
  const int warp = threadIdx.x / 32;
  const auto prepare = [&](int tile, int number, int warps) {  // by warp `number` of so many
    prepare_tile<kDim, kType, kShort, kBulk>(a, shared, memory_of(tile), splits, own, rotates, rope, number, warps);
  };
  if (kAhead && warp > kConsumers) {  // prepares all tiles but the first one
    await_previous();
    splits.next_tile();
    for (int tile = 1; splits.left(); splits.next_tile(), tile++) {
      if (tile > 1) wait_barrier(shared_address(shared.done + tile % 2), (tile - 2) / 2 % 2);
      if (splits.rows().count) prepare(tile, warp - kConsumers - 1, preparers(kPairs));
      __syncwarp();
      if (threadIdx.x % 32 == 0) arrive(shared_address(shared.ready + tile % 2));
    }
    return;
  }
  if (warp >= kConsumers) {
    if constexpr (kBulk) copy_boxes<kDim, kType, kLean>(a, boxes.map, splits, own, full, empty, ring, stages);
    else copy_splits<kDim, kType, producers(kPairs, false), kLean>(a, splits, own, full, empty, ring, stages);
    return;
  }

  Attender<kDim, kType, kLean, kShort, kBulk> attender(a, shared, memory_of(0), ring, stages);
  await_previous();
  PipelineStage place;
  bool begins = true, merges = false;
  int tile = 0;
  const auto end_tile = [&] {
    begins = true;
    if (kAhead) {
      __syncwarp();
      if (threadIdx.x % 32 == 0) arrive(shared_address(shared.done + tile % 2));
    }
    tile++;
  };
  if (kAhead && splits.rows().count) {
    prepare(0, warp, kConsumers);
    consumers_meet();
  }
  for (; splits.left(); splits.next()) {
    const DecodeRows& rows = splits.rows();
    if (!rows.count) {
      end_tile();
      continue;
    }
    if (begins) {
      if (kAhead) {
        if (tile > 0) wait_barrier(shared_address(shared.ready + tile % 2), (tile - 1) / 2 % 2);
      } else {
        if (tile > 0) consumers_meet();  // no warp reads the previous tile's rows any more
        prepare(0, warp, kConsumers);
        consumers_meet();
      }
      attender.begin_tile(splits, memory_of(kAhead ? tile : 0));
      attender.begin_part();
      begins = false, merges = splits.split() == rows.first_split;
    }
    const Extent<kLean> extent(rows, splits.split());
    attender.attend(extent, own, place);
    place.advance(2 * extent.blocks, stages);
    if constexpr (kLean) {
      attender.end_split(), attender.write_total(splits), end_tile();
      continue;
    }
    if (merges) attender.add_split();
    else attender.leave_split(splits);
    if (splits.split() < splits.last_own()) continue;
    end_tile();
    if (merges && splits.split() == rows.last_split) {
      attender.write_total(splits);
    } else {
      if (merges) attender.leave_total(splits);
      leave_part(a, splits);
    }
  }
  if (!several || shared.begin.whole) return;
  // Other CTAs may have parts of this CTA's first tile and of its last tile.
  begin = shared.begin;
  consumers_meet();  // no warp reads the ring any more
  const bool same = begin.tile == splits.tile() && begin.kv_head == splits.kv_head(),
             end = threadIdx.x >= 32 * kMergers;
  if (same && !end) return;
  const Part part(a, tiles, end ? splits.tile() : begin.tile, end ? splits.kv_head() : begin.kv_head,
                  end ? splits.split() : begin.split, end ? splits.number() : begin.number, begin);
  if (part.blocks > 1) merge_part<kDim>(a, part, shared, ring, stages * S::kTensor / kConsumers);
}

// Whether two CTAs with several KV splits run on an SM: each has registers and memory for few bytes of a position only.
template <typename Shape>
constexpr bool kPaired = Shape::kBytes <= 128;

template <int kDim, CacheType kType, bool kBulk>
void start_decode_by(const Attention& a, const AttentionTile* tiles, int count, bool several, bool own,
                     const Rope* rope, const Queue& queue) {
  using S = Shape<kDim, kType, kBulk>;
  const int rows = own ? kOwnRows : 0, all = count * a.cache.kv_heads * (several ? a.max_splits : 1);
  const auto fixed = [&](bool ahead) { return fixed_bytes<S>(ahead) + (ahead ? 4 : 2) * rows * S::kRow; };
  const int there = sm_count(), half = (max_shared() + kReserved) / 2 - kReserved;
  Boxes<kBulk> boxes;
  if constexpr (kBulk) boxes.map = boxes_of<kDim, kType>(a.cache);
  const auto launch = [&](auto kernel, int threads, int blocks, int stages, bool ahead = false) {
    const int bytes = fixed(ahead) + stages * S::kTensor;
    start(queue, kernel, dim3(std::min(all, blocks)), threads, bytes, a, tiles, count, several, own, rope != nullptr,
          rope ? *rope : Rope(), rows, stages, boxes);
  };
  constexpr bool kAhead = prepares_ahead(false, false, kBulk);
  const auto stages_of = [&](int memory, bool ahead) {
    return std::min((memory - fixed(ahead)) / S::kTensor, kMaxStages);
  };
  if constexpr (kDim <= 128) {  // a CTA needs a stage for each block of a KV split's keys
    const int stages = stages_of(half, false), more = stages_of(half, kAhead);
    if (stages >= kBlocks && !several && all > there)
      return launch(attend_decode_kernel<kDim, kType, true, true, false, kBulk>, threads(true, kBulk, false), 2 * there,
                    stages);
    if constexpr (kPaired<S>)  // with fewer tiles CTAs have few KV splits each, which are merged
      if (more >= kBlocks && several && count * a.cache.kv_heads > there)
        return launch(attend_decode_kernel<kDim, kType, false, true, false, kBulk>, threads(true, kBulk, kAhead),
                      2 * there, more, kAhead);
  }
  const auto launch_one = [&](auto kernel, bool ahead) {
    const int wanted = several || all > there ? kMaxStages : kShortStages;
    launch(kernel, threads(false, kBulk, ahead), there, std::min(stages_of(max_shared(), ahead), wanted), ahead);
  };
  if constexpr (kBulk && !is_large(kDim))
    if (count == 1) return launch_one(attend_decode_kernel<kDim, kType, false, false, true, kBulk>, false);
  launch_one(attend_decode_kernel<kDim, kType, false, false, false, kBulk>, kAhead);
}

// The ring has a stage for each block of a KV split's keys (decode_plan.h). So a waiting warp cannot confuse its block
// with the previous block in the same stage.
template <int kDim, CacheType kType>
void start_decode(const Attention& a, const AttentionTile* tiles, int count, bool several, bool own, const Rope* rope,
                  const Queue& queue) {
  if constexpr (kHasBoxes<kDim, kType>)
    if (queue.capability == 90) return start_decode_by<kDim, kType, true>(a, tiles, count, several, own, rope, queue);
  start_decode_by<kDim, kType, false>(a, tiles, count, several, own, rope, queue);
}

}  // namespace decode
}  // namespace AS_DTYPE16
}  // namespace as::cuda
