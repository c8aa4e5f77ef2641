// Decode attention: few rows of a sequence, up to 16 (row, query head) pairs. Persistent CTAs share the KV splits of
// all tiles and KV heads evenly. Some warps of a CTA prefetch keys and values into a ring in shared memory, without a
// break between splits. Eight warps compute: each has the scores of 32 positions of a split, and some features of the
// values. The CTA with a tile's first splits merges its splits as it computes them. When the later splits have arrived,
// all CTAs with a part of the tile merge them. Many tiles of one split each are bound by load latency: a lean kernel
// with few registers runs two CTAs on an SM for them.
//
// Results have the bits of WarpPairs: scores and sums are added in the same order, and values of a quantized cache are
// rounded to 16 bits.
#pragma once
#include <algorithm>

#include "cuda/kernels/attention/attention_decode_copies.cuh"
#include "cuda/kernels/attention/decode_plan.h"
#include "cuda/kernels/attention/rope_head.cuh"
#include "cuda/kernels/quantize/quantized.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace decode {

static_assert(sizeof(Shared) == kDecodeFixed && kTokens == kDecodeTokens && kBlocks == kDecodeStages);

template <int kBytes>
__device__ inline uint32_t load_shared(uint32_t address) {
  uint32_t x;
  if (kBytes == 1) asm volatile("ld.shared.u8 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  else if (kBytes == 2) asm volatile("ld.shared.u16 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  else asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}
__device__ inline float load_shared_float(uint32_t address) { return __uint_as_float(load_shared<4>(address)); }

// Dequantizes number i of several adjacent values.
template <CacheType kType>
__device__ inline float widened(uint32_t quants, int i, float scale, float minimum) {
  if constexpr (kType == CacheType::float8) {
    return from_e4m3((uint8_t)(quants >> 8 * i));
  } else {
    // The bits 0x4b000000 | q are the float 2^23 + q: q is in the low bits of the 23-bit fraction.
    const uint32_t quant = kType == CacheType::int8 ? __byte_perm(quants, 0x4b000000u, 0x7540u + i)
                                                    : (quants >> 4 * i & 15u) | 0x4b000000u;
    return fmaf(__uint_as_float(quant) - 8388608.0f, scale, minimum);
  }
}

// The computing warps' state for a KV split. kLean: tiles have only one KV split. kPairs: uses few registers.
template <int kDim, CacheType kType, bool kLean, bool kPairs>
class Attender {
 public:
  // own_keys, own_values: shared memory for the own rows (Extent).
  __device__ Attender(const Attention& a, Shared& shared, uint16_t* queries, char* own_keys, char* own_values,
                      uint32_t ring, int stages)
      : a_(a),
        shared_(shared),
        queries_(queries),
        own_keys_(own_keys),
        own_values_(own_values),
        ring_(ring),
        full_(shared_address(shared.full)),
        empty_(shared_address(shared.empty)),
        stages_(stages),
        factor_(score_factor(a)) {}

  // Reads a tile's queries; own: also stores the own rows that lie in the CTA's KV splits. Tiles of a sequence store
  // the rows that they share alike. rotates: with RoPE.
  __device__ void begin_tile(const KvSplits& splits, bool own, bool rotates, const Rope& rope) {
    const DecodeRows& rows = splits.rows();
    const int kv_head = splits.kv_head(), start = rows.tile.start - rows.tile.before;
    const int items = rows.count + (own ? rows.tile.before + rows.tile.count : 0);
#pragma unroll 1
    for (int item = warp_; item < items; item += kConsumers) {
      if (!kPairs && item < rows.count) {  // a separate path is faster but needs more registers
        if (!rows.has(item, kv_head)) continue;
        const int row = rows.row(item);
        RopeHead<kDim> head;
        head.read(a_.qkv + (size_t)row * a_.width + (size_t)rows.head(item, kv_head) * kDim, a_.query_norm, row, rope,
                  rotates);
        head.write(queries_ + item * S::kStride);
        continue;
      }
      const bool query = kPairs && item < rows.count;
      const int i = query ? item : item - rows.count, at = start + i, split = at / kKvSplitTokens;
      if (query ? !rows.has(i, kv_head) : split < splits.split() || split > splits.last_own()) continue;
      const int row = query ? rows.row(i) : rows.tile.row - rows.tile.before + i;
      const int column = query ? rows.head(i, kv_head) : a_.width / kDim - 2 * a_.cache.kv_heads + kv_head;
      const float* from = a_.qkv + (size_t)row * a_.width + (size_t)column * kDim;
      const int size = a_.cache.span_size, place = at & (size - 1);  // size: a power of two
      int span = 0;
      Norm norm = a_.query_norm;
      RopeHead<kDim> head, value;
      if (!query) {  // loaded before the head to overlap latencies
        norm = a_.key_norm;
        span = a_.tables[rows.tile.table + (at >> (31 - __clz(size)))];
        value.read(from + a_.cache.kv_heads * kDim, Norm(), row, rope, false);
      }
      head.read(from, norm, row, rope, rotates);
      if (query) {
        head.write(queries_ + i * S::kStride);
        continue;
      }
      char* to = const_cast<char*>(head_of(a_.cache, span, kv_head));
      if constexpr (S::kQuants) {
        float* scales = reinterpret_cast<float*>(to + a_.cache.scales_at()) + place;
        head.template quantize<kType>(to + place * S::kBytes, own_keys_ + i * S::kRow, scales, size,
                                      &shared_.own_scales[0][i], kOwnRows);
        value.template quantize<kType>(to + (size + place) * S::kBytes, own_values_ + i * S::kRow, scales + 2 * size,
                                       size, &shared_.own_scales[2][i], kOwnRows);
      } else {
        uint16_t* rows_there = reinterpret_cast<uint16_t*>(to) + place * kDim;
        head.write(rows_there), value.write(rows_there + size * kDim);
        head.write(reinterpret_cast<uint16_t*>(own_keys_ + i * S::kRow));
        value.write(reinterpret_cast<uint16_t*>(own_values_ + i * S::kRow));
      }
    }
    consumers_meet();
    if (!kPairs) {
#pragma unroll
      for (int s = 0; s < kSteps; s++) load_query(query_[s], s);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int pair = lane_ / 4 + 8 * h;
      positions_[h] = pair < rows.count && rows.has(pair, kv_head) ? rows.position(pair) : -1;
      heads_[h] = rows.head(pair, kv_head);
      least_[h] = a_.window ? positions_[h] - a_.window + 1 : 0;
    }
  }

  // place: the pipeline stage of the KV split's first keys.
  __device__ void attend(const Extent& extent, bool own, PipelineStage place) {
    const int from_rows = own ? extent.start : extent.last + 1;  // positions from here on are own rows
    const uint32_t keys = shared_address(own_keys_), values = shared_address(own_values_);
    // The address of a position's row, and its scale and minimum.
    const auto is_own = [&](int at) { return at >= from_rows && at <= extent.last; };
    const auto row_of = [&](int at, int token, uint32_t stage, uint32_t rows) {
      return is_own(at) ? rows + (at - extent.start) * S::kRow : stage + token * S::kRow;
    };
    const auto scale_of = [&](int at, int token, uint32_t stage, int tensor, float& scale, float& minimum) {
      const uint32_t from =
          is_own(at) ? shared_address(&shared_.own_scales[tensor][at - extent.start]) : stage + S::kScales + token * 4;
      scale = load_shared_float(from);
      minimum = load_shared_float(from + (is_own(at) ? kOwnRows : kTokens) * 4);
    };
    const int block = warp_ / 2, first = warp_ % 2 * (kTokens / 2);
    float scores[4][4] = {};
    if (block < extent.blocks) {
      const PipelineStage own_place = place.after(block, stages_);
      const uint32_t stage = ring_ + own_place.stage * S::kTensor;
      if constexpr (S::kQuants) {
        wait_barrier(full_ + 8 * own_place.stage, own_place.parity);
        uint32_t from[4];
        float scale[4] = {}, minimum[4] = {};
#pragma unroll
        for (int t = 0; t < 4; t++) {
          const int token = first + t * 8 + lane_ / 4, at = extent.begin + block * kTokens + token;
          from[t] = row_of(at, token, stage, keys) + lane_ % 4 * 2 * S::kBits / 8;
          if (S::kScaled) scale_of(at, token, stage, 0, scale[t], minimum[t]);
        }
#pragma unroll
        for (int s = 0; s < kSteps; s++) {
          if (kPairs) load_query(query_[s], s);
#pragma unroll
          for (int t = 0; t < 4; t++) {
            uint32_t k[2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
              const uint32_t quants = load_shared<S::kBits / 4>(from[t] + (s * 16 + half * 8) * S::kBits / 8);
              k[half] = to_dtype16x2(widened<kType>(quants, 0, scale[t], minimum[t]),
                                     widened<kType>(quants, 1, scale[t], minimum[t]));
            }
            multiply_add(scores[t], query_[s], k[0], k[1]);
          }
        }
      } else {
        uint32_t from[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const int token = first + j * 16 + lane_ / 16 * 8 + lane_ % 8;
          from[j] = row_of(extent.begin + block * kTokens + token, token, stage, keys) + lane_ / 8 % 2 * 16;
        }
        wait_barrier(full_ + 8 * own_place.stage, own_place.parity);
#pragma unroll
        for (int s = 0; s < kSteps; s++) {
          if (kPairs) load_query(query_[s], s);
#pragma unroll
          for (int j = 0; j < 2; j++) {
            uint32_t k[4];
            load_cores(k, from[j] + s * 32);
            multiply_add(scores[2 * j], query_[s], k[0], k[1]);
            multiply_add(scores[2 * j + 1], query_[s], k[2], k[3]);
          }
        }
      }
      __syncwarp();
      if (lane_ < kConsumers / 2) arrive(empty_ + 8 * own_place.stage);  // with the block's other warp: kConsumers
    }
    if (__builtin_expect(a_.soft_cap > 0, 0)) {
#pragma unroll
      for (int t = 0; t < 4; t++)
#pragma unroll
        for (int i = 0; i < 4; i++) scores[t][i] = capped(a_, scores[t][i]);
    }
    if (__builtin_expect(a_.slopes != nullptr, 0)) {
#pragma unroll
      for (int t = 0; t < 4; t++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int at = extent.begin + block * kTokens + first + t * 8 + lane_ % 4 * 2 + i % 2, h = i / 2;
          if (positions_[h] >= 0) scores[t][i] = sloped(a_, heads_[h], scores[t][i], at - positions_[h]);
        }
    }
    float now[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int t = 0; t < 4; t++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int at = extent.begin + block * kTokens + first + t * 8 + lane_ % 4 * 2 + i % 2, h = i / 2;
        scores[t][i] = at <= positions_[h] && at >= least_[h] ? scores[t][i] : -INFINITY;
        now[h] = fmaxf(now[h], scores[t][i]);
      }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      now[h] = fmaxf(now[h], __shfl_xor_sync(0xffffffffu, now[h], 1));
      now[h] = fmaxf(now[h], __shfl_xor_sync(0xffffffffu, now[h], 2));
      if (lane_ % 4 == 0) shared_.maxima[lane_ / 4 + 8 * h][warp_] = now[h];
    }
    consumers_meet();
    float part[2] = {};
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float4* maxima = reinterpret_cast<const float4*>(shared_.maxima[lane_ / 4 + 8 * h]);
      const float4 low = maxima[0], high = maxima[1];
      const float each[kBlocks] = {fmaxf(low.x, low.y), fmaxf(low.z, low.w), fmaxf(high.x, high.y),
                                   fmaxf(high.z, high.w)};
      float most = -INFINITY, own_most = -INFINITY;
#pragma unroll
      for (int b = 0; b < kBlocks; b++) {
        const float next = fmaxf(most, each[b] * factor_);
        if (warp_ == b) shared_.shrunk[b][lane_ / 4 + 8 * h] = shrunk(most, next);
        most = next;
        if (b == block) own_most = next;
      }
      most_[h] = most;
#pragma unroll
      for (int t = 0; t < 4; t++)
#pragma unroll
        for (int i = 2 * h; i < 2 * h + 2; i++) {
          scores[t][i] = weight_of(scores[t][i], factor_, own_most);
          part[h] += scores[t][i];
        }
      shared_.sums[warp_][lane_ / 4 + 8 * h][lane_ % 4] = part[h];
    }
#pragma unroll
    for (int j = 0; j < 2; j++)
      shared_.weights[warp_ * 2 + j][lane_] =
          make_uint4(to_dtype16x2(scores[2 * j][0], scores[2 * j][1]), to_dtype16x2(scores[2 * j][2], scores[2 * j][3]),
                     to_dtype16x2(scores[2 * j + 1][0], scores[2 * j + 1][1]),
                     to_dtype16x2(scores[2 * j + 1][2], scores[2 * j + 1][3]));
    consumers_meet();
#pragma unroll
    for (int v = 0; v < kOwn; v++)
#pragma unroll
      for (int i = 0; i < 4; i++) out_[v][i] = 0;
    sum_[0] = sum_[1] = 0;
    place.advance(extent.blocks, stages_);
#pragma unroll(kPairs ? 1 : kBlocks)
    for (int b = 0; b < kBlocks; b++) {
      if (b >= extent.blocks) break;
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float halves[2] = {shared_.sums[2 * b][lane_ / 4 + 8 * h][lane_ % 4],
                                 shared_.sums[2 * b + 1][lane_ / 4 + 8 * h][lane_ % 4]};
        const float left = shared_.shrunk[b][lane_ / 4 + 8 * h];
        sum_[h] = summed(sum_[h], left, halves);
#pragma unroll
        for (int v = 0; v < kOwn; v++) out_[v][2 * h] *= left, out_[v][2 * h + 1] *= left;
      }
      uint32_t weights[4][4];
#pragma unroll
      for (int s = 0; s < 4; s++) {
        const uint4 four = shared_.weights[b * 4 + s][lane_];
        weights[s][0] = four.x, weights[s][1] = four.y, weights[s][2] = four.z, weights[s][3] = four.w;
      }
      const uint32_t stage = ring_ + place.stage * S::kTensor;
      const int begin = extent.begin + b * kTokens;
      wait_barrier(full_ + 8 * place.stage, place.parity);
      if (!has_features()) {
      } else if constexpr (S::kQuants) {
        // A thread loads kOwn adjacent features of four positions. Its feature v is a column of product v, so each
        // product has every kOwn-th feature.
        constexpr int kQuantBytes = (kOwn * S::kBits + 7) / 8;
        const int feature = (warp_ * 8 + lane_ / 4) * kOwn;
        const int shifted = kOwn * S::kBits < 8 ? feature % 2 * 4 : 0;
#pragma unroll
        for (int s = 0; s < 4; s++) {
          uint32_t quants[4];
          float scale[4] = {}, minimum[4] = {};
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const int token = s * 16 + i / 2 * 8 + lane_ % 4 * 2 + i % 2;
            quants[i] =
                load_shared<kQuantBytes>(row_of(begin + token, token, stage, values) + feature * S::kBits / 8) >>
                shifted;
            if (S::kScaled) scale_of(begin + token, token, stage, 2, scale[i], minimum[i]);
          }
#pragma unroll
          for (int v = 0; v < kOwn; v++) {
            float x[4];
#pragma unroll
            for (int i = 0; i < 4; i++) x[i] = widened<kType>(quants[i], v, scale[i], minimum[i]);
            multiply_add(out_[v], weights[s], to_dtype16x2(x[0], x[1]), to_dtype16x2(x[2], x[3]));
          }
        }
      } else {
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const uint32_t from = row_of(begin + j * 32 + lane_, j * 32 + lane_, stage, values) + warp_ * kOwn * 16;
#pragma unroll
          for (int v = 0; v < kOwn; v++) {
            uint32_t x[4];
            load_cores_transposed(x, from + v * 16);
            multiply_add(out_[v], weights[2 * j], x[0], x[1]);
            multiply_add(out_[v], weights[2 * j + 1], x[2], x[3]);
          }
        }
      }
      __syncwarp();
      if (lane_ == 0) arrive(empty_ + 8 * place.stage);
      place.advance(1, stages_);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      sum_[h] += __shfl_xor_sync(0xffffffffu, sum_[h], 1);
      sum_[h] += __shfl_xor_sync(0xffffffffu, sum_[h], 2);
    }
  }

  __device__ void begin_part() {
    if constexpr (kLean) return;
    clear(total_);
#pragma unroll
    for (int h = 0; h < 2; h++) total_most_[h] = -INFINITY, total_sum_[h] = 0;
  }
  // Merges the KV split into the total.
  __device__ void add_split() {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float now = fmaxf(total_most_[h], most_[h]), by = shrunk(total_most_[h], now),
                  split_by = shrunk(most_[h], now);
      total_most_[h] = now, total_sum_[h] = merged(total_sum_[h], by, sum_[h], split_by);
#pragma unroll
      for (int v = 0; v < kOwn; v++)
#pragma unroll
        for (int i = 2 * h; i < 2 * h + 2; i++) total_[v][i] = merged(total_[v][i], by, out_[v][i], split_by);
    }
  }
  // Does what add_split() would do for a tile's only KV split.
  __device__ void end_split() {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float by = shrunk(most_[h], most_[h]);
      sum_[h] = merged(0, 0, sum_[h], by);
#pragma unroll
      for (int v = 0; v < kOwn; v++)
#pragma unroll
        for (int i = 2 * h; i < 2 * h + 2; i++) out_[v][i] = merged(0, 0, out_[v][i], by);
    }
  }
  __device__ void leave_split(const KvSplits& splits) const { leave(splits, out_, most_, sum_); }
  __device__ void leave_total(const KvSplits& splits) const { leave(splits, total_, total_most_, total_sum_); }
  __device__ void write_total(const KvSplits& splits) const {
    if (kLean) write(splits, out_, most_, sum_);
    else write(splits, total_, total_most_, total_sum_);
  }

 private:
  using S = Shape<kDim, kType>;
  // kSteps: products of 16 features for the scores. kOwn: a warp's products of eight features for the values.
  static constexpr int kSteps = kDim / 16, kEights = kDim / 8, kOwn = (kEights + kConsumers - 1) / kConsumers;
  static_assert(kEights % kOwn == 0);
  using Values = float[kOwn][4];

  // Loads 16 features of all pairs as the first operand of mma.sync.
  __device__ void load_query(uint32_t (&query)[4], int step) const {
    load_cores(query, shared_address(queries_ + (lane_ % 16) * S::kStride + step * 16 + lane_ / 16 * 8));
  }
  __device__ bool has_features() const { return kEights % kConsumers == 0 || warp_ * kOwn < kEights; }

  __device__ static void clear(Values& values) {
#pragma unroll
    for (int v = 0; v < kOwn; v++)
#pragma unroll
      for (int i = 0; i < 4; i++) values[v][i] = 0;
  }
  // Visits a thread's features of a pair in order, two at a time. Adjacent features are adjacent columns of a product,
  // or, in quantized caches, the same column of successive products (attend()).
  template <typename Each>
  __device__ void each_two(const Values& values, int h, Each each) const {
    const auto value = [&](int i) {
      return S::kQuants ? values[i % kOwn][2 * h + i / kOwn] : values[i / 2][2 * h + i % 2];
    };
#pragma unroll
    for (int i = 0; i < 2 * kOwn; i += 2)
      each(warp_ * kOwn * 8 + (S::kQuants ? lane_ % 4 * 2 * kOwn + i : i / 2 * 8 + lane_ % 4 * 2), value(i),
           value(i + 1));
  }
  __device__ void write(const KvSplits& splits, const Values& values, const float (&most)[2],
                        const float (&all)[2]) const {
    const DecodeRows& rows = splits.rows();
    if (!has_features()) return;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int pair = lane_ / 4 + 8 * h;
      if (pair >= rows.count || !rows.has(pair, splits.kv_head())) continue;
      const int row = rows.row(pair), column = rows.head(pair, splits.kv_head()) * kDim;
      const float sum = with_sink(a_, heads_[h], all[h], most[h]);
      each_two(values, h, [&](int feature, float first, float second) {
        put_two(a_.out, row, column + feature, share(first, sum), share(second, sum));
      });
    }
  }
  // Writes the partial result of the KV split, for the merge.
  __device__ void leave(const KvSplits& splits, const Values& values, const float (&most)[2],
                        const float (&sum)[2]) const {
    const DecodeRows& rows = splits.rows();
    float* to = partial_of(a_, rows.tile.first, splits.kv_head(), splits.split());
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int pair = lane_ / 4 + 8 * h;
      if (pair >= rows.count || !rows.has(pair, splits.kv_head())) continue;
      if (warp_ == 0 && lane_ % 4 == 0) to[pair] = most[h], to[kDecodePairs + pair] = sum[h];
      if (!has_features()) continue;
      each_two(values, h, [&](int feature, float first, float second) {
        *reinterpret_cast<float2*>(to + 2 * kDecodePairs + pair * kDim + feature) = make_float2(first, second);
      });
    }
  }

  const Attention& a_;
  Shared& shared_;
  uint16_t* const queries_;
  char *const own_keys_, *const own_values_;
  const uint32_t ring_, full_, empty_;
  const int stages_, lane_ = threadIdx.x % 32, warp_ = threadIdx.x / 32;
  const float factor_;
  uint32_t query_[kSteps][4];
  int positions_[2], least_[2], heads_[2];
  Values out_, total_;
  float most_[2], sum_[2], total_most_[2], total_sum_[2];
};

