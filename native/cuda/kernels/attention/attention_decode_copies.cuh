// Copies of keys and values to shared memory in decode attention (attention_decode.cuh).
#pragma once
#include "cuda/kernels/attention/kv_splits.cuh"
#include "cuda/kernels/common/pipeline.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace decode {

// Layout of the keys or values of 64 positions in shared memory, with the types of the cache.
template <int kDim, CacheType kType>
struct Shape {
  static constexpr bool kQuants = kType != CacheType::dtype16, kScaled = kQuants && kType != CacheType::float8;
  static constexpr int kBits = kType == CacheType::dtype16 ? 16 : kType == CacheType::uint4 ? 4 : 8;
  static constexpr int kBytes = kDim * kBits / 8, kRow = kBytes + 16;  // of a position; padding avoids bank conflicts
  static constexpr int kScales = kTokens * kRow;                       // offset of the scales; minimums follow
  static constexpr int kTensor = kScales + (kScaled ? 2 * kTokens * 4 : 0);
  static constexpr int kStride = kDim + 8;  // of a query, in 16-bit values
};

// A copying warp's part: copies keys and values of the CTA's KV splits to the ring.
template <int kDim, CacheType kType, int kProducers>
__device__ void copy_splits(const Attention& a, KvSplits splits, bool own, uint32_t full, uint32_t empty, uint32_t ring,
                            int stages) {
  using S = Shape<kDim, kType>;
  constexpr int kChunks = S::kBytes / 16, kAll = kTokens * kChunks, kCopiers = 32 * kProducers;
  static_assert(S::kBytes % 16 == 0);
  const int warp = threadIdx.x / 32 - kConsumers, lane = threadIdx.x % 32;
  const int size = a.cache.span_size, shift = 31 - __clz(size), within = size - 1;
  const size_t stride = a.cache.stride;
  if (!own) await_previous();  // the previous kernel stores the tile's own rows
  PipelineStage place;
  for (; splits.left(); splits.next()) {
    const DecodeRows& rows = splits.rows();
    if (!rows.count) continue;
    const Extent extent(rows, splits.split());
    const int known = own ? min(extent.start, extent.last + 1) : extent.last + 1;  // earlier positions are in the cache
    // Each lane has one of the KV split's spans, at most 16.
    const int first_span = extent.begin >> shift, at_lane = first_span + lane % 16;
    const int spans = at_lane << shift < known ? a.tables[rows.tile.table + at_lane] : 0;
    const char* head = a.cache.data + splits.kv_head() * a.cache.head_bytes();
#pragma unroll 1
    for (int tensor = 0; tensor < 2 * extent.blocks; tensor++) {
      const bool value = tensor >= extent.blocks;
      const int begin = extent.begin + (value ? tensor - extent.blocks : tensor) * kTokens;
      wait_barrier(empty + 8 * place.stage, place.parity ^ 1);
      const uint32_t to = ring + place.stage * S::kTensor;
      if constexpr (kProducers == 4) {  // faster: all copies are issued back to back
#pragma unroll
        for (int i = 0; i < (kAll + kCopiers - 1) / kCopiers; i++) {
          const int each = i * kCopiers + warp * 32 + lane, token = each / kChunks, at = begin + token;
          if (kAll % kCopiers && each >= kAll) continue;  // whole warps
          const int span = __shfl_sync(0xffffffffu, spans, (at >> shift) - first_span), chunk = each % kChunks * 16;
          const bool there = at < known;
          const char* from = head;
          if (there) from += span * stride + ((value ? size : 0) + (at & within)) * S::kBytes + chunk;
          copy_16(to + token * S::kRow + chunk, from, there);
        }
      } else {
        // Uses few registers: 16 positions are adjacent in the cache because no span is smaller, so copies have
        // constant offsets from the first.
        constexpr int kAdjacent = 16, kTogether = kAdjacent * kChunks;
#pragma unroll 1
        for (int first = warp * kAdjacent; first < kTokens; first += kProducers * kAdjacent) {
          const int at = begin + first, span = __shfl_sync(0xffffffffu, spans, (at >> shift) - first_span);
          const int there = min(max(known - at, 0), kAdjacent) * kChunks;
          const char* from = head;
          if (there) from += span * stride + ((value ? size : 0) + (at & within)) * S::kBytes;
          from += lane * 16;
#pragma unroll
          for (int i = 0; i < (kTogether + 31) / 32; i++) {
            const int each = i * 32 + lane;
            if (kTogether % 32 && each >= kTogether) continue;
            copy_16(to + (first + each / kChunks) * S::kRow + each % kChunks * 16, from + i * 512, each < there);
          }
        }
      }
      if (S::kScaled && warp == 0) {  // scales or minimums of four positions per lane
        const int which = lane / 16, token = lane % 16 * 4, at = begin + token;
        const int span = __shfl_sync(0xffffffffu, spans, (at >> shift) - first_span),
                  count = min(max(known - at, 0), 4);
        const char* from = head;
        if (count) from += span * stride + a.cache.scales_at() + (((value ? 2 : 0) + which) * size + (at & within)) * 4;
        copy_up_to_16(to + S::kScales + (which * kTokens + token) * 4, from, count * 4);
      }
      arrive_with_copies(full + 8 * place.stage);
      place.advance(1, stages);
    }
  }
  commit_copies(), wait_copies<0>();
}

}  // namespace decode
}  // namespace AS_DTYPE16
}  // namespace as::cuda
