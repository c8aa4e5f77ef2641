// What is prepared for tiles of few rows before their keys and values are looked at: queries and new rows, rotated, and
// these as they enter the cache.
#pragma once
#include "cuda/kernels/attention_runs.cuh"
#include "cuda/kernels/copy_ring.cuh"
#include "cuda/kernels/quantized.cuh"

namespace as {
namespace cuda {
namespace few {

// Keys, or values, of 64 positions in shared memory, as they are in the cache.
template <int kDim, CacheType kType>
struct Shape {
  static constexpr bool kCodes = kType != CacheType::bf16, kScaled = kCodes && kType != CacheType::float8;
  static constexpr int kBits = kType == CacheType::bf16 ? 16 : kType == CacheType::uint4 ? 4 : 8;
  // Of a position: rows lie in different banks, or their pieces do.
  static constexpr bool kSwizzled = !kCodes && kDim % 64 == 0;
  static constexpr int kBytes = kDim * kBits / 8, kRow = kBytes + (kSwizzled ? 0 : 16);
  static constexpr int kScales = kTokens * kRow;  // where they are, and then minimums
  static constexpr int kTensor = kScales + (kScaled ? 2 * kTokens * 4 : 0);
  static constexpr int kStride = kDim + 8;  // of queries, in bfloat16
};

// A head of a row, normed (as head_norm() has it) and rotated if it is to be: a lane has every 32nd feature. It is read
// first, of several heads together, so that they need not wait for each other.
template <int kDim>
struct TurnedHead {
  static constexpr int kEach = (kDim + 31) / 32;
  float x[kEach], partner[kEach], cosine[kEach], sine[kEach];

  __device__ void read(const float* head, int row, const Turn& turn, bool rotates) {
    const RotaryTable& t = turn.table;
    const int lane = threadIdx.x % 32, half = rotates ? t.dim / 2 : 0;
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      const int f = i * 32 + lane;
      x[i] = f < kDim ? head[f] : 0.0f;
      if (f >= 2 * half) continue;
      const int angle = turn.interleaved ? f / 2 : f < half ? f : f - half;
      partner[i] = head[turn.interleaved ? f ^ 1 : f < half ? f + half : f - half];
      cosine[i] = t.cosine[(size_t)row * half + angle], sine[i] = t.sine[(size_t)row * half + angle];
    }
  }
  __device__ void turn_by(const Norm& norm, const Turn& turn, bool rotates) {
    const int lane = threadIdx.x % 32, half = rotates ? turn.table.dim / 2 : 0;
    if (norm.weight) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kEach; i++) sum = fmaf(x[i], x[i], sum);
      const float factor = 1.0f / sqrtf(warp_sum(sum) / kDim + norm.eps), one = norm.unit_offset ? 1.0f : 0.0f;
#pragma unroll
      for (int i = 0; i < kEach; i++) {
        const int f = i * 32 + lane;
        if (f < kDim) x[i] = x[i] * factor * (norm.weight[f] + one);
        if (f >= 2 * half) continue;
        const int other = turn.interleaved ? f ^ 1 : f < half ? f + half : f - half;
        partner[i] = partner[i] * factor * (norm.weight[other] + one);
      }
    }
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      const int f = i * 32 + lane;
      if (f >= 2 * half) continue;
      const float own = __fmul_rn(x[i], cosine[i]), other = __fmul_rn(partner[i], sine[i]);
      x[i] = (turn.interleaved ? f % 2 : f >= half) ? own + other : own - other;
    }
  }
  __device__ void write(uint16_t* to, int swizzle = 0) const {
#pragma unroll
    for (int i = 0; i < kEach; i++)
      if (const int f = i * 32 + threadIdx.x % 32; f < kDim) to[f ^ swizzle] = to_bf16(x[i]);
  }
  // As it enters a quantized cache: codes to either place, scale and minimum in order there, `apart` floats apart.
  template <CacheType kType>
  __device__ void quantize(char* to, char* also, float* scales, int apart, float* also_scales, int also_apart) const {
    constexpr int kBits = kType == CacheType::uint4 ? 4 : 8;
    const int lane = threadIdx.x % 32;
    float low = INFINITY, high = -INFINITY;
    bool bad = false;
    if (kType != CacheType::float8) {
#pragma unroll
      for (int i = 0; i < kEach; i++)
        if (i * 32 + lane < kDim) low = fminf(low, x[i]), high = fmaxf(high, x[i]), bad |= !isfinite(x[i]);
      low = -warp_max(-low), high = warp_max(high), bad = __any_sync(0xffffffffu, bad);
    }
    const Levels<kBits> levels(low, high, bad);
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      const int f = i * 32 + lane;
      int code = kType == CacheType::float8 ? to_e4m3(x[i]) : levels.code(x[i]);
      if (kBits == 4) {
        code |= __shfl_down_sync(0xffffffffu, code, 1) << 4;
        if (f < kDim && f % 2 == 0) to[f / 2] = also[f / 2] = (char)code;
      } else if (f < kDim) {
        to[f] = also[f] = (char)code;
      }
    }
    if (lane || kType == CacheType::float8) return;
    scales[0] = also_scales[0] = levels.scale(), scales[apart] = also_scales[also_apart] = levels.minimum();
  }
};