// own: the kernel also stores the tiles' rows in the cache, as store_cache() does. rotates: with RoPE. has_splits:
// tiles may have several KV splits (not with kLean). own_rows: most own rows of a tile, if own. kPairs: two CTAs run on
// an SM, so that one computes while the other waits; heads of few features leave registers for that.
template <int kDim, CacheType kType, bool kLean, bool kPairs = kLean>
__global__ void __launch_bounds__(threads(kPairs), kPairs ? 2 : 1)
    attend_decode_kernel(const __grid_constant__ Attention a, const AttentionTile* tiles, int count, bool has_splits,
                         bool own, bool rotates, const __grid_constant__ Rope rope, int own_rows, int stages) {
  using S = Shape<kDim, kType>;
  const bool several = !kLean && has_splits;
  extern __shared__ __align__(128) char memory[];
  let_next_begin();
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  uint16_t* queries = reinterpret_cast<uint16_t*>(memory + sizeof(Shared));
  char *own_keys = reinterpret_cast<char*>(queries + kDecodePairs * S::kStride),
       *own_values = own_keys + own_rows * S::kRow;
  const uint32_t ring = shared_address(own_values + own_rows * S::kRow);
  const uint32_t full = shared_address(shared.full), empty = shared_address(shared.empty);
  // One thread of each warp: in a single warp the threads ran in turn, which took half a microsecond for 24 barriers.
  for (int stage = threadIdx.x / 32; threadIdx.x % 32 == 0 && stage < stages; stage += threads(kPairs) / 32)
    init_barrier(full + 8 * stage, 32 * producers(kPairs)), init_barrier(empty + 8 * stage, kConsumers);
  // No wait yet: tiles, tables and earlier positions in the cache were written before the step's first kernel.
  Begin begin = share_out_tiles(a, count);
  if (several && threadIdx.x < 32) {
    begin = share_out(a, tiles, count);
    if (threadIdx.x == 0) shared.begin = begin;
  }
  __syncthreads();
  if (several) begin = shared.begin;
  KvSplits splits(a, tiles, several, begin);
  if (!splits.left()) return;
  if (threadIdx.x >= 32 * kConsumers)
    return copy_splits<kDim, kType, producers(kPairs)>(a, splits, own, full, empty, ring, stages);

  Attender<kDim, kType, kLean, kPairs> attender(a, shared, queries, own_keys, own_values, ring, stages);
  await_previous();
  PipelineStage place;
  bool begins = true, merges = false;
  for (bool first = true; splits.left(); splits.next()) {
    const DecodeRows& rows = splits.rows();
    if (!rows.count) continue;
    if (begins) {
      if (!first) consumers_meet();  // no warp reads the previous tile's rows any more
      attender.begin_tile(splits, own, rotates, rope), first = false;
      attender.begin_part();
      begins = false, merges = splits.split() == rows.first_split;
    }
    const Extent extent(rows, splits.split());
    attender.attend(extent, own, place);
    place.advance(2 * extent.blocks, stages);
    if constexpr (kLean) {
      attender.end_split(), attender.write_total(splits), begins = true;
      continue;
    }
    if (merges) attender.add_split();
    else attender.leave_split(splits);
    if (splits.split() < splits.last_own()) continue;
    begins = true;
    if (merges && splits.split() == rows.last_split) {
      attender.write_total(splits);
    } else {
      if (merges) attender.leave_total(splits);
      leave_part(a, splits);
    }
  }
  if (!several || shared.begin.whole) return;
  // Other CTAs may have parts of this CTA's first tile and of its last tile.
  begin = shared.begin;
  consumers_meet();  // no warp reads the ring any more
  const bool same = begin.tile == splits.tile() && begin.kv_head == splits.kv_head(),
             end = threadIdx.x >= 32 * kMergers;
  if (same && !end) return;
  const Part part(a, tiles, end ? splits.tile() : begin.tile, end ? splits.kv_head() : begin.kv_head,
                  end ? splits.split() : begin.split, end ? splits.number() : begin.number, begin);
  if (part.blocks > 1) merge_part<kDim>(a, part, shared, ring, stages * S::kTensor / kConsumers);
}

