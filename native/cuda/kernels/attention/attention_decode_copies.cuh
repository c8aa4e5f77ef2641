// Copies of keys and values to shared memory in decode attention (attention_decode.cuh).
#pragma once
#include "cuda/kernels/attention/kv_splits.cuh"
#include "cuda/kernels/common/pipeline.cuh"
#include "cuda/kernels/common/wgmma.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace decode {

// Whether the copy engine can copy a layer's keys and values: in rows of one to four planes of 128 bytes, without
// scales.
template <int kDim, CacheType kType>
constexpr bool kHasBoxes =
    (kType == CacheType::dtype16 && kDim % 64 == 0) || (kType == CacheType::float8 && kDim % 128 == 0);

// Layout of the keys or values of 64 positions in shared memory, with the types of the cache. Copying warps write rows
// with padding between them. The copy engine writes boxes of 16 rows (kBulk), plane after plane of 128 bytes, and
// permutes the eight chunks of 16 bytes of a row of a plane by its number (CU_TENSOR_MAP_SWIZZLE_128B). Both avoid bank
// conflicts. kPacked: the copy engine's rows of 8-bit values, which ldmatrix loads as pairs.
template <int kDim, CacheType kType, bool kBulk>
struct Shape {
  static constexpr bool kQuants = kType != CacheType::dtype16, kScaled = kQuants && kType != CacheType::float8;
  static constexpr bool kPacked = kQuants && kBulk;
  static constexpr int kBits = kType == CacheType::dtype16 ? 16 : kType == CacheType::uint4 ? 4 : 8;
  static constexpr int kBytes = kDim * kBits / 8, kRow = kBulk ? kBytes : kBytes + 16;  // of a position
  static constexpr int kScales = kTokens * kRow;  // offset of the scales; minimums follow
  static constexpr int kTensor = kScales + (kScaled ? 2 * kTokens * 4 : 0);
  static constexpr int kStride = kDim + 8;  // of a query, in 16-bit values
  static constexpr int kBoxRows = 16, kBox = kBoxRows * kBytes, kPlane = kBoxRows * 128;

  // Offsets of a row, and of one of its chunks of 16 bytes, of a row that begins at a multiple of 1 KB if kBulk.
  __device__ static uint32_t row_at(int row) {
    return kBulk ? row / kBoxRows * kBox + row % kBoxRows * 128 + row % 8 * 16 : row * kRow;
  }
  __device__ static uint32_t chunk_at(uint32_t row, int chunk) {
    return kBulk ? (row ^ chunk % 8 * 16) + chunk / 8 * kPlane : row + chunk * 16;
  }
  // The place of a feature of a query. ldmatrix gives a thread four adjacent features of packed keys, which become its
  // two operands of a product of 16 features; so queries have the same order. A product's sum does not depend on it.
  __device__ static int query_at(int feature) {
    return kPacked ? (feature & ~15) + feature % 16 / 4 * 2 + feature % 2 + feature % 4 / 2 * 8 : feature;
  }
};

// A copying warp's part: copies keys and values of the CTA's KV splits to the ring.
template <int kDim, CacheType kType, int kProducers, bool kLean>
__device__ void copy_splits(const Attention& a, KvSplits splits, bool own, uint32_t full, uint32_t empty, uint32_t ring,
                            int stages) {
  using S = Shape<kDim, kType, false>;
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
    const Extent<kLean> extent(rows, splits.split());
    const int known = extent.known(own);
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

// Spans of keys and values as the copy engine sees them: 16-bit words of a plane, rows of a span, planes, spans.
template <int kDim, CacheType kType>
CUtensorMap boxes_of(const LayerCache& cache) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    if (error != cudaSuccess) throw_error(error, "looking for cuTensorMapEncodeTiled in the driver");
    if (!function) throw std::runtime_error("the NVIDIA driver has no cuTensorMapEncodeTiled: update it");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  using S = Shape<kDim, kType, true>;
  constexpr int kPlanes = S::kBytes / 128;
  constexpr int kMostSpans = 1 << 30;  // spans are in the cache wherever tables say so
  const cuuint64_t sizes[] = {64, (cuuint64_t)2 * cache.span_size * cache.kv_heads, kPlanes, kMostSpans};
  const cuuint64_t strides[] = {S::kBytes, 128, cache.stride};
  const cuuint32_t box[] = {64, S::kBoxRows, kPlanes, 1}, steps[] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 4, cache.data, sizes, strides, box, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw std::runtime_error("cuTensorMapEncodeTiled refuses the layout of a cache: error " + std::to_string(result));
  return map;
}

