// Distribution of the KV splits of decode tiles over persistent CTAs, KV head by KV head.
#pragma once
#include "cuda/kernels/attention/attention.cuh"
#include "cuda/kernels/common/waits.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace decode {

constexpr int kTokens = 64,
              kBlocks = kKvSplitTokens / kTokens;  // of a stage; stages of a KV split's keys, and as many of its values
constexpr int kConsumers = 8;                      // warps that compute
// Copying warps, and all threads of a CTA. pairs: two CTAs run on an SM; bulk: one thread requests whole boxes.
__host__ __device__ constexpr int producers(bool pairs, bool bulk) { return bulk ? 1 : pairs ? 2 : 4; }
// Whether warps of their own prepare a tile (prepare_tile()) while the one before it is computed, and how many. lean: a
// tile has only one KV split; alone: there is one tile.
__host__ __device__ constexpr bool prepares_ahead(bool lean, bool alone, bool bulk) { return bulk && !lean && !alone; }
__host__ __device__ constexpr int preparers(bool pairs) { return pairs ? 1 : 3; }
__host__ __device__ constexpr int threads(bool pairs, bool bulk, bool ahead) {
  return 32 * (kConsumers + producers(pairs, bulk) + (ahead ? preparers(pairs) : 0));
}
constexpr int kReserved = 1 << 10;  // bytes of a CTA's shared memory that the system reserves
constexpr int kShortStages = 6, kMaxStages = 24;

// The KV splits of a CTA: where they begin, their count, and the number of the first among all. Each CTA has `each`
// splits, and the first `more` CTAs have one more. whole: a CTA has all splits of a tile and KV head instead.
struct Begin {
  int tile, kv_head, split, count, number;
  int each, more;
  bool whole;

  __device__ int begin_of(int block) const { return block * each + min(block, more); }
  __device__ int block_of(int number) const {
    const int larger = more * (each + 1);
    return number < larger ? number / (each + 1) : more + (number - larger) / each;
  }
};

struct Shared {
  uint64_t full[kMaxStages], empty[kMaxStages];
  uint64_t ready[2], done[2];              // a tile's queries and own rows are in shared memory; are not read any more
  uint4 weights[kKvSplitTokens / 16][32];  // of 16 positions each, as first operand of mma.sync
  float maxima[kDecodePairs][kConsumers], sums[kConsumers][kDecodePairs][4];  // over a warp's positions
  float shrunk[kBlocks][kDecodePairs];  // factors that rescale a KV split's sums before each block
  float own_scales[4][kOwnRows];        // of the own rows: keys' scales and minimums, then values'
  Begin begin;
};

// A warp distributes the KV splits of all tiles and KV heads over the CTAs in equal parts. If no CTA gets more that
// way, each takes a whole tile and KV head instead, which needs no merge.
__device__ inline Begin share_out(const Attention& a, const AttentionTile* tiles, int count) {
  const auto splits_of = [&](int tile) {
    const DecodeRows rows(a, tiles[tile], kDecodePairs);
    return rows.count ? rows.last_split - rows.first_split + 1 : 0;
  };
  const int each = (count + 31) / 32, lane = threadIdx.x % 32, first = lane * each, end = min(first + each, count);
  int own = 0, most = 0;
  for (int i = first; i < end; i++) {
    const int splits = splits_of(i);
    own += splits, most = max(most, splits);
  }
  int before = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, before, step);
    if (lane >= step) before += other;
  }
  const int heads = a.cache.kv_heads, all = __shfl_sync(0xffffffffu, before, 31) * heads;
  before -= own;
  most = __reduce_max_sync(0xffffffffu, most);
  const int whole = count * heads, blocks = gridDim.x;
  Begin share = {};
  share.whole = whole <= blocks && most <= (all + blocks - 1) / blocks;
  if (share.whole) {
    const bool has = (int)blockIdx.x < whole;
    share.tile = has ? blockIdx.x / heads : 0, share.kv_head = blockIdx.x % heads;
    share.split = DecodeRows(a, tiles[share.tile], kDecodePairs).first_split,
    share.count = has ? splits_of(share.tile) : 0;
    return share;
  }
  share.each = all / gridDim.x, share.more = all % gridDim.x;
  share.count = share.each + ((int)blockIdx.x < share.more), share.number = share.begin_of(blockIdx.x);
  const int begin = share.number - before * heads;
  const bool here = begin >= 0 && begin < own * heads;
  share.tile = share.kv_head = share.split = 0;
  if (here) {
    int tile = first, within = begin, splits = splits_of(tile);
    for (; within >= splits * heads; splits = splits_of(++tile)) within -= splits * heads;
    const DecodeRows rows(a, tiles[tile], kDecodePairs);
    share.tile = tile, share.kv_head = within / splits, share.split = rows.first_split + within % splits;
  }
  const int from = __ffs(__ballot_sync(0xffffffffu, here)) - 1;
  if (from < 0) {
    share.count = 0;
    return share;
  }
  share.tile = __shfl_sync(0xffffffffu, share.tile, from);
  share.kv_head = __shfl_sync(0xffffffffu, share.kv_head, from);
  share.split = __shfl_sync(0xffffffffu, share.split, from);
  return share;
}

