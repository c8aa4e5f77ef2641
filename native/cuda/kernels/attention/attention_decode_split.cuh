// What the computing warps of decode attention do for a KV split (attention_decode.cuh).
#pragma once
#include "cuda/kernels/attention/prepare_tile.cuh"
#include "cuda/kernels/quantize/quantized.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace decode {

static_assert(kBlocks == 4);  // as in Attender::attend()

// Whether code is kept short: one path for queries and keys, loops that are not unrolled. Two CTAs on an SM have few
// registers. And each launch fetches its code anew, which takes longer than to run it once: so do code of large heads,
// and CTAs that have one KV split. pairs_or_alone: see attend_decode_kernel().
__host__ __device__ constexpr bool is_large(int head_dim) { return head_dim > 128; }
__host__ __device__ constexpr bool is_short(int head_dim, bool pairs_or_alone) {
  return pairs_or_alone || is_large(head_dim);
}

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

// The same number, of which the compiler cannot tell: what is computed from it is not kept in registers, or spilled,
// from one KV split to the next. Spilled values leave the L1 cache, of which shared memory leaves little.
__device__ inline int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// The computing warps' state for a KV split. kLean: tiles have only one KV split. kShort: see is_short(). kBulk: the
// layout of keys and values (Shape).
template <int kDim, CacheType kType, bool kLean, bool kShort, bool kBulk>
class Attender {
 public:
  __device__ Attender(const Attention& a, Shared& shared, const TileMemory& memory, uint32_t ring, int stages)
      : a_(a),
        shared_(shared),
        memory_(memory),
        ring_(ring),
        full_(shared_address(shared.full)),
        empty_(shared_address(shared.empty)),
        stages_(stages),
        factor_(score_factor(a)) {}

