// How keys and values come into shared memory, where few rows attend (attention_few.cuh).
#pragma once
#include "cuda/kernels/attention_runs.cuh"
#include "cuda/kernels/copy_ring.cuh"

namespace as {
namespace cuda {
namespace few {

// Keys, or values, of 64 positions in shared memory, as they are in the cache.
template <int kDim, CacheType kType>
struct Shape {
  static constexpr bool kCodes = kType != CacheType::bf16, kScaled = kCodes && kType != CacheType::float8;
  static constexpr int kBits = kType == CacheType::bf16 ? 16 : kType == CacheType::uint4 ? 4 : 8;
  static constexpr int kBytes = kDim * kBits / 8, kRow = kBytes + 16;  // of a position: rows lie in different banks
  static constexpr int kScales = kTokens * kRow;                       // where they are, and then minimums
  static constexpr int kTensor = kScales + (kScaled ? 2 * kTokens * 4 : 0);
  static constexpr int kStride = kDim + 8;  // of queries, in bfloat16
};

// The ring's part of a warp that copies.
template <int kDim, CacheType kType, int kProducers>
__device__ void copy_runs(const Attention& a, Runs runs, bool own, uint32_t full, uint32_t empty, uint32_t ring,
                          int stages) {
  using S = Shape<kDim, kType>;
  // Of the positions that a warp copies so many are adjacent in the cache, as no span is smaller than 16: a copy's
  // addresses are those of the first and what is known to the compiler. Four warps over bfloat16 have 512 bytes each in
  // turn: long contexts came 2 % faster so.
  constexpr bool kInTurn = kProducers == 4 && !S::kCodes && 512 % S::kBytes == 0;
  constexpr int kAdjacent = kInTurn ? 512 / S::kBytes : 16, kPieces = S::kBytes / 16;
  constexpr int kCopies = (kAdjacent * kPieces + 31) / 32;
  static_assert(S::kBytes % 16 == 0);
  const int warp = threadIdx.x / 32 - kConsumers, lane = threadIdx.x % 32;
  const int size = a.cache.span_size, shift = 31 - __clz(size), within = size - 1;
  const size_t span_bytes = a.cache.span_bytes();
  if (!own) await_previous();  // the tile's own rows entered the cache there
  RingPlace place;
  for (; runs.left(); runs.next()) {
    const FewRows& rows = runs.rows();
    if (!rows.count) continue;
    const Extent extent(rows, runs.run());
    const int known = own ? min(extent.start, extent.last + 1) : extent.last + 1;  // positions before are in the cache
    // A run's spans, at most 16, each with a lane.
    const int first_span = extent.begin >> shift, at_lane = first_span + lane % 16;
    const int spans = at_lane << shift < known ? a.tables[rows.tile.table + at_lane] : 0;
    const char* head = a.cache.data + runs.kv_head() * a.cache.head_bytes();
#pragma unroll 1
    for (int tensor = 0; tensor < 2 * extent.blocks; tensor++) {
      const bool value = tensor >= extent.blocks;
      const int begin = extent.begin + (value ? tensor - extent.blocks : tensor) * kTokens;
      wait_barrier(empty + 8 * place.stage, place.parity ^ 1);
      const uint32_t to = ring + place.stage * S::kTensor;
#pragma unroll(kInTurn ? 8 : 1)
      for (int part = 0; part < kTokens / (kProducers * kAdjacent); part++) {
        const int first = (part * kProducers + warp) * kAdjacent, at = begin + first;
        const int span = __shfl_sync(0xffffffffu, spans, (at >> shift) - first_span);
        const int there = min(max(known - at, 0), kAdjacent) * kPieces;
        const char* from = head;
        if (there) from += span * span_bytes + ((value ? size : 0) + (at & within)) * S::kBytes;
        from += lane * 16;
#pragma unroll
        for (int i = 0; i < kCopies; i++) {
          const int each = i * 32 + lane;
          if (kAdjacent * kPieces % 32 && each >= kAdjacent * kPieces) continue;
          copy_16(to + (first + each / kPieces) * S::kRow + each % kPieces * 16, from + i * 512, each < there);
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

}  // namespace few
}  // namespace cuda
}  // namespace as
