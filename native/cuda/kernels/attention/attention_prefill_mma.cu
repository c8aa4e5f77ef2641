// Prefill attention over 16-bit caches by mma.sync: four warps of 16 pairs share keys and values in shared memory. The
// next 64 positions are copied while the current 64 are computed. Decode: attention_decode.cu.
#include "cuda/kernels/attention/attention_mma.h"
#include "cuda/kernels/attention/attention_pairs.cuh"
#include "cuda/kernels/attention/decode_plan.h"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace {

constexpr int kTokens = 64, kWarps = 4;  // positions at a time

template <int kDim>
constexpr int kGroups = kWarps / WarpPairs<kDim>::kShare;  // groups of warps that share pairs
template <int kDim>
constexpr int kPairs = kGroups<kDim> * WarpPairs<kDim>::kPairs;  // pairs of a CTA
template <int kDim>
constexpr int kShared = 2 * 2 * WarpPairs<kDim>::kTensor +
                        kGroups<kDim> * WarpPairs<kDim>::kQueries;  // bytes: two stages of keys and values, and queries

template <int kDim>
__global__ void __launch_bounds__(32 * kWarps) attend_mma_kernel(Attention a, const AttentionTile* tiles) {
  after_previous();
  constexpr int kStride = WarpPairs<kDim>::kStride, kTensor = WarpPairs<kDim>::kTensor;
  extern __shared__ __align__(128) char shared[];
  const int kv_head = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  AttentionTile tile = tiles[blockIdx.x];
  tile.first += blockIdx.z * kPairs<kDim>;
  const TileRows rows(a, tile, kPairs<kDim>);
  if (rows.count == 0) return;
  const int* table = a.tables + rows.tile.table;
  const int last = rows.position(rows.count - 1);
  const uint32_t base = shared_address(shared);
  using Pairs = WarpPairs<kDim>;
  const int group = warp / Pairs::kShare;
  Pairs pairs(a, rows, kv_head, group * Pairs::kPairs, warp % Pairs::kShare,
              base + 4 * kTensor + group * Pairs::kQueries);

  const int size = a.cache.span_size;
  const auto fetch = [&](int begin, int stage) {
    // The block has at most four spans. Lanes read them once and share them, instead of one read for each token.
    constexpr int kSpans = kTokens / 16, kChunks = kDim / 8;
    const int first = begin / size, own = first + min(lane, kSpans - 1);
    const int spans = own * size <= last ? table[own] : 0;
#pragma unroll 8
    for (int i = threadIdx.x; i < kTokens * kChunks; i += 32 * kWarps) {
      const int token = i / kChunks, at = begin + token, chunk = i % kChunks;
      const bool there = at <= last;
      const int span = __shfl_sync(0xffffffffu, spans, at / size - first);
      const char* from = a.cache.data;
      if (there) from = head_of(a.cache, span, kv_head) + ((size_t)(at % size) * kDim + chunk * 8) * 2;
      const uint32_t to = base + stage * 2 * kTensor + (token * kStride + chunk * 8) * 2;
      copy_16(to, from, there);
      copy_16(to + kTensor, there ? from + (size_t)size * kDim * 2 : from, there);
    }
    commit_copies();
  };

  int begin = rows.first_split * kKvSplitTokens, stage = 0;
  fetch(begin, 0);
  for (int split = rows.first_split; split <= rows.last_split; split++) {
    pairs.begin_split();
    for (const int end = min((split + 1) * kKvSplitTokens, last + 1); begin < end; begin += kTokens, stage ^= 1) {
      wait_copies<0>();
      __syncthreads();
      if (begin + kTokens <= last) fetch(begin + kTokens, stage ^ 1);
      pairs.attend(base + stage * 2 * kTensor, base + (stage * 2 + 1) * kTensor, begin);
    }
    pairs.end_split();
    pairs.add_split();
  }
  pairs.write_total();
}

template <int kDim>
void start_dim(const Attention& a, const AttentionTile* tiles, int count, const Queue& queue) {
  start(queue, attend_mma_kernel<kDim>, dim3(count, a.cache.kv_heads, kPrefillPairs / kPairs<kDim>), 32 * kWarps,
        kShared<kDim>, a, tiles);
}

}  // namespace

static_assert(kShared<256> == kPrefillShared256);

void attend_prefill_mma(const Attention& a, const AttentionTile* tiles, int count, const Queue& queue) {
  if (a.cache.head_dim == 64) start_dim<64>(a, tiles, count, queue);
  else if (a.cache.head_dim == 80) start_dim<80>(a, tiles, count, queue);
  else if (a.cache.head_dim == 96) start_dim<96>(a, tiles, count, queue);
  else if (a.cache.head_dim == 128) start_dim<128>(a, tiles, count, queue);
  else start_dim<256>(a, tiles, count, queue);
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