  // The tile's queries and own rows must be in `memory`. Synchronized by the caller.
  __device__ void begin_tile(const KvSplits& splits, const TileMemory& memory) {
    const DecodeRows& rows = splits.rows();
    const int kv_head = splits.kv_head();
    memory_ = memory;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int pair = lane_ / 4 + 8 * h;
      positions_[h] = pair < rows.count && rows.has(pair, kv_head) ? rows.position(pair) : -1;
      heads_[h] = rows.head(pair, kv_head);
      least_[h] = a_.window ? positions_[h] - a_.window + 1 : 0;
    }
    both_ = rows.count > 8;
    all_from_ = a_.window ? max(0, rows.position(rows.count - 1) - a_.window + 1) : 0, all_to_ = rows.tile.start;
  }

  // place: the pipeline stage of the KV split's first keys.
  __device__ void attend(const Extent<kLean>& extent, bool own, PipelineStage place) {
    const int lane_ = opaque(this->lane_), warp_ = opaque(this->warp_);
    const int from_rows = own ? extent.start : extent.last + 1;  // positions from here on are own rows
    const uint32_t keys = shared_address(memory_.own_keys), values = shared_address(memory_.own_values);
    const bool has_own = from_rows <= extent.last;
    // The address of a position's row, and its scale and minimum.
    const auto is_own = [&](int at) { return at >= from_rows && at <= extent.last; };
    const auto row_of = [&](int at, int token, uint32_t stage, uint32_t rows) {
      return is_own(at) ? rows + S::row_at(at - extent.start) : stage + S::row_at(token);
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
      if constexpr (S::kPacked) {
        const int token = first + lane_, at = extent.begin + block * kTokens + token;
        uint32_t from = stage + S::row_at(token);
        if (has_own && is_own(at)) from = keys + S::row_at(at - extent.start);
        wait_barrier(full_ + 8 * own_place.stage, own_place.parity);
#pragma unroll(kUnrolled)
        for (int s = 0; s < kSteps; s++) {
          uint32_t query[4], k[4];
          load_query(query, s);
          load_cores(k, S::chunk_at(from, s));
#pragma unroll
          for (int t = 0; t < 4; t++) {
            const float4 x = four_from_e4m3(k[t]);
            multiply_add(scores[t], query, to_dtype16x2(x.x, x.y), to_dtype16x2(x.z, x.w));
          }
        }
      } else if constexpr (S::kQuants) {
        wait_barrier(full_ + 8 * own_place.stage, own_place.parity);
        uint32_t from[4];
        float scale[4] = {}, minimum[4] = {};
#pragma unroll
        for (int t = 0; t < 4; t++) {
          const int token = first + t * 8 + lane_ / 4, at = extent.begin + block * kTokens + token;
          from[t] = row_of(at, token, stage, keys) + lane_ % 4 * 2 * S::kBits / 8;
          if (S::kScaled) scale_of(at, token, stage, 0, scale[t], minimum[t]);
        }
#pragma unroll(kUnrolled)
        for (int s = 0; s < kSteps; s++) {
          uint32_t query[4];
          load_query(query, s);
#pragma unroll
          for (int t = 0; t < 4; t++) {
            uint32_t k[2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
              const uint32_t quants = load_shared<S::kBits / 4>(from[t] + (s * 16 + half * 8) * S::kBits / 8);
              k[half] = to_dtype16x2(widened<kType>(quants, 0, scale[t], minimum[t]),
                                     widened<kType>(quants, 1, scale[t], minimum[t]));
            }
            multiply_add(scores[t], query, k[0], k[1]);
          }
        }
      } else {
        uint32_t from[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const int token = j * 16 + lane_ / 16 * 8 + lane_ % 8, at = extent.begin + block * kTokens + first + token;
          from[j] = stage + first * S::kRow + S::chunk_at(S::row_at(token), lane_ / 8 % 2);
          if (has_own && is_own(at)) from[j] = S::chunk_at(keys + S::row_at(at - extent.start), lane_ / 8 % 2);
        }
        wait_barrier(full_ + 8 * own_place.stage, own_place.parity);
#pragma unroll(kUnrolled)
        for (int s = 0; s < kSteps; s++) {
          uint32_t query[4];
          load_query(query, s);
#pragma unroll
          for (int j = 0; j < 2; j++) {
            uint32_t k[4];
            load_cores(k, S::chunk_at(from[j], 2 * s));
            multiply_add(scores[2 * j], query, k[0], k[1]);
            multiply_add(scores[2 * j + 1], query, k[2], k[3]);
          }
        }
      }
      __syncwarp();
      if (lane_ < kConsumers / 2) arrive(empty_ + 8 * own_place.stage);  // with the block's other warp: kConsumers
    }
    const int thread_first = extent.begin + block * kTokens + first + lane_ % 4 * 2;
    const auto position_of = [&](int t, int i) { return thread_first + t * 8 + i % 2; };
    if (__builtin_expect(a_.soft_cap > 0 || a_.slopes, 0)) {
#pragma unroll
      for (int t = 0; t < 4; t++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int h = i / 2;
          scores[t][i] = capped(a_, scores[t][i]);
          if (a_.slopes && positions_[h] >= 0)
            scores[t][i] = sloped(a_, heads_[h], scores[t][i], position_of(t, i) - positions_[h]);
        }
    }
    const bool none = !kLean && block >= extent.blocks;  // what follows the KV split's last block may be visible
    const bool masks = none || extent.begin < all_from_ || extent.begin + kKvSplitTokens - 1 > all_to_;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      if (h && !both_) break;
      if (masks) {
#pragma unroll
        for (int t = 0; t < 4; t++)
#pragma unroll
          for (int i = 2 * h; i < 2 * h + 2; i++)
            if (const int at = position_of(t, i); none || at > positions_[h] || at < least_[h])
              scores[t][i] = -INFINITY;
      }
      float now = -INFINITY;
#pragma unroll
      for (int t = 0; t < 4; t++) now = fmaxf(now, fmaxf(scores[t][2 * h], scores[t][2 * h + 1]));
      now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 1));
      now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 2));
      if (lane_ % 4 == 0) shared_.maxima[lane_ / 4 + 8 * h][warp_] = now;
    }
    consumers_meet();
    // First operand of mma.sync for the values; pairs from 8 on have halves of their own.
    uint2* const all_weights = reinterpret_cast<uint2*>(shared_.weights);
    constexpr int kHalf = kKvSplitTokens / 16 * 32;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      if (h && !both_) break;
      const float4* maxima = reinterpret_cast<const float4*>(shared_.maxima[lane_ / 4 + 8 * h]);
      const float4 low = maxima[0], high = maxima[1];
      const float each[kBlocks] = {fmaxf(low.x, low.y) * factor_, fmaxf(low.z, low.w) * factor_,
                                   fmaxf(high.x, high.y) * factor_, fmaxf(high.z, high.w) * factor_};
      const auto most_of = [&](int blocks) {  // the greatest of so many
        return fmaxf(fmaxf(blocks > 0 ? each[0] : -INFINITY, blocks > 1 ? each[1] : -INFINITY),
                     fmaxf(blocks > 2 ? each[2] : -INFINITY, blocks > 3 ? each[3] : -INFINITY));
      };
      const float own_most = most_of(block + 1);
      most_[h] = most_of(kBlocks);
      if (warp_ < kBlocks) shared_.shrunk[warp_][lane_ / 4 + 8 * h] = shrunk(most_of(warp_), most_of(warp_ + 1));
      float part = 0;