// The distribution if each tile has one KV split; tiles without rows count, too. Every thread computes it.
__device__ inline Begin share_out_tiles(const Attention& a, int count) {
  const int heads = a.cache.kv_heads, all = count * heads;
  Begin share;
  share.each = 1, share.more = 0;
  if (all != gridDim.x) share.each = all / gridDim.x, share.more = all % gridDim.x;  // divisions are slow
  share.count = share.each + ((int)blockIdx.x < share.more), share.number = share.begin_of(blockIdx.x);
  share.tile = share.number / heads, share.kv_head = share.number % heads, share.split = 0;
  return share;
}

// Iterates over the KV splits of a CTA.
class KvSplits {
 public:
  __device__ KvSplits(const Attention& a, const AttentionTile* tiles, bool several, const Begin& begin)
      : a_(a), tiles_(tiles), several_(several) {
    tile_ = begin.tile, kv_head_ = begin.kv_head, split_ = begin.split, left_ = begin.count, number_ = begin.number;
    if (!left_) return;
    rows_ = DecodeRows(a, tiles[tile_], kDecodePairs);
    if (!several) split_ = rows_.first_split;
  }

  __device__ int left() const { return left_; }  // KV splits left, including this one
  __device__ int tile() const { return tile_; }
  __device__ int kv_head() const { return kv_head_; }
  __device__ int split() const { return split_; }
  __device__ int number() const { return number_; }  // of this KV split among all
  __device__ const DecodeRows& rows() const { return rows_; }
  // The CTA's last KV split of this tile and KV head. next_tile() goes to the one after it.
  __device__ int last_own() const { return min(rows_.last_split, split_ + left_ - 1); }
  __device__ void next_tile() {
    for (int i = last_own() - split_; i >= 0; i--) next();
  }
  __device__ void next() {
    if (!--left_) return;
    number_++;
    if (several_ && split_ < rows_.last_split) {
      split_++;
      return;
    }
    if (++kv_head_ == a_.cache.kv_heads) {
      kv_head_ = 0;
      do rows_ = DecodeRows(a_, tiles_[++tile_], kDecodePairs);
      while (several_ && !rows_.count);
    }
    split_ = rows_.first_split;
  }

 private:
  const Attention& a_;
  const AttentionTile* const tiles_;
  const bool several_;
  int tile_ = 0, kv_head_ = 0, split_ = 0, left_ = 0, number_ = 0;
  DecodeRows rows_;
};

// The positions of a KV split, in blocks of 64, from the first block on that a row sees. The own rows, which are those
// of the tile and of the sequence's tiles before it, have the positions from `start` on: if this kernel stores them,
// they are not in the cache yet. kLean: a tile's only KV split, of which all blocks are read, since the kernel for
// these has no registers left.
template <bool kLean>
struct Extent {
  int begin, last, start, blocks;

  __device__ Extent(const DecodeRows& rows, int split)
      : begin(kLean ? split * kKvSplitTokens : rows.begin_of(split, kTokens)),
        start(rows.tile.start - rows.tile.before) {
    last = min(rows.last, (split + 1) * kKvSplitTokens - 1);
    blocks = (last - begin) / kTokens + 1;
  }
  // Positions from here on are not in the cache. own: this kernel stores the own rows.
  __device__ int known(bool own) const { return own ? min(start, last + 1) : last + 1; }
};

__device__ inline void consumers_meet() { asm volatile("bar.sync 1, %0;" ::"n"(32 * kConsumers) : "memory"); }

// A CTA's part of a tile and a KV head. The CTA with the first KV splits merges them as it computes them, and writes
// the result to the place of its last one.
struct Part {
  int tile, kv_head;
  DecodeRows rows;
  int blocks, own;  // CTAs that have a part; this CTA's number among them
  int merged;       // the last KV split that the first CTA has merged

  // split: one of the CTA's KV splits; number: its number among all.
  __device__ Part(const Attention& a, const AttentionTile* tiles, int tile, int kv_head, int split, int number,
                  const Begin& begin)
      : tile(tile), kv_head(kv_head), rows(a, tiles[tile], kDecodePairs) {
    const int first = number - (split - rows.first_split), last = first + rows.last_split - rows.first_split;
    const int block = begin.block_of(first);
    blocks = begin.block_of(last) - block + 1, own = blockIdx.x - block;
    merged = rows.first_split + min(begin.begin_of(block + 1) - 1, last) - first;
  }
};

constexpr int kMergers = kConsumers / 2;  // warps of a CTA that merge each end of its range