// What is prepared of a tile and a KV head: queries, and its own rows as they are in the cache.
template <int kDim, CacheType kType>
struct Prepared {
  using S = Shape<kDim, kType>;
  uint16_t* queries;
  char *keys, *values;
  float (*scales)[kFewPairs];

  // memory: of all that are ahead; rows: of a tile, at most.
  __device__ Prepared(char* memory, Shared& shared, int which, int rows)
      : queries(reinterpret_cast<uint16_t*>(memory + which * bytes(rows))),
        keys(reinterpret_cast<char*>(queries + kFewPairs * S::kStride)),
        values(keys + rows * S::kRow),
        scales(shared.own_scales[which]) {}
  static __host__ __device__ constexpr int bytes(int rows) { return kFewPairs * 2 * S::kStride + 2 * rows * S::kRow; }
};

// A warp's part of the usual case: whole heads are rotated, halves with halves, so a lane has both of what is turned
// together. Several heads are read at once, as few instructions as may be (they are not in the processor's cache at
// first), and none divides. Queries, and, of bfloat16 caches, what enters them, keys and values by turns.
template <int kDim, CacheType kType>
__device__ void prepare_simply(const Attention& a, const Runs& runs, int entering, const RotaryTable& t,
                               const Prepared<kDim, kType>& to, int warp) {
  using S = Shape<kDim, kType>;
  constexpr int kEach = kDim / 32, kHalf = kEach / 2, kAtOnce = kDim > 128 ? 2 : 3;
  const FewRows& rows = runs.rows();
  const int lane = threadIdx.x % 32, kv_head = runs.kv_head(), heads = a.width / kDim, kv_heads = a.cache.kv_heads;
  const int items = rows.count + (S::kCodes ? 0 : 2 * entering);
#pragma unroll 1
  for (int first = warp; first < items; first += kPreparers * kAtOnce) {
    float x[kAtOnce][kEach], cosine[kAtOnce][kHalf], sine[kAtOnce][kHalf];
#pragma unroll
    for (int j = 0; j < kAtOnce; j++) {
      const int item = min(first + j * kPreparers, items - 1), entry = item - rows.count;
      const int row = entry < 0 ? rows.row(item) : rows.tile.row + entry / 2;
      const int head = entry < 0 ? min(max(rows.head(item, kv_head), 0), rows.heads - 1)
                                 : heads - (entry % 2 ? kv_heads : 2 * kv_heads) + kv_head;
      const float* from = a.qkv + (size_t)row * a.width + head * kDim + lane;
      const float *cosines = t.cosine + (size_t)row * (kDim / 2) + lane,
                  *sines = t.sine + (size_t)row * (kDim / 2) + lane;
#pragma unroll
      for (int i = 0; i < kEach; i++) x[j][i] = from[i * 32];
#pragma unroll
      for (int i = 0; i < kHalf; i++) cosine[j][i] = cosines[i * 32], sine[j][i] = sines[i * 32];
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; j++) {
      const int item = first + j * kPreparers, entry = item - rows.count;
      if (item >= items || (entry < 0 && !rows.has(item, kv_head))) continue;
      const bool value = entry >= 0 && entry % 2;
      if (const Norm& norm = entry < 0 ? a.query_norm : a.key_norm; norm.weight && !value) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < kEach; i++) sum = fmaf(x[j][i], x[j][i], sum);
        const float factor = 1.0f / sqrtf(warp_sum(sum) / kDim + norm.eps), one = norm.unit_offset ? 1.0f : 0.0f;
#pragma unroll
        for (int i = 0; i < kEach; i++) x[j][i] = x[j][i] * factor * (norm.weight[i * 32 + lane] + one);
      }
      if (!value) {
#pragma unroll
        for (int i = 0; i < kHalf; i++) {
          const float low = x[j][i], high = x[j][i + kHalf], c = cosine[j][i], s = sine[j][i];
          x[j][i] = __fmul_rn(low, c) - __fmul_rn(high, s), x[j][i + kHalf] = __fmul_rn(high, c) + __fmul_rn(low, s);
        }
      }
      uint16_t *near = to.queries + item * S::kStride, *far = nullptr;
      int swizzle = 0;
      if (entry >= 0) {
        const int i = entry / 2, at = rows.tile.start + i, run = at / kRunTokens;
        if (run < runs.run() || run > runs.last_own()) continue;  // another block's
        const int size = a.cache.span_size, shift = 31 - __clz(size), at_span = at & (size - 1);
        const int span = a.tables[rows.tile.table + (at >> shift)];
        near = reinterpret_cast<uint16_t*>((value ? to.values : to.keys) + i * S::kRow);
        far = reinterpret_cast<uint16_t*>(const_cast<char*>(head_of(a.cache, span, kv_head))) +
              (at_span + (value ? size : 0)) * kDim;
        swizzle = a.cache.feature_at(at_span, 0);
      }
#pragma unroll
      for (int i = 0; i < kEach; i++) {
        const uint16_t y = to_bf16(x[j][i]);
        const int f = (i * 32 + lane) ^ swizzle;
        near[f] = y;
        if (far) far[f] = y;
      }
    }
  }
}

