// Attention for few rows of a sequence, as when it decodes: up to 16 pairs of a row and a query head. Blocks of threads
// stay, and share out the runs of all tiles and KV heads evenly. Of a block's warps one copies keys and values through
// a ring in shared memory, ahead of what is computed, from one run to the next; three prepare tiles
// (attention_prepare.cuh) ahead, too; eight compute: each has 32 of a run's positions for the scores, and some of the
// features for the values. Runs are merged by the block that has a tile's first ones, as it goes, and those after them,
// when all have come, by all that have a part. Bits are those of WarpPairs: every score and every sum is the same
// chain, and what a quantized cache has is rounded to bfloat16.
#pragma once
#include <algorithm>

#include "cuda/kernels/attention_prepare.cuh"
#include "cuda/kernels/wgmma.cuh"

namespace as {
namespace cuda {
namespace few {

// Whether one thread asks for all that a span has of a stage.
template <int kDim, CacheType kType>
__device__ constexpr bool in_bulk() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  return Shape<kDim, kType>::kSwizzled;
#else
  return false;
#endif
}

// The ring's part of a warp that copies.
template <int kDim, CacheType kType>
__device__ void copy_runs(const Attention& a, Runs runs, bool own, Shared& shared, uint32_t ring, int stages) {
  using S = Shape<kDim, kType>;
  // Positions that are adjacent in the cache: no span is smaller. So a copy's addresses are those of the first and what
  // is known to the compiler.
  constexpr bool kBulk = in_bulk<kDim, kType>();
  uint64_t* const full = shared.full;
  constexpr int kAdjacent = 16, kPieces = S::kBytes / 16, kCopies = (kAdjacent * kPieces + 31) / 32;
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
      wait_barrier(shared_address(shared.empty + place.stage), place.parity ^ 1);
      const uint32_t to = ring + place.stage * S::kTensor;
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
      if constexpr (kBulk) {  // of each span one copy; values that are not there are zeros, as they weigh nothing
        const int there = min(max(known - begin, 0), kTokens), adjacent = min(size, kTokens);
        if (value && there < kTokens) {
          for (int i = there * kPieces + lane; i < kTokens * kPieces; i += 32) store_zeros(to + i * 16);
          asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        }
        __syncwarp();
        if (elected()) barrier_expect(full + place.stage, there * S::kBytes);
        for (int first = 0; first < there; first += adjacent) {
          const int at = begin + first, span = __shfl_sync(0xffffffffu, spans, (at >> shift) - first_span);
          const char* from = head + span * span_bytes + ((value ? size : 0) + (at & within)) * S::kBytes;
          if (elected())
            copy_bulk(to + first * S::kBytes, from, min(there - first, adjacent) * S::kBytes, full + place.stage);
        }
      } else
#endif
      {
#pragma unroll 1
        for (int first = warp * kAdjacent; first < kTokens; first += kCopiers * kAdjacent) {
          const int at = begin + first, span = __shfl_sync(0xffffffffu, spans, (at >> shift) - first_span);
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
        arrive_with_copies(shared_address(full + place.stage));
      }
      place.advance(1, stages);
    }
  }
  if (!kBulk) commit_copies(), wait_copies<0>();
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

// Value number i of some adjacent ones.
template <CacheType kType>
__device__ inline float widened(uint32_t codes, int i, float scale, float minimum) {
  if constexpr (kType == CacheType::float8) {
    return from_e4m3((uint8_t)(codes >> 8 * i));
  } else {
    // 2^23 + code: the code is the lowest bits of a fraction of 23.
    const uint32_t code =
        kType == CacheType::int8 ? __byte_perm(codes, 0x4b000000u, 0x7540u + i) : (codes >> 4 * i & 15u) | 0x4b000000u;
    return fmaf(__uint_as_float(code) - 8388608.0f, scale, minimum);
  }
}

// What the warps that compute have of a run.
template <int kDim, CacheType kType>
class Attender {
 public:
  __device__ Attender(const Attention& a, Shared& shared, uint32_t ring, int stages)
      : a_(a),
        shared_(shared),
        ring_(ring),
        full_(shared_address(shared.full)),
        empty_(shared_address(shared.empty)),
        stages_(stages),
        factor_(score_factor(a)) {}