// Signals that a warp has written its part of a tile and KV head for the merge.
__device__ inline void leave_part(const Attention& a, const KvSplits& splits) {
  __syncwarp();
  if (threadIdx.x % 32) return;
  asm volatile(
      "red.release.gpu.global.add.s32 [%0], 1;" ::"l"(a.arrivals + splits.tile() * a.cache.kv_heads + splits.kv_head())
      : "memory");
}

// Two adjacent values of a result.
__device__ inline void put_two(const Rows& out, int row, int column, float first, float second) {
  if (out.tiles)
    *reinterpret_cast<uint32_t*>(out.tiles + tile_offset(row, column, blocks_of(out.width))) =
        to_dtype16x2(first, second);
  if (out.values)
    *reinterpret_cast<float2*>(out.values + (size_t)row * out.width + column) = make_float2(first, second);
}

// In each CTA that shares a tile and KV head, kMergers computing warps merge some of the results. They wait for all of
// these CTAs. This ends, as all CTAs of the grid run at once and none waits before it has written its own parts.
// memory: shared memory, `bytes` for each warp. Loops are unrolled little because the SM must first fetch a kernel's
// instructions into its cache.
template <int kDim>
__device__ void merge_part(const Attention& a, const Part& part, Shared& shared, uint32_t memory, int bytes) {
  constexpr int kWide = kDim < 128 ? kDim : 128, kChunks = kDim / kWide, kLeaving = 1 << 16;  // features; of a pair
  static_assert(kDim % kWide == 0 && kWide % 4 == 0);
  const DecodeRows& rows = part.rows;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, kv_head = part.kv_head, warps = kConsumers * part.blocks;
  const int chunks = rows.count * kChunks, mergers = kMergers * part.blocks, max_splits = min(32, bytes / (kWide * 4));
  int* arrivals = a.arrivals + part.tile * a.cache.kv_heads + kv_head;
  int chunk = warp % kMergers * part.blocks + part.own;
  if (chunk >= chunks) return;
  memory += warp * bytes + lane * 16;
  float4* factors = reinterpret_cast<float4*>(shared.weights[warp]);
  await_flag(arrivals, Waiter::attend_decode, a.given_up, [&](int count) { return (count & (kLeaving - 1)) == warps; });
  __syncwarp();
  const bool has = lane * 4 < kWide;
  for (; chunk < chunks; chunk += mergers) {
    const int pair = chunk / kChunks, feature = chunk % kChunks * kWide + (has ? lane * 4 : 0);
    const auto place = [&](int split, int at) { return partial_of(a, rows.tile.first, kv_head, split) + at; };
    const int at = 2 * kDecodePairs + pair * kDim + feature;
    float most = __ldcg(place(part.merged, pair)), sum = __ldcg(place(part.merged, kDecodePairs + pair));
    float4 total = __ldcg(reinterpret_cast<const float4*>(place(part.merged, at)));
#pragma unroll 1
    for (int first = part.merged + 1; first <= rows.last_split; first += max_splits) {
      const int count = min(max_splits, rows.last_split - first + 1), own = first + min(lane, count - 1);
      const float own_most = __ldcg(place(own, pair)), own_sum = __ldcg(place(own, kDecodePairs + pair));
#pragma unroll 4
      for (int i = 0; i < count; i++)
        if (has) copy_16(memory + i * kWide * 4, place(first + i, at));
      commit_copies();
      // Each lane computes the factors of one KV split.
      float now = fmaxf(most, own_most);
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const float other = __shfl_up_sync(0xffffffffu, now, step);
        if (lane >= step) now = fmaxf(now, other);
      }
      const float earlier = __shfl_up_sync(0xffffffffu, now, 1);
      factors[lane] = make_float4(shrunk(lane ? earlier : most, now), shrunk(own_most, now), own_sum, 0);
      most = __shfl_sync(0xffffffffu, now, 31);
      wait_copies<0>();
      __syncwarp();
#pragma unroll 4
      for (int i = 0; i < count; i++) {
        const float4 factor = factors[i], split = load_floats(memory + i * kWide * 4);
        sum = merged(sum, factor.x, factor.z, factor.y);
        total.x = merged(total.x, factor.x, split.x, factor.y), total.y = merged(total.y, factor.x, split.y, factor.y);
        total.z = merged(total.z, factor.x, split.z, factor.y), total.w = merged(total.w, factor.x, split.w, factor.y);
      }
      __syncwarp();
    }
    if (!has || !rows.has(pair, kv_head)) continue;
    const int head = rows.head(pair, kv_head), row = rows.row(pair), column = head * kDim + feature;
    const float all = with_sink(a, head, sum, most);
    put_two(a.out, row, column, share(total.x, all), share(total.y, all));
    put_two(a.out, row, column + 2, share(total.z, all), share(total.w, all));
  }
  // The last warp to leave resets the counter: it is zero between launches.
  if (lane == 0 && atomicAdd(arrivals, kLeaving) == (min(mergers, chunks) - 1) * kLeaving + warps) *arrivals = 0;
}

}  // namespace decode
}  // namespace AS_DTYPE16
}  // namespace as::cuda
