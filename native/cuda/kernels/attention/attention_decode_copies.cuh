// Copies of keys and values to shared memory in decode attention (attention_decode.cuh).
#pragma once
#include "cuda/kernels/attention/kv_splits.cuh"
#include "cuda/kernels/common/pipeline.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace decode {

// Keys, or values, of 64 positions in shared memory, as they are in the cache.
template <int kDim, CacheType kType>
struct Shape {
  static constexpr bool kQuants = kType != CacheType::dtype16, kScaled = kQuants && kType != CacheType::float8;
  static constexpr int kBits = kType == CacheType::dtype16 ? 16 : kType == CacheType::uint4 ? 4 : 8;
  static constexpr int kBytes = kDim * kBits / 8, kRow = kBytes + 16;  // of a position: rows lie in different banks
  static constexpr int kScales = kTokens * kRow;                       // where they are, and then minimums
  static constexpr int kTensor = kScales + (kScaled ? 2 * kTokens * 4 : 0);
  static constexpr int kStride = kDim + 8;  // of queries
};

// The ring's part of a warp that copies.
template <int kDim, CacheType kType, int kProducers>
__device__ void copy_splits(const Attention& a, KvSplits splits, bool own, uint32_t full, uint32_t empty, uint32_t ring,
                            int stages) {
  using S = Shape<kDim, kType>;
  constexpr int kChunks = S::kBytes / 16, kAll = kTokens * kChunks, kCopiers = 32 * kProducers;
  static_assert(S::kBytes % 16 == 0);
  const int warp = threadIdx.x / 32 - kConsumers, lane = threadIdx.x % 32;
  const int size = a.cache.span_size, shift = 31 - __clz(size), within = size - 1;
  const size_t span_bytes = a.cache.span_bytes();
  if (!own) await_previous();  // the tile's own rows entered the cache there
  PipelineStage place;
  for (; splits.left(); splits.next()) {
    const DecodeRows& rows = splits.rows();
    if (!rows.count) continue;
    const Extent extent(rows, splits.split());
    const int known = own ? min(extent.start, extent.last + 1) : extent.last + 1;  // positions before are in the cache
    // A KV split's spans, at most 16, each with a lane.
    const int first_span = extent.begin >> shift, at_lane = first_span + lane % 16;
    const int spans = at_lane << shift < known ? a.tables[rows.tile.table + at_lane] : 0;
    const char* head = a.cache.data + splits.kv_head() * a.cache.head_bytes();
#pragma unroll 1
    for (int tensor = 0; tensor < 2 * extent.blocks; tensor++) {
      const bool value = tensor >= extent.blocks;
      const int begin = extent.begin + (value ? tensor - extent.blocks : tensor) * kTokens;
      wait_barrier(empty + 8 * place.stage, place.parity ^ 1);
      const uint32_t to = ring + place.stage * S::kTensor;
      if constexpr (kProducers == 4) {  // sooner: all of them are asked for one after the other
#pragma unroll
        for (int i = 0; i < (kAll + kCopiers - 1) / kCopiers; i++) {
          const int each = i * kCopiers + warp * 32 + lane, token = each / kChunks, at = begin + token;
          if (kAll % kCopiers && each >= kAll) continue;  // whole warps
          const int span = __shfl_sync(0xffffffffu, spans, (at >> shift) - first_span), chunk = each % kChunks * 16;
          const bool there = at < known;
          const char* from = head;
          if (there) from += span * span_bytes + ((value ? size : 0) + (at & within)) * S::kBytes + chunk;
          copy_16(to + token * S::kRow + chunk, from, there);
        }
      } else {
        // In few registers: 16 positions are adjacent in the cache, as no span is smaller, so a copy's addresses are
        // those of the first and what is known to the compiler.
        constexpr int kAdjacent = 16, kTogether = kAdjacent * kChunks;
#pragma unroll 1
        for (int first = warp * kAdjacent; first < kTokens; first += kProducers * kAdjacent) {
          const int at = begin + first, span = __shfl_sync(0xffffffffu, spans, (at >> shift) - first_span);
          const int there = min(max(known - at, 0), kAdjacent) * kChunks;
          const char* from = head;
          if (there) from += span * span_bytes + ((value ? size : 0) + (at & within)) * S::kBytes;
          from += lane * 16;
#pragma unroll
          for (int i = 0; i < (kTogether + 31) / 32; i++) {
            const int each = i * 32 + lane;
            if (kTogether % 32 && each >= kTogether) continue;
            copy_16(to + (first + each / kChunks) * S::kRow + each % kChunks * 16, from + i * 512, each < there);
          }
        }
      }
      if (S::kScaled && warp == 0) {  // scales and minimums, of four positions each
        const int which = lane / 16, token = lane % 16 * 4, at = begin + token;
        const int span = __shfl_sync(0xffffffffu, spans, (at >> shift) - first_span),
                  count = min(max(known - at, 0), 4);
        const char* from = head;
        if (count)
          from += span * span_bytes + a.cache.scales_at() + (((value ? 2 : 0) + which) * size + (at & within)) * 4;
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