  __device__ void begin_tile(const Runs& runs, const Prepared<kDim, kType>& tile) {
    const FewRows& rows = runs.rows();
    const int kv_head = runs.kv_head();
    own_keys_ = shared_address(tile.keys), own_values_ = shared_address(tile.values);
    own_scales_ = shared_address(tile.scales);
#pragma unroll
    for (int s = 0; s < kSteps; s++)
      load_cores(query_[s], shared_address(tile.queries + (lane_ % 16) * S::kStride + s * 16 + lane_ / 16 * 8));
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int pair = lane_ / 4 + 8 * h;
      positions_[h] = pair < rows.count && rows.has(pair, kv_head) ? rows.position(pair) : -1;
      heads_[h] = rows.head(pair, kv_head);
      least_[h] = a_.window ? positions_[h] - a_.window + 1 : 0;
    }
  }

  // place: of the run's first stage in the ring.
  __device__ void attend(const Extent& extent, bool own, RingPlace place) {
    const int from_rows = own ? extent.start : extent.last + 1;  // positions from there on are the tile's own rows
    // Where a position is; and its scale.
    const auto is_own = [&](int at) { return at >= from_rows && at <= extent.last; };
    const auto row_of = [&](int at, int token, uint32_t stage, uint32_t rows) {
      return is_own(at) ? rows + (at - extent.start) * S::kRow : stage + token * S::kRow;
    };
    const auto scale_of = [&](int at, int token, uint32_t stage, int tensor, float& scale, float& minimum) {
      const uint32_t from =
          is_own(at) ? own_scales_ + (tensor * kFewPairs + at - extent.start) * 4 : stage + S::kScales + token * 4;
      scale = load_shared_float(from);
      minimum = load_shared_float(from + (is_own(at) ? kFewPairs : kTokens) * 4);
    };
    const int block = warp_ / 2, first = warp_ % 2 * (kTokens / 2);
    float scores[4][4] = {};
    if (block < extent.blocks) {
      const RingPlace own_place = place.after(block, stages_);
      const uint32_t stage = ring_ + own_place.stage * S::kTensor;
      if constexpr (S::kCodes) {
        wait_barrier(full_ + 8 * own_place.stage, own_place.parity);
        uint32_t from[4];
        float scale[4] = {}, minimum[4] = {};
#pragma unroll
        for (int t = 0; t < 4; t++) {
          const int token = first + t * 8 + lane_ / 4, at = extent.begin + block * kTokens + token;
          from[t] = row_of(at, token, stage, own_keys_) + lane_ % 4 * 2 * S::kBits / 8;
          if (S::kScaled) scale_of(at, token, stage, 0, scale[t], minimum[t]);
        }
#pragma unroll
        for (int s = 0; s < kSteps; s++)
#pragma unroll
          for (int t = 0; t < 4; t++) {
            uint32_t k[2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
              const uint32_t codes = load_shared<S::kBits / 4>(from[t] + (s * 16 + half * 8) * S::kBits / 8);
              k[half] = two_bf16(widened<kType>(codes, 0, scale[t], minimum[t]),
                                 widened<kType>(codes, 1, scale[t], minimum[t]));
            }
            multiply_add(scores[t], query_[s], k[0], k[1]);
          }
      } else {
        uint32_t from[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const int token = first + j * 16 + lane_ / 16 * 8 + lane_ % 8;
          from[j] = row_of(extent.begin + block * kTokens + token, token, stage, own_keys_);
        }
        wait_barrier(full_ + 8 * own_place.stage, own_place.parity);
#pragma unroll
        for (int s = 0; s < kSteps; s++)
#pragma unroll
          for (int j = 0; j < 2; j++) {
            uint32_t k[4];
            load_cores(k, from[j] + piece_at(2 * s + lane_ / 8 % 2) * 16);
            multiply_add(scores[2 * j], query_[s], k[0], k[1]);
            multiply_add(scores[2 * j + 1], query_[s], k[2], k[3]);
          }
      }
      __syncwarp();
      if (lane_ < kConsumers / 2) arrive(empty_ + 8 * own_place.stage);  // for all warps, with the block's other one
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
    float by[2][kBlocks], part[2] = {};
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
        by[h][b] = shrunk(most, next), most = next;
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
      shared_.weights[warp_ * 2 + j][lane_] = make_uint4(
          two_bf16(scores[2 * j][0], scores[2 * j][1]), two_bf16(scores[2 * j][2], scores[2 * j][3]),
          two_bf16(scores[2 * j + 1][0], scores[2 * j + 1][1]), two_bf16(scores[2 * j + 1][2], scores[2 * j + 1][3]));
    consumers_meet();
    clear(out_);
    sum_[0] = sum_[1] = 0;
    place.advance(extent.blocks, stages_);
#pragma unroll
    for (int b = 0; b < kBlocks; b++) {
      if (b >= extent.blocks) break;
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float halves[2] = {shared_.sums[2 * b][lane_ / 4 + 8 * h][lane_ % 4],
                                 shared_.sums[2 * b + 1][lane_ / 4 + 8 * h][lane_ % 4]};
        sum_[h] = summed(sum_[h], by[h][b], halves);
#pragma unroll
        for (int v = 0; v < kOwn; v++) out_[v][2 * h] *= by[h][b], out_[v][2 * h + 1] *= by[h][b];
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
      } else if constexpr (S::kCodes) {
        // Of four positions codes of adjacent features: a column of each of the products, which are of their own
        // features each.
        constexpr int kCodeBytes = (kOwn * S::kBits + 7) / 8;
        const int feature = (warp_ * 8 + lane_ / 4) * kOwn;
        const int shifted = kOwn * S::kBits < 8 ? feature % 2 * 4 : 0;
#pragma unroll
        for (int s = 0; s < 4; s++) {
          uint32_t codes[4];
          float scale[4] = {}, minimum[4] = {};
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const int token = s * 16 + i / 2 * 8 + lane_ % 4 * 2 + i % 2;
            codes[i] =
                load_shared<kCodeBytes>(row_of(begin + token, token, stage, own_values_) + feature * S::kBits / 8) >>
                shifted;
            if (S::kScaled) scale_of(begin + token, token, stage, 2, scale[i], minimum[i]);
          }
#pragma unroll
          for (int v = 0; v < kOwn; v++) {
            float x[4];
#pragma unroll
            for (int i = 0; i < 4; i++) x[i] = widened<kType>(codes[i], v, scale[i], minimum[i]);
            multiply_add(out_[v], weights[s], two_bf16(x[0], x[1]), two_bf16(x[2], x[3]));
          }
        }
      } else {
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const uint32_t from = row_of(begin + j * 32 + lane_, j * 32 + lane_, stage, own_values_);
#pragma unroll
          for (int v = 0; v < kOwn; v++) {
            uint32_t x[4];
            load_cores_transposed(x, from + piece_at(warp_ * kOwn + v) * 16);
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
    clear(total_);
#pragma unroll
    for (int h = 0; h < 2; h++) total_most_[h] = -INFINITY, total_sum_[h] = 0;
  }
  // The run becomes part of the total.
  __device__ void add_run() {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float now = fmaxf(total_most_[h], most_[h]), by = shrunk(total_most_[h], now),
                  run_by = shrunk(most_[h], now);
      total_most_[h] = now, total_sum_[h] = merged(total_sum_[h], by, sum_[h], run_by);
#pragma unroll
      for (int v = 0; v < kOwn; v++)
#pragma unroll
        for (int i = 2 * h; i < 2 * h + 2; i++) total_[v][i] = merged(total_[v][i], by, out_[v][i], run_by);
    }
  }
  __device__ void leave_run(const Runs& runs) const { leave(runs, out_, most_, sum_); }
  __device__ void leave_total(const Runs& runs) const { leave(runs, total_, total_most_, total_sum_); }
  __device__ void write_total(const Runs& runs) const {
    const FewRows& rows = runs.rows();
    if (!has_features()) return;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int pair = lane_ / 4 + 8 * h;
      if (pair >= rows.count || !rows.has(pair, runs.kv_head())) continue;
      const int row = rows.row(pair), column = rows.head(pair, runs.kv_head()) * kDim;
      const float sum = with_sink(a_, heads_[h], total_sum_[h], total_most_[h]);
      each_two(total_, h, [&](int feature, float first, float second) {
        put_two(a_.out, row, column + feature, share(first, sum), share(second, sum));
      });
    }
  }