#pragma unroll
      for (int t = 0; t < 4; t++)
#pragma unroll
        for (int i = 2 * h; i < 2 * h + 2; i++) {
          scores[t][i] = weight_of(scores[t][i], factor_, own_most);
          part += scores[t][i];
        }
      shared_.sums[warp_][lane_ / 4 + 8 * h][lane_ % 4] = part;
#pragma unroll
      for (int j = 0; j < 2; j++)
        all_weights[h * kHalf + (warp_ * 2 + j) * 32 + lane_] =
            make_uint2(to_dtype16x2(scores[2 * j][2 * h], scores[2 * j][2 * h + 1]),
                       to_dtype16x2(scores[2 * j + 1][2 * h], scores[2 * j + 1][2 * h + 1]));
    }
    consumers_meet();
#pragma unroll
    for (int v = 0; v < kOwn; v++)
#pragma unroll
      for (int i = 0; i < 4; i++) out_[v][i] = 0;
    sum_[0] = sum_[1] = 0;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      if (h && !both_) break;
#pragma unroll
      for (int b = 0; b < kBlocks; b++) {
        const float halves[2] = {shared_.sums[2 * b][lane_ / 4 + 8 * h][lane_ % 4],
                                 shared_.sums[2 * b + 1][lane_ / 4 + 8 * h][lane_ % 4]};
        sum_[h] = summed(sum_[h], shared_.shrunk[b][lane_ / 4 + 8 * h], halves);
      }
      sum_[h] += __shfl_xor_sync(0xffffffffu, sum_[h], 1);
      sum_[h] += __shfl_xor_sync(0xffffffffu, sum_[h], 2);
    }
    place.advance(extent.blocks, stages_);
    // The weights of 16 positions, and 32 positions of some values, of a block.
    uint32_t weights[4][4], loaded[2][kOwnChunks][4];
    const auto load_weights = [&](int b, int s) {
      const uint2* from = all_weights + (b * 4 + s) * 32 + lane_;
      const uint2 low = from[0], high = both_ ? from[kHalf] : uint2{};
      weights[s][0] = low.x, weights[s][1] = high.x, weights[s][2] = low.y, weights[s][3] = high.y;
    };
    const auto load_values = [&](int b, int j, const PipelineStage& from) {
      const int at = extent.begin + b * kTokens + j * 32 + lane_;
      uint32_t row =
          ring_ + from.stage * S::kTensor + j * 32 * S::kRow + S::chunk_at(S::row_at(lane_), warp_ * kOwnChunks);
      if (has_own && is_own(at)) row = S::chunk_at(values + S::row_at(at - extent.start), warp_ * kOwnChunks);
#pragma unroll
      for (int c = 0; c < kOwnChunks; c++) load_cores_transposed(loaded[j][c], S::chunk_at(row, c));
    };
    float left[2] = {};  // factors that rescale sums before a block
    const auto load_left = [&](int b) {
      left[0] = shared_.shrunk[b][lane_ / 4];
      if (both_) left[1] = shared_.shrunk[b][lane_ / 4 + 8];
    };
    // While a block is multiplied, the next one is loaded to the registers that become free.
    constexpr bool kLoads = !S::kQuants || S::kPacked, kOverlaps = !kShort && kLoads;
