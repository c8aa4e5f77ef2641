// Prefill attention by mma.sync: four warps of 16 pairs share keys and values in shared memory. 16-bit caches: the next
// 64 positions are copied while the current 64 are computed. Quantized caches: the bytes of 64 positions are
// prefetched, then all warps of a CTA convert them to bfloat16 in shared memory. Decode: attention_decode.cuh.
#include "cuda/kernels/attention/attention_mma.h"
#include "cuda/kernels/attention/attention_pairs.cuh"
#include "cuda/kernels/attention/decode_plan.h"
#include "cuda/kernels/quantize/quantized.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace {

constexpr int kTokens = 64, kWarps = 4, kThreads = 32 * kWarps;  // positions at a time

// Shared memory: for quantized caches keys and values as 16-bit values, then two stages of keys and values as they are
// cached, with their scales, then queries.
template <int kDim, CacheType kType, bool kPadded>
struct Shape {
  using Pairs = WarpPairs<kDim, kPadded>;
  static constexpr bool kQuants = kType != CacheType::dtype16, kScaled = kQuants && kType != CacheType::float8;
  static constexpr int kBits = kType == CacheType::uint4 ? 4 : kQuants ? 8 : 16;
  static constexpr int kRow = kDim * kBits / 8;                             // bytes of a key, or a value, in the cache
  static constexpr int kGroups = kWarps / Pairs::kShare;                    // groups of warps that share pairs
  static constexpr int kPairs = kGroups * Pairs::kPairs;                    // of a CTA
  static constexpr int kStride = Pairs::kStride, kTensor = Pairs::kTensor;  // as 16-bit values
  static constexpr int kCachedRow = kQuants ? kRow : kStride * 2, kCached = kTokens * kCachedRow;
  static constexpr int kStage = 2 * kCached + (kScaled ? 4 * kTokens * 4 : 0);
  static constexpr int kStages = kQuants ? 2 * kTensor : 0, kQueries = kStages + 2 * kStage;  // offsets
  static constexpr int kShared = kQueries + kGroups * Pairs::kQueries;
};

// Dequantizes eight adjacent values. The number of the first feature is a multiple of eight.
template <CacheType kType>
__device__ uint4 widened_eight(const char* from, float scale, float minimum) {
  float x[8];
  if constexpr (kType == CacheType::float8) {
    const uint2 quants = *reinterpret_cast<const uint2*>(from);
#pragma unroll
    for (int j = 0; j < 8; j++) x[j] = from_e4m3((uint8_t)((j < 4 ? quants.x : quants.y) >> j % 4 * 8));
  } else {
    // The bits 0x4b000000 | q are the float 2^23 + q: q is in the low bits of the 23-bit fraction.
    if constexpr (kType == CacheType::int8) {
      const uint2 quants = *reinterpret_cast<const uint2*>(from);
#pragma unroll
      for (int j = 0; j < 8; j++)
        x[j] = __uint_as_float(__byte_perm(j < 4 ? quants.x : quants.y, 0x4b000000u, 0x7540u + j % 4));
    } else {
      const uint32_t quants = *reinterpret_cast<const uint32_t*>(from);
#pragma unroll
      for (int j = 0; j < 8; j++) x[j] = __uint_as_float((quants >> 4 * j & 15u) | 0x4b000000u);
    }
#pragma unroll
    for (int j = 0; j < 8; j++) x[j] = fmaf(x[j] - 8388608.0f, scale, minimum);
  }
  return make_uint4(to_dtype16x2(x[0], x[1]), to_dtype16x2(x[2], x[3]), to_dtype16x2(x[4], x[5]),
                    to_dtype16x2(x[6], x[7]));
}