 private:
  using S = Shape<kDim, kType>;
  // Of 16 features for the scores; a warp's products of eight features for the values.
  static constexpr int kSteps = kDim / 16, kEights = kDim / 8, kOwn = (kEights + kConsumers - 1) / kConsumers;
  static_assert(kEights % kOwn == 0);
  using Values = float[kOwn][4];

  // A piece of 16 bytes of a row whose number in eight is that of the lane.
  __device__ int piece_at(int piece) const { return S::kSwizzled ? piece ^ lane_ % 8 : piece; }
  __device__ bool has_features() const { return kEights % kConsumers == 0 || warp_ * kOwn < kEights; }

  __device__ static void clear(Values& values) {
#pragma unroll
    for (int v = 0; v < kOwn; v++)
#pragma unroll
      for (int i = 0; i < 4; i++) values[v][i] = 0;
  }
  // Of a thread's pair its features in order, two by two: columns of a product, or of all products a column (attend()).
  template <typename Each>
  __device__ void each_two(const Values& values, int h, Each each) const {
    const auto value = [&](int i) {
      return S::kCodes ? values[i % kOwn][2 * h + i / kOwn] : values[i / 2][2 * h + i % 2];
    };
#pragma unroll
    for (int i = 0; i < 2 * kOwn; i += 2)
      each(warp_ * kOwn * 8 + (S::kCodes ? lane_ % 4 * 2 * kOwn + i : i / 2 * 8 + lane_ % 4 * 2), value(i),
           value(i + 1));
  }
  // For the merge, in the place of the run.
  __device__ void leave(const Runs& runs, const Values& values, const float (&most)[2], const float (&sum)[2]) const {
    const FewRows& rows = runs.rows();
    float* to = partial_of(a_, runs.tile(), runs.kv_head(), runs.run());
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int pair = lane_ / 4 + 8 * h;
      if (pair >= rows.count || !rows.has(pair, runs.kv_head())) continue;
      if (warp_ == 0 && lane_ % 4 == 0) to[pair] = most[h], to[kFewPairs + pair] = sum[h];
      if (!has_features()) continue;
      each_two(values, h, [&](int feature, float first, float second) {
        *reinterpret_cast<float2*>(to + 2 * kFewPairs + pair * kDim + feature) = make_float2(first, second);
      });
    }
  }