// The part of the one copying warp if the copy engine copies whole boxes. The warp itself copies the rows of a box that
// reaches beyond the positions in the cache, and writes zeros for the others: what a span holds there may be NaN, whose
// product with a weight of zero is none.
template <int kDim, CacheType kType, bool kLean>
__device__ void copy_boxes(const Attention& a, const CUtensorMap& map, KvSplits splits, bool own, uint32_t full,
                           uint32_t empty, uint32_t ring, int stages) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = Shape<kDim, kType, true>;
  constexpr int kBoxes = kTokens / S::kBoxRows, kChunks = S::kBytes / 16;
  const int lane = threadIdx.x % 32;
  const int size = a.cache.span_size, shift = 31 - __clz(size), within = size - 1;
  if (!own) await_previous();  // the previous kernel stores the tile's own rows
  PipelineStage place;
  for (; splits.left(); splits.next()) {
    const DecodeRows& rows = splits.rows();
    if (!rows.count) continue;
    const Extent<kLean> extent(rows, splits.split());
    const int known = extent.known(own);
    // Each lane has one of the KV split's spans, at most 16.
    const int first_span = extent.begin >> shift, at_lane = first_span + lane % 16;
    const int spans = at_lane << shift < known ? a.tables[rows.tile.table + at_lane] : 0;
#pragma unroll 1
    for (int tensor = 0; tensor < 2 * extent.blocks; tensor++) {
      const bool value = tensor >= extent.blocks;
      const int begin = extent.begin + (value ? tensor - extent.blocks : tensor) * kTokens;
      const int whole = min(max(known - begin, 0) / S::kBoxRows, kBoxes);  // boxes
      const int at = begin + lane % kBoxes * S::kBoxRows;
      const int span = __shfl_sync(0xffffffffu, spans, (at >> shift) - first_span);
      const int row = (splits.kv_head() * 2 + value) * size + (at & within);
      const uint32_t to = ring + place.stage * S::kTensor, barrier = full + 8 * place.stage;
      wait_barrier(empty + 8 * place.stage, place.parity ^ 1);
#pragma unroll 1
      for (int box = whole; box < kBoxes; box++) {
        const int first_row = __shfl_sync(0xffffffffu, row, box), from_span = __shfl_sync(0xffffffffu, span, box);
        const int there = known - (begin + box * S::kBoxRows);
        const char* from = a.cache.data;
        if (there > 0) from += from_span * a.cache.stride + (size_t)first_row * S::kBytes;
#pragma unroll
        for (int i = 0; i < S::kBoxRows * kChunks / 32; i++) {
          const int each = i * 32 + lane, token = each / kChunks, chunk = each % kChunks;
          copy_16(to + box * S::kBox + S::chunk_at(S::row_at(token), chunk),
                  token < there ? from + token * S::kBytes + chunk * 16 : a.cache.data, token < there);
        }
      }
      if (whole < kBoxes) arrive_too_with_copies(barrier);
      __syncwarp();
      if (lane == 0) barrier_expect(barrier, whole * S::kBox);
      __syncwarp();
      if (lane < whole) copy_box(to + lane * S::kBox, map, row, span, barrier, evicted_first());
      place.advance(1, stages);
    }
  }
  commit_copies(), wait_copies<0>();
#endif
}

}  // namespace decode
}  // namespace AS_DTYPE16
}  // namespace as::cuda