#pragma unroll(kShort ? 1 : kBlocks)
    for (int b = 0; b < kBlocks; b++) {
      if (b >= extent.blocks) break;
      if (!kOverlaps || b == 0) load_left(b);
#pragma unroll
      for (int v = 0; v < kOwn; v++)
#pragma unroll
        for (int i = 0; i < 4; i++) out_[v][i] *= left[i / 2];
      PipelineStage next = place;
      next.advance(1, stages_);
      const bool more = kOverlaps && b + 1 < extent.blocks;
      if (more) {
        load_left(b + 1);
        wait_barrier(full_ + 8 * next.stage, next.parity);
      }
      if (!kOverlaps || b == 0) {
#pragma unroll
        for (int s = 0; s < 4; s++) load_weights(b, s);
        wait_barrier(full_ + 8 * place.stage, place.parity);
        if (kLoads && has_features()) load_values(b, 0, place), load_values(b, 1, place);
      }
      if (!has_features()) {
      } else if constexpr (!kLoads) {
        const uint32_t stage = ring_ + place.stage * S::kTensor;
        const int begin = extent.begin + b * kTokens;
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
#pragma unroll
          for (int s = 0; s < 2; s++)
#pragma unroll
            for (int c = 0; c < kOwnChunks; c++)  // products in a row do not wait for each other
              multiply_values(c, weights[2 * j + s], loaded[j][c][2 * s], loaded[j][c][2 * s + 1]);
          if (more) load_weights(b + 1, 2 * j), load_weights(b + 1, 2 * j + 1), load_values(b + 1, j, next);
        }
      }
      __syncwarp();
      if (lane_ == 0) arrive(empty_ + 8 * place.stage);
      place = next;
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
      if (h && !both_) break;
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
  using S = Shape<kDim, kType, kBulk>;
  // kSteps: products of 16 features for the scores. kOwn: a warp's products of eight features for the values.
  static constexpr int kSteps = kDim / 16, kEights = kDim / 8, kOwn = (kEights + kConsumers - 1) / kConsumers;
  static constexpr int kOwnChunks = S::kPacked ? kOwn / 2 : kOwn;  // of 16 bytes
  static_assert(kEights % kOwn == 0 && (!S::kPacked || kOwn % 2 == 0));
  static constexpr int kUnrolled = is_large(kDim) ? 4 : kSteps;  // steps of the scores
  using Values = float[kOwn][4];

  // Loads 16 features of all pairs as the first operand of mma.sync.
  __device__ void load_query(uint32_t (&query)[4], int step) const {
    load_cores(query, shared_address(memory_.queries + (lane_ % 16) * S::kStride + step * 16 + lane_ / 16 * 8));
  }
  // Adds 16 positions of one of the warp's chunks of values, of which a thread has two words.
  __device__ void multiply_values(int chunk, const uint32_t (&weights)[4], uint32_t low, uint32_t high) {
    if constexpr (S::kPacked) {  // a word: two adjacent features of a position, then of the next one
      const float4 x = four_from_e4m3(low), y = four_from_e4m3(high);
      multiply_add(out_[2 * chunk], weights, to_dtype16x2(x.x, x.z), to_dtype16x2(y.x, y.z));
      multiply_add(out_[2 * chunk + 1], weights, to_dtype16x2(x.y, x.w), to_dtype16x2(y.y, y.w));
    } else {
      multiply_add(out_[chunk], weights, low, high);
    }
  }
  __device__ bool has_features() const { return kEights % kConsumers == 0 || warp_ * kOwn < kEights; }

  __device__ static void clear(Values& values) {
#pragma unroll
    for (int v = 0; v < kOwn; v++)
#pragma unroll
      for (int i = 0; i < 4; i++) values[v][i] = 0;
  }
  // Visits a thread's features of a pair in order, two at a time. Adjacent features are adjacent columns of a product,
  // or, in quantized caches, the same column of successive products (attend()); of packed ones, of two products.
  template <typename Each>
  __device__ void each_two(const Values& values, int h, Each each) const {
    constexpr int kTogether = S::kPacked ? 2 : S::kQuants ? kOwn : 1;  // products
    const auto value = [&](int i) {
      return values[i / (2 * kTogether) * kTogether + i % kTogether][2 * h + i / kTogether % 2];
    };
#pragma unroll
    for (int i = 0; i < 2 * kOwn; i += 2)
      each(warp_ * kOwn * 8 + i / (2 * kTogether) * kTogether * 8 + lane_ % 4 * 2 * kTogether + i % (2 * kTogether),
           value(i), value(i + 1));
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
  const uint32_t ring_, full_, empty_;
  const int stages_, lane_ = threadIdx.x % 32, warp_ = threadIdx.x / 32;
  const float factor_;
  TileMemory memory_;
  int positions_[2], least_[2], heads_[2];
  int all_from_, all_to_;  // positions that all rows of the tile see
  bool both_;              // the tile has more than eight pairs
  Values out_, total_;
  float most_[2], sum_[2], total_most_[2], total_sum_[2];
};

}  // namespace decode
}  // namespace AS_DTYPE16
}  // namespace as::cuda