  __device__ static void put_two(const Rows& out, int row, int column, float first, float second) {
    if (out.tiles)
      *reinterpret_cast<uint32_t*>(out.tiles + tile_offset(row, column, blocks_of(out.width))) =
          two_bf16(first, second);
    if (out.values)
      *reinterpret_cast<float2*>(out.values + (size_t)row * out.width + column) = make_float2(first, second);
  }

  const Attention& a_;
  Shared& shared_;
  const uint32_t ring_, full_, empty_;
  uint32_t own_keys_, own_values_, own_scales_;  // where the tile's own rows are
  const int stages_, lane_ = threadIdx.x % 32, warp_ = threadIdx.x / 32;
  const float factor_;
  uint32_t query_[kSteps][4];
  int positions_[2], least_[2], heads_[2];
  Values out_, total_;
  float most_[2], sum_[2], total_most_[2], total_sum_[2];
};

// own: tiles' rows enter the cache here, too (rotated, if rotates), as store_cache() has it. several: tiles may have
// several runs. own_rows: of a tile, at most.
template <int kDim, CacheType kType>
__global__ void __launch_bounds__(kThreads, 1)
    attend_few_kernel(const __grid_constant__ Attention a, const AttentionTile* tiles, int count, bool several,
                      bool own, bool rotates, const __grid_constant__ Turn turn, int own_rows, int stages) {
  using S = Shape<kDim, kType>;
  extern __shared__ __align__(128) char memory[];
  let_next_begin();
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  char* prepared = memory + sizeof(Shared);
  const uint32_t ring = shared_address(prepared + kPrepared * Prepared<kDim, kType>::bytes(own_rows));
  const uint32_t full = shared_address(shared.full), empty = shared_address(shared.empty);
  if (threadIdx.x < stages)
    init_barrier(full + 8 * threadIdx.x, in_bulk<kDim, kType>() ? 1 : 32 * kCopiers),
        init_barrier(empty + 8 * threadIdx.x, kConsumers);
  if (threadIdx.x < kPrepared)
    init_barrier(shared_address(shared.prepared + threadIdx.x), 32 * kPreparers),
        init_barrier(shared_address(shared.released + threadIdx.x), kConsumers);
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  barriers_are_there();
#endif
  // What a step is has been there since before its first kernel, and so have positions before its rows' in the cache.
  if (several) share_out(a, tiles, count, shared);
  else __syncthreads();
  Runs runs(a, tiles, count, several, shared);
  if (!runs.left()) return await_previous();  // so that this kernel does not end before it
  const int warp = threadIdx.x / 32 - kConsumers;
  if (warp >= 0 && warp < kCopiers) return copy_runs<kDim, kType>(a, runs, own, shared, ring, stages);
  if (warp >= kCopiers) return prepare_tiles<kDim, kType>(a, runs, prepared, shared, own_rows, own, rotates, turn);

  Attender<kDim, kType> attender(a, shared, ring, stages);
  await_previous();
  RingPlace place, tile;
  bool begins = true;  // a tile and a KV head; or what this block of threads has of them
  for (bool merges = false; runs.left(); runs.next()) {
    const FewRows& rows = runs.rows();
    if (!rows.count) continue;
    if (begins) {
      wait_barrier(shared_address(shared.prepared + tile.stage), tile.parity);
      attender.begin_tile(runs, Prepared<kDim, kType>(prepared, shared, tile.stage, own_rows));
      attender.begin_part();
      begins = false, merges = runs.run() == rows.first_run;
    }
    const Extent extent(rows, runs.run());
    attender.attend(extent, own, place);
    place.advance(2 * extent.blocks, stages);
    if (merges) attender.add_run();
    else attender.leave_run(runs);
    if (runs.run() < runs.last_own()) continue;
    begins = true;
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(shared_address(shared.released + tile.stage));
    tile.advance(1, kPrepared);
    if (merges && runs.run() == rows.last_run) {
      attender.write_total(runs);
    } else {
      if (merges) attender.leave_total(runs);
      leave_part(a, runs);
    }
  }
  if (!several) return;
  // Others may have something of what this block began with, and of what it ended with.
  const Begin begin = shared.begin;
  consumers_meet();  // nobody reads the ring any more
#pragma unroll 1
  for (int end = 0; end < 2; end++) {
    const bool same = begin.tile == runs.tile() && begin.kv_head == runs.kv_head();
    if (!end && same) continue;
    const Part part(a, tiles, end ? runs.tile() : begin.tile, end ? runs.kv_head() : begin.kv_head,
                    end ? runs.run() : begin.run, end ? runs.number() : begin.number, begin);
    if (part.blocks > 1) merge_part<kDim>(a, part, ring);
  }
}

template <int kDim, CacheType kType>
void start_few(const Attention& a, const AttentionTile* tiles, int count, bool several, bool own, const Turn* turn,
               const Queue& queue) {
  using S = Shape<kDim, kType>;
  const int rows = own ? kFewPairs / a.group : 0, all = count * a.cache.kv_heads * (several ? a.most_runs : 1);
  const int fixed = sizeof(Shared) + kPrepared * Prepared<kDim, kType>::bytes(rows);
  const int wanted = several || all > processors() ? kMostStages : kShortStages;
  static_assert(kMostStages * S::kTensor >= kConsumers * kMergeBytes);
  const int stages = std::min((most_shared() - fixed) / S::kTensor, wanted), bytes = fixed + stages * S::kTensor;
  const auto kernel = attend_few_kernel<kDim, kType>;
  allow_shared(kernel, bytes);
  start(queue, kernel, dim3(std::min(all, processors())), kThreads, bytes, a, tiles, count, several, own,
        turn != nullptr, turn ? *turn : Turn(), rows, stages);
}

}  // namespace few
}  // namespace cuda
}  // namespace as