// The warps that prepare tiles: queries, and what enters the cache where the block's runs have it. rotates: both.
template <int kDim, CacheType kType>
__device__ void prepare_tiles(const Attention& a, Runs runs, char* memory, Shared& shared, int own_rows, bool own,
                              bool rotates, const Turn& turn) {
  using S = Shape<kDim, kType>;
  constexpr bool kSimple = kDim % 64 == 0;
  const int warp = threadIdx.x / 32 - kConsumers - kCopiers;
  const uint32_t prepared = shared_address(shared.prepared), released = shared_address(shared.released);
  await_previous();
  RingPlace place;
  while (runs.left()) {
    const FewRows& rows = runs.rows();
    const int kv_head = runs.kv_head(), start = rows.tile.start;
    if (!rows.count) {
      runs.next();
      continue;
    }
    wait_barrier(released + 8 * place.stage, place.parity ^ 1);
    const Prepared<kDim, kType> to(memory, shared, place.stage, own_rows);
    const int entering = own ? rows.tile.count : 0;
    const bool simple = kSimple && rotates && !turn.interleaved && turn.table.dim == kDim;
    if constexpr (kSimple) {
      if (simple) prepare_simply<kDim, kType>(a, runs, entering, turn.table, to, warp);
    }
    // Of pairs, and of rows that enter the cache.
    const int pairs = simple ? 0 : rows.count, items = pairs + entering;
#pragma unroll 1
    for (int item = warp; item < items && !(simple && !S::kCodes); item += kPreparers) {
      if (item < pairs) {
        if (!rows.has(item, kv_head)) continue;
        const int row = rows.row(item);
        TurnedHead<kDim> head;
        head.read(a.qkv + (size_t)row * a.width + (size_t)rows.head(item, kv_head) * kDim, row, turn, rotates);
        head.turn_by(a.query_norm, turn, rotates), head.write(to.queries + item * S::kStride);
        continue;
      }
      const int i = item - pairs, at = start + i, row = rows.tile.row + i, run = at / kRunTokens;
      if (run < runs.run() || run > runs.last_own()) continue;  // another block's
      const int size = a.cache.span_size, span = a.tables[rows.tile.table + at / size], at_span = at % size;
      const float* from =
          a.qkv + (size_t)row * a.width + (size_t)(a.width / kDim - 2 * a.cache.kv_heads + kv_head) * kDim;
      TurnedHead<kDim> key, value;
      key.read(from, row, turn, rotates), value.read(from + a.cache.kv_heads * kDim, row, turn, false);
      key.turn_by(a.key_norm, turn, rotates);
      char* head = const_cast<char*>(head_of(a.cache, span, kv_head));
      if constexpr (S::kCodes) {
        float* scales = reinterpret_cast<float*>(head + a.cache.scales_at()) + at_span;
        key.template quantize<kType>(head + at_span * S::kBytes, to.keys + i * S::kRow, scales, size, &to.scales[0][i],
                                     kFewPairs);
        value.template quantize<kType>(head + (size + at_span) * S::kBytes, to.values + i * S::kRow, scales + 2 * size,
                                       size, &to.scales[2][i], kFewPairs);
      } else {
        uint16_t* rows_there = reinterpret_cast<uint16_t*>(head) + at_span * kDim;
        const int swizzle = a.cache.feature_at(at_span, 0);
        key.write(rows_there, swizzle), value.write(rows_there + size * kDim, swizzle);
        key.write(reinterpret_cast<uint16_t*>(to.keys + i * S::kRow), swizzle);
        value.write(reinterpret_cast<uint16_t*>(to.values + i * S::kRow), swizzle);
      }
    }
    arrive(prepared + 8 * place.stage);
    place.advance(1, kPrepared);
    runs.next_tile();
  }
}

}  // namespace few
}  // namespace cuda
}  // namespace as
