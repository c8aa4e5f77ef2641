// The queries and own rows of a tile of decode attention: read, rotated, and stored in shared memory and the cache.
#pragma once
#include "cuda/kernels/attention/attention_decode_copies.cuh"
#include "cuda/kernels/attention/rope_head.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace decode {

// Where a tile's queries and own rows (Extent) are in shared memory.
struct TileMemory {
  uint16_t* queries;
  char *own_keys, *own_values;
};

// Reads a tile's queries; own: also stores the own rows that lie in the CTA's KV splits. Tiles of a sequence store the
// rows that they share alike. warp: number of the calling warp among `warps`, which share the work; rotates: with RoPE.
template <int kDim, CacheType kType, bool kShort, bool kBulk>
__device__ void prepare_tile(const Attention& a, Shared& shared, const TileMemory& memory, const KvSplits& splits,
                             bool own, bool rotates, const Rope& rope, int warp, int warps) {
  using S = Shape<kDim, kType, kBulk>;
  const DecodeRows& rows = splits.rows();
  const auto write_query = [&](const RopeHead<kDim>& head, int i) {
    head.write(reinterpret_cast<char*>(memory.queries + i * S::kStride),
               [](int feature) { return S::query_at(feature) * 2; });
  };
  const int kv_head = splits.kv_head(), start = rows.tile.start - rows.tile.before;
  const int items = rows.count + (own ? rows.tile.before + rows.tile.count : 0);
#pragma unroll 1
  for (int item = warp; item < items; item += warps) {
    if (!kShort && item < rows.count) {  // a separate path is faster but needs more registers
      if (!rows.has(item, kv_head)) continue;
      const int row = rows.row(item);
      RopeHead<kDim> head;
      head.read(a.qkv + (size_t)row * a.width + (size_t)rows.head(item, kv_head) * kDim, a.query_norm, row, rope,
                rotates);
      write_query(head, item);
      continue;
    }
    const bool query = kShort && item < rows.count;
    const int i = query ? item : item - rows.count, at = start + i, split = at / kKvSplitTokens;
    if (query ? !rows.has(i, kv_head) : split < splits.split() || split > splits.last_own()) continue;
    const int row = query ? rows.row(i) : rows.tile.row - rows.tile.before + i;
    const int column = query ? rows.head(i, kv_head) : a.width / kDim - 2 * a.cache.kv_heads + kv_head;
    const float* from = a.qkv + (size_t)row * a.width + (size_t)column * kDim;
    const int size = a.cache.span_size, place = at & (size - 1);  // size: a power of two
    int span = 0;
    Norm norm = a.query_norm;
    RopeHead<kDim> head, value;
    if (!query) {  // loaded before the head to overlap latencies
      norm = a.key_norm;
      span = a.tables[rows.tile.table + (at >> (31 - __clz(size)))];
      value.read(from + a.cache.kv_heads * kDim, Norm(), row, rope, false);
    }
    head.read(from, norm, row, rope, rotates);
    if (query) {
      write_query(head, i);
      continue;
    }
    char* to = const_cast<char*>(head_of(a.cache, span, kv_head));
    const uint32_t row_at = S::row_at(i);
    if constexpr (S::kQuants) {
      const auto place_of = [&](int byte) { return S::chunk_at(row_at, byte / 16) + byte % 16; };
      float* scales = reinterpret_cast<float*>(to + a.cache.scales_at()) + place;
      head.template quantize<kType>(to + place * S::kBytes, memory.own_keys, place_of, scales, size,
                                    &shared.own_scales[0][i], kOwnRows);
      value.template quantize<kType>(to + (size + place) * S::kBytes, memory.own_values, place_of, scales + 2 * size,
                                     size, &shared.own_scales[2][i], kOwnRows);
    } else {
      uint16_t* rows_there = reinterpret_cast<uint16_t*>(to) + place * kDim;
      head.write(rows_there), value.write(rows_there + size * kDim);
      const auto place_of = [&](int feature) { return S::chunk_at(row_at, feature / 8) + feature % 8 * 2; };
      head.write(memory.own_keys, place_of), value.write(memory.own_values, place_of);
    }
  }
}

}  // namespace decode
}  // namespace AS_DTYPE16
}  // namespace as::cuda