constexpr int kPairedDim = 64;  // most features of heads of which two CTAs with several KV splits run on an SM

// The ring has a stage for each block of a KV split's keys (decode_plan.h). So a waiting warp cannot confuse its block
// with the previous block in the same stage.
template <int kDim, CacheType kType>
void start_decode(const Attention& a, const AttentionTile* tiles, int count, bool several, bool own, const Rope* rope,
                  const Queue& queue) {
  using S = Shape<kDim, kType>;
  const int rows = own ? kOwnRows : 0, all = count * a.cache.kv_heads * (several ? a.max_splits : 1);
  const int fixed = sizeof(Shared) + kDecodePairs * 2 * S::kStride + 2 * rows * S::kRow;
  const int there = sm_count(), half = (max_shared() + kReserved) / 2 - kReserved - fixed;
  const auto launch = [&](auto kernel, int threads, int blocks, int stages) {
    const int bytes = fixed + stages * S::kTensor;
    start(queue, kernel, dim3(std::min(all, blocks)), threads, bytes, a, tiles, count, several, own, rope != nullptr,
          rope ? *rope : Rope(), rows, stages);
  };
  if constexpr (kDim <= 128) {  // a CTA needs a stage for each block of a KV split's keys
    const int stages = std::min(half / S::kTensor, kMaxStages);
    if (stages >= kBlocks && !several && all > there)
      return launch(attend_decode_kernel<kDim, kType, true>, threads(true), 2 * there, stages);
    if constexpr (kDim <= kPairedDim)  // with fewer tiles CTAs have few KV splits each, which are merged
      if (stages >= kBlocks && several && count * a.cache.kv_heads > there)
        return launch(attend_decode_kernel<kDim, kType, false, true>, threads(true), 2 * there, stages);
  }
  const int wanted = several || all > there ? kMaxStages : kShortStages;
  const int stages = std::min((max_shared() - fixed) / S::kTensor, wanted);
  launch(attend_decode_kernel<kDim, kType, false>, threads(false), there, stages);
}

}  // namespace decode
}  // namespace AS_DTYPE16
}  // namespace as::cuda
