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

// The warps that prepare tiles: queries, and what enters the cache where the block's runs have it. rotates: both.
template <int kDim, CacheType kType>
__device__ void prepare_tiles(const Attention& a, Runs runs, char* memory, Shared& shared, int own_rows, bool own,
                              bool rotates, const Turn& turn) {
  using S = Shape<kDim, kType>;
  constexpr int kAtOnce = kDim > 128 ? 2 : 4;
  const int warp = threadIdx.x / 32 - kConsumers - kCopiers;
  const uint32_t prepared = shared_address(shared.prepared), released = shared_address(shared.released);
  await_previous();
  RingPlace place;
  while (runs.left()) {
    const TileRows& rows = runs.rows();
    const int kv_head = runs.kv_head(), start = rows.tile.start;
    if (!rows.count) {
      runs.next();
      continue;
    }
    wait_barrier(released + 8 * place.stage, place.parity ^ 1);
    const Prepared<kDim, kType> to(memory, shared, place.stage, own_rows);
    const int chunks = (rows.count + kAtOnce - 1) / kAtOnce;
#pragma unroll 1
    for (int chunk = warp; chunk < chunks; chunk += kPreparers) {
      TurnedHead<kDim> heads[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; i++) {
        const int pair = chunk * kAtOnce + i, row = rows.row(pair);
        if (pair >= rows.count || !rows.has(pair, kv_head)) continue;
        heads[i].read(a.qkv + (size_t)row * a.width + (size_t)rows.head(pair, kv_head) * kDim, row, turn, rotates);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; i++) {
        const int pair = chunk * kAtOnce + i;
        if (pair >= rows.count || !rows.has(pair, kv_head)) continue;
        heads[i].turn_by(a.query_norm, turn, rotates), heads[i].write(to.queries + pair * S::kStride);
      }
    }
    const int entering = own ? rows.tile.count : 0;
#pragma unroll 1
    for (int i = (warp + kPreparers - chunks % kPreparers) % kPreparers; i < entering; i += kPreparers) {
      const int at = start + i, row = rows.tile.row + i, run = at / kRunTokens;
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
