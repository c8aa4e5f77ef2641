// Attention with heads of 512 features in a 16-bit cache by mma.sync, for prompts and for decode: eight warps, of which
// four share 16 pairs. Shared memory holds one block of 64 keys and values. Keys of the next block are copied while
// values are multiplied, and values while scores are computed. Decode: CTAs share the KV splits of a tile, and
// merge_kernel() (attention.cu) adds them as add_split() does, so both have the same bits.
#include "cuda/kernels/attention/attention_mma.h"
#include "cuda/kernels/attention/attention_pairs.cuh"
#include "cuda/kernels/attention/decode_plan.h"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace {

constexpr int kDim = kLargestHead, kTokens = 64, kWarps = 8, kThreads = 32 * kWarps;
using Pairs = WarpPairs<kDim>;
constexpr int kGroups = kWarps / Pairs::kShare, kPairs = kGroups * Pairs::kPairs;  // of a CTA
constexpr int kQueries = 2 * Pairs::kTensor, kShared = kQueries + kGroups * Pairs::kQueries;
static_assert(kShared == kLargeShared && kPairs >= kDecodePairs && kPrefillPairs % kPairs == 0);

// decode: gridDim.z CTAs share the KV splits and write partial results, unless there is only one split.
__global__ void __launch_bounds__(kThreads) attend_large_kernel(Attention a, const AttentionTile* tiles, bool decode) {
  after_previous();
  extern __shared__ __align__(128) char shared[];
  const int kv_head = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = warp / Pairs::kShare;
  AttentionTile tile = tiles[blockIdx.x];
  const int before = tile.first;  // of a decode tile
  tile.first = decode ? 0 : tile.first + blockIdx.z * kPairs;
  const TileRows rows(a, tile, decode ? kDecodePairs : kPairs);
  if (rows.count == 0) return;
  const bool several = decode && rows.first_split < rows.last_split;
  if (decode && !several && blockIdx.z) return;
  const int step = several ? gridDim.z : 1, first = rows.first_split + (several ? blockIdx.z : 0);
  const int* table = a.tables + rows.tile.table;
  const int last = rows.last, size = a.cache.span_size;
  const uint32_t keys = shared_address(shared), values = keys + Pairs::kTensor;
  Pairs pairs(a, rows, kv_head, group * Pairs::kPairs, warp % Pairs::kShare, keys + kQueries + group * Pairs::kQueries);

  const auto fetch = [&](int begin, uint32_t stage, bool value) {
    if (begin <= last) {
      // The block has at most four spans. Lanes read them once and share them, instead of one read for each token.
      constexpr int kSpans = kTokens / 16, kRow = kDim * 2, kChunks = kRow / 16;
      const int from_span = begin / size, own = from_span + min(lane, kSpans - 1);
      const int spans = own * size <= last ? table[own] : 0;
#pragma unroll 4
      for (int i = threadIdx.x; i < kTokens * kChunks; i += kThreads) {
        const int token = i / kChunks, at = begin + token, chunk = i % kChunks;
        const int span = __shfl_sync(0xffffffffu, spans, at / size - from_span);
        const bool there = at <= last;
        const char* from = a.cache.data;
        if (there)
          from = head_of(a.cache, span, kv_head) + (size_t)((value ? size : 0) + at % size) * kRow + chunk * 16;
        copy_16(stage + token * Pairs::kStride * 2 + chunk * 16, from, there);
      }
    }
    commit_copies();
  };
  // The CTA's block behind this one.
  const auto next = [&](int begin) {
    begin += kTokens;
    return begin % kKvSplitTokens ? begin : begin + (step - 1) * kKvSplitTokens;
  };
  int begin = max(first * kKvSplitTokens, rows.least / kTokens * kTokens);
  fetch(begin, keys, false), fetch(begin, values, true);
  for (int split = first; split <= rows.last_split; split += step) {
    pairs.begin_split();
    for (const int end = min((split + 1) * kKvSplitTokens, last + 1); begin < end; begin = next(begin)) {
      wait_copies<1>();
      __syncthreads();
      const auto replace_keys = [&] {
        __syncthreads();
        fetch(next(begin), keys, false);
      };
      const auto await_values = [&] {
        wait_copies<1>();
        __syncthreads();
      };
      pairs.attend(keys, values, begin, replace_keys, await_values);
      __syncthreads();
      fetch(next(begin), values, true);
    }
    pairs.end_split();
    if (several) pairs.write_split(partial_of(a, before, kv_head, split));
    else pairs.add_split();
  }
  if (!several) pairs.write_total();
}

}  // namespace

void attend_large(const Attention& a, const AttentionTile* tiles, int count, int sharers, bool decode,
                  const Queue& queue) {
  start(queue, attend_large_kernel, dim3(count, a.cache.kv_heads, decode ? sharers : kPrefillPairs / kPairs), kThreads,
        kShared, a, tiles, decode);
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