template <int kDim, CacheType kType, bool kPadded>
__global__ void __launch_bounds__(kThreads) attend_mma_kernel(Attention a, const AttentionTile* tiles) {
  after_previous();
  using S = Shape<kDim, kType, kPadded>;
  using Pairs = typename S::Pairs;
  constexpr int kTensor = S::kTensor;
  extern __shared__ __align__(128) char shared[];
  const int kv_head = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  AttentionTile tile = tiles[blockIdx.x];
  tile.first += blockIdx.z * S::kPairs;
  const TileRows rows(a, tile, S::kPairs);
  if (rows.count == 0) return;
  const int* table = a.tables + rows.tile.table;
  const int last = rows.last;
  const uint32_t base = shared_address(shared);
  const int group = warp / Pairs::kShare;
  Pairs pairs(a, rows, kv_head, group * Pairs::kPairs, warp % Pairs::kShare,
              base + S::kQueries + group * Pairs::kQueries);

  const int size = a.cache.span_size;
  const auto fetch = [&](int begin, int stage) {
    if (begin <= last) {
      // The block has at most four spans. Lanes read them once and share them, instead of one read for each token.
      constexpr int kSpans = kTokens / 16, kChunks = S::kRow / 16;
      const int first = begin / size, own = first + min(lane, kSpans - 1);
      const int spans = own * size <= last ? table[own] : 0;
      const uint32_t stage_at = base + S::kStages + stage * S::kStage;
#pragma unroll(S::kQuants ? 1 : 8)
      for (int i = threadIdx.x; i < kTokens * kChunks; i += kThreads) {
        const int token = i / kChunks, at = begin + token, chunk = i % kChunks;
        const int span = __shfl_sync(0xffffffffu, spans, at / size - first);
        const bool there = at <= last;
        if (S::kQuants && !there) continue;  // widen() replaces them
        const char* from = a.cache.data;
        if (there) from = head_of(a.cache, span, kv_head) + (size_t)(at % size) * S::kRow + chunk * 16;
        const uint32_t to = stage_at + token * S::kCachedRow + chunk * 16;
        copy_16(to, from, there);
        copy_16(to + S::kCached, there ? from + (size_t)size * S::kRow : from, there);
      }
      if (S::kScaled && threadIdx.x < kTokens) {  // scales or minimums of four positions per thread
        const int which = threadIdx.x / 16, token = threadIdx.x % 16 * 4, at = begin + token;
        const int span = __shfl_sync(0xffffffffu, spans, at / size - first);
        if (at <= last)
          copy_16(stage_at + 2 * S::kCached + (which * kTokens + token) * 4,
                  head_of(a.cache, span, kv_head) + a.cache.scales_at() + (which * size + at % size) * 4);
      }
    }
    commit_copies();
  };
  // Converts quantized keys and values. Positions after the last become zero.
  const auto widen = [&](int begin, int stage) {
    constexpr int kEights = kDim / 8;
    const char* cached = shared + S::kStages + stage * S::kStage;
    const float* scales = reinterpret_cast<const float*>(cached + 2 * S::kCached);
#pragma unroll 4
    for (int i = threadIdx.x; i < 2 * kTokens * kEights; i += kThreads) {
      const int row = i / kEights, eight = i % kEights, value = row / kTokens, token = row % kTokens;
      uint4 wide = make_uint4(0, 0, 0, 0);
      if (begin + token <= last)
        wide = widened_eight<kType>(cached + row * S::kRow + eight * S::kBits,
                                    S::kScaled ? scales[value * 2 * kTokens + token] : 0,
                                    S::kScaled ? scales[(value * 2 + 1) * kTokens + token] : 0);
      *reinterpret_cast<uint4*>(shared + value * kTensor + (token * S::kStride + eight * 8) * 2) = wide;
    }
  };
  int begin = rows.least / kTokens * kTokens, stage = 0;  // blocks that no row sees would change nothing
  fetch(begin, 0);
  if (S::kQuants) fetch(begin + kTokens, 1);
  for (int split = rows.first_split; split <= rows.last_split; split++) {
    pairs.begin_split();
    for (const int end = min((split + 1) * kKvSplitTokens, last + 1); begin < end; begin += kTokens, stage ^= 1) {
      wait_copies<S::kQuants>();
      __syncthreads();  // no warp reads the previous block any more
      uint32_t keys = base;
      if constexpr (S::kQuants) {
        widen(begin, stage);
        __syncthreads();
        fetch(begin + 2 * kTokens, stage);
      } else {
        fetch(begin + kTokens, stage ^ 1);
        keys += stage * S::kStage;
      }
      pairs.attend(keys, keys + kTensor, begin);
    }
    pairs.end_split();
    pairs.add_split();
  }
  pairs.write_total();
}

template <int kDim, CacheType kType, bool kPadded = false>
void start_type(const Attention& a, const AttentionTile* tiles, int count, const Queue& queue) {
  using S = Shape<kDim, kType, kPadded>;
  start(queue, attend_mma_kernel<kDim, kType, kPadded>, dim3(count, a.cache.kv_heads, kPrefillPairs / S::kPairs),
        kThreads, S::kShared, a, tiles);
}

template <int kDim, bool kAll = kAllFormats && kDim != 80>
void start_dim(const Attention& a, const AttentionTile* tiles, int count, const Queue& queue) {
  if constexpr (kAll) {
    if (a.cache.type == CacheType::int8) return start_type<kDim, CacheType::int8>(a, tiles, count, queue);
    if (a.cache.type == CacheType::uint4) return start_type<kDim, CacheType::uint4>(a, tiles, count, queue);
    if (a.cache.type == CacheType::float8) return start_type<kDim, CacheType::float8>(a, tiles, count, queue);
  }
  if (a.cache.padded) return start_type<kDim, CacheType::dtype16, true>(a, tiles, count, queue);
  start_type<kDim, CacheType::dtype16>(a, tiles, count, queue);
}

}  // namespace

static_assert(Shape<256, CacheType::dtype16, false>::kShared == kPrefillShared256);
static_assert(Shape<256, CacheType::int8, false>::kShared == kPrefillShared256);

void attend_prefill_mma(const Attention& a, const AttentionTile* tiles, int count, const Queue& queue) {
  const int dim = a.cache.padded ? a.cache.padded_dim : a.cache.head_dim;
  if (dim == 64) start_dim<64>(a, tiles, count, queue);
  else if (dim == 80) start_dim<80>(a, tiles, count, queue);
  else if (dim == 96) start_dim<96>(a, tiles, count, queue);
  else if (dim == 128) start_dim<128>(a, tiles, count, queue);
  else start_dim<256>(a, tiles, count, queue);
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
