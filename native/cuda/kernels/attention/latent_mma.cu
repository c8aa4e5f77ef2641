// Latent attention with mma.sync. A tile has up to 16 (row, query head) pairs, which all see the same rows of the
// cache; their first kLatentDim features are the values. So each row is copied once to a ring in shared memory and is
// used twice there. Some warps of a CTA copy. Eight warps compute blocks of 64 positions:
//   - Scores: a warp has a quarter of the features and half of the positions, and keeps its part of the queries in
//     registers. The quarters' sums are added in shared memory, in ascending order.
//   - Weights: a warp has eight positions.
//   - Values: a warp has an eighth of the features. A product with ones sums the weights as they were rounded.
// A pair's bits depend on no other pair: each KV split is one chain of such blocks, and KV splits are merged in order.
//
// Rows of attention over compressed positions have kLatentDim features and zeros in place of the others; each row of
// the step sees a list of them.
//
// Decode tiles: persistent CTAs share all KV splits as in attention_decode.cuh. Prefill tiles: a CTA for each 32 pairs,
// which are two operands of 16 rows, with the queries in shared memory; or for 16 where there is less of it.
#include <algorithm>
#include <climits>

#include "cuda/kernels/attention/entries.cuh"
#include "cuda/kernels/attention/kv_splits.cuh"
#include "cuda/kernels/attention/latent_mma.h"
#include "cuda/kernels/attention/latent_plan.h"
#include "cuda/kernels/common/pipeline.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace latent {

using decode::consumers_meet;
using decode::kConsumers;
using decode::kTokens;
using decode::KvSplits;
using decode::Shared;

constexpr int kProducers = 4, kCopiers = 32 * kProducers, kThreads = 32 * kConsumers + kCopiers;
constexpr int kRowBytes = 2 * kLargestRow, kStride = kRowBytes + 16;      // of a row in the cache, and in shared memory
constexpr int kBlockStages = kTokens / kLatentTokens;                     // stages of a block
constexpr int kQuarters = 4, kSteps = kLargestRow / 16 / kQuarters;       // steps of 16 features of a quarter
constexpr int kEights = kTokens / 8, kOwn = kLatentDim / 8 / kConsumers;  // eights: of positions; of a warp's features
constexpr uint32_t kOnes = kDType16 == DType16::bf16 ? 0x3f803f80u : 0x3c003c00u;

// kTiles: operands of 16 pairs.
template <int kTiles>
struct Memory {
  Shared shared;
  float maxima[kTiles * kDecodePairs][kEights];  // over eight positions
  // Scores of eight positions, as a result of mma.sync.
  float4 quarters[kTiles][kQuarters][kEights][32];
  char queries[kTiles == 1 ? 16 : kTiles * kDecodePairs * kStride];  // one tile's are in registers
};
static_assert(sizeof(Memory<1>) == latent_fixed(1) && sizeof(Memory<2>) == latent_fixed(2));
static_assert(kLatentStage == kLatentTokens * kStride);
static_assert(kQuarters * kSteps * 16 == kLargestRow && kConsumers == 2 * kQuarters && kEights == kConsumers);

// What a tile sees: positions; some tiles those that an indexer selects; lists of positions and entries.
enum class Sees { positions, selected, lists };

// A copying warp's part.
template <Sees kSees>
class Copier {
 public:
  __device__ Copier(const Attention& a, uint32_t ring, uint32_t full, uint32_t empty, int stages)
      : a_(a), ring_(ring), full_(full), empty_(empty), stages_(stages) {}

  // Copies the positions of a KV split, up to `last`.
  __device__ void copy_split(const AttentionTile& tile, int split, int last) {
    if constexpr (kSees == Sees::selected)
      if (tile.before == kSelected) return copy_selected(tile, split, last);
    if constexpr (kSees == Sees::lists) return copy_list(tile, split, last);
    const int size = a_.cache.span_size, shift = 31 - __clz(size), begin = split * kKvSplitTokens;
    const int first_span = begin >> shift, at_lane = first_span + lane_ % 16;  // a KV split has at most 16 spans
    const int spans = at_lane << shift <= last ? a_.tables[tile.table + at_lane] : 0;
    const int blocks = (last - begin) / kTokens + 1;
#pragma unroll 1
    for (int i = 0; i < blocks * kBlockStages; i++) {
      const int at = begin + i * kLatentTokens, span = __shfl_sync(0xffffffffu, spans, (at >> shift) - first_span & 15);
      const int there = min(max(last + 1 - at, 0), kLatentTokens) * kChunks;
      // The previous kernel stores the rows of the tile and of the sequence's tiles before it. Earlier rows were stored
      // before this step.
      if (at + kLatentTokens > tile.start - tile.before) await_previous();
      wait_barrier(empty_ + 8 * place_.stage, place_.parity ^ 1);
      const char* from = a_.cache.data + (there ? span * a_.cache.stride + (at & (size - 1)) * kRowBytes : 0);
      const uint32_t to = ring_ + place_.stage * kLatentStage;
#pragma unroll
      for (int j = 0; j < kLatentTokens * kChunks / kCopiers; j++) {
        const int chunk = j * kCopiers + thread_;
        copy_16(to + (chunk + chunk / kChunks) * 16, from + chunk * 16, chunk < there);  // a row has one more chunk
      }
      arrive_with_copies(full_ + 8 * place_.stage);
      place_.advance(1, stages_);
    }
  }
  __device__ void end() { commit_copies(), wait_copies<0>(); }

 private:
  // The same of positions that an indexer selects. Each lane looks up one of 32 positions. It does so two steps ahead,
  // because a place in the cache takes two reads, one after the other.
  __device__ void copy_selected(const AttentionTile& tile, int split, int last) {
    const int size = a_.cache.span_size, shift = 31 - __clz(size), begin = split * kKvSplitTokens;
    const int* table = a_.tables + tile.table;
    const float* selected = selected_by(a_, tile);
    const auto position_at = [&](int at) { return at + lane_ <= last ? (int)selected[at + lane_] : -1; };
    const auto place_of = [&](int position) {
      return position < 0 ? 0 : table[position >> shift] * size + (position & (size - 1));
    };
    await_previous();
    int places = place_of(position_at(begin)), next = position_at(begin + 32);
    const int blocks = (last - begin) / kTokens + 1;
#pragma unroll 1
    for (int at = begin; at < begin + blocks * kTokens; at += 32) {
      const int later = place_of(next);
      next = position_at(at + 64);
#pragma unroll 1
      for (int half = 0; half < 32; half += kLatentTokens) {
        const int there = min(max(last + 1 - at - half, 0), kLatentTokens) * kChunks;
        wait_barrier(empty_ + 8 * place_.stage, place_.parity ^ 1);
        const uint32_t to = ring_ + place_.stage * kLatentStage;
#pragma unroll
        for (int j = 0; j < kLatentTokens * kChunks / kCopiers; j++) {
          const int chunk = j * kCopiers + thread_, row = chunk / kChunks;
          const int place = __shfl_sync(0xffffffffu, places, half + row);
          const char* from = a_.cache.data + (place >> shift) * a_.cache.stride + (place & (size - 1)) * kRowBytes;
          copy_16(to + (chunk + row) * 16, from + (chunk - row * kChunks) * 16, chunk < there);
        }
        arrive_with_copies(full_ + 8 * place_.stage);
        place_.advance(1, stages_);
      }
      places = later;
    }
  }

  // The same of a list. Only the first kListedChunks of a row in shared memory are in the cache.
  __device__ void copy_list(const AttentionTile& tile, int split, int last) {
    constexpr int kNone = INT_MIN;
    const int begin = split * kKvSplitTokens, position = a_.positions[tile.row];
    const float* selected = selected_by(a_, tile);
    const auto place_at = [&](int at) {
      return at + lane_ <= last ? listed(a_, position, selected, at + lane_) : kNone;
    };
    const auto row_of = [&](int place) {
      return (unsigned long long)(place == kNone ? a_.cache.data : listed_row(a_, tile.table, place));
    };
    await_previous();
    unsigned long long rows = row_of(place_at(begin));
    int next = place_at(begin + 32);
    const int blocks = (last - begin) / kTokens + 1;
#pragma unroll 1
    for (int at = begin; at < begin + blocks * kTokens; at += 32) {
      const unsigned long long later = row_of(next);
      next = place_at(at + 64);
#pragma unroll 1
      for (int half = 0; half < 32; half += kLatentTokens) {
        const int there = min(max(last + 1 - at - half, 0), kLatentTokens);
        wait_barrier(empty_ + 8 * place_.stage, place_.parity ^ 1);
        const uint32_t to = ring_ + place_.stage * kLatentStage;
#pragma unroll
        for (int j = 0; j < kLatentTokens * kChunks / kCopiers; j++) {
          const int chunk = j * kCopiers + thread_, row = chunk / kChunks, column = chunk - row * kChunks;
          const char* from = reinterpret_cast<const char*>(__shfl_sync(0xffffffffu, rows, half + row));
          const bool kept = column < kListedChunks;
          copy_16(to + (chunk + row) * 16, from + (kept ? column * 16 : 0), kept && row < there);
        }
        arrive_with_copies(full_ + 8 * place_.stage);
        place_.advance(1, stages_);
      }
      rows = later;
    }
  }

  static constexpr int kChunks = kRowBytes / 16, kListedChunks = 2 * kLatentDim / 16;
  static_assert(kLatentTokens * kChunks % kCopiers == 0);
  const Attention& a_;
  const uint32_t ring_, full_, empty_;
  const int stages_, thread_ = threadIdx.x - 32 * kConsumers, lane_ = threadIdx.x % 32;
  PipelineStage place_;
};

// The computing warps' state. RowsOf: TileRows or DecodeRows.
template <typename RowsOf, int kTiles>
class Attender {
 public:
  __device__ Attender(const Attention& a, Memory<kTiles>& memory, uint32_t ring, int stages)
      : a_(a),
        memory_(memory),
        ring_(ring),
        full_(shared_address(memory.shared.full)),
        empty_(shared_address(memory.shared.empty)),
        stages_(stages),
        factor_(score_factor(a)) {}

  // Reads the queries of a tile, and begins a range of its KV splits. Only one tile's queries may be read twice.
  __device__ void begin_tile(const RowsOf& rows, int kv_head) {
    if (kTiles > 1) consumers_meet();  // no warp reads the queries of the tile before
#pragma unroll
    for (int m = 0; m < kTiles; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int pair = pair_of(m, h);
        const bool there = pair < rows.count && rows.has(pair, kv_head);
        positions_[m][h] = there ? rows.position(pair) : -1;
        const size_t row = there ? rows.row(pair) : 0, head = there ? rows.head(pair, kv_head) : 0;
        const float *absorbed = a_.qkv + row * a_.width + head * kLatentDim,
                    *rotated = a_.rotated + row * a_.rotated_width + head * kLatentRope;
#pragma unroll
        for (int s = 0; s < kSteps; s++)
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const int feature = (quarter_ * kSteps + s) * 16 + half * 8 + lane_ % 4 * 2;
            const float* from = feature < kLatentDim ? absorbed + feature : rotated + feature - kLatentDim;
            const bool known = there && (feature < kLatentDim || a_.rotated);
            const uint32_t two = known ? to_dtype16x2(from[0], from[1]) : 0;
            if (kTiles == 1) query_[s][h + 2 * half] = two;
            else if (half_ == 0) store_shared(shared_address(memory_.queries) + pair * kStride + feature * 2, two);
          }
        total_most_[m][h] = -INFINITY, total_sum_[m][h] = 0;
#pragma unroll
        for (int v = 0; v < kOwn; v++) total_[m][v][2 * h] = total_[m][v][2 * h + 1] = 0;
      }
    if (kTiles > 1) consumers_meet();
  }

  // Computes a KV split, up to position `last`.
  __device__ void attend_split(int split, int last) {
#pragma unroll
    for (int m = 0; m < kTiles; m++) {
      most_[m][0] = most_[m][1] = -INFINITY;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        sums_[m][i] = 0;
#pragma unroll
        for (int v = 0; v < kOwn; v++) out_[m][v][i] = 0;
      }
    }
#pragma unroll 1
    for (int begin = split * kKvSplitTokens; begin <= last; begin += kTokens) attend_block(begin);
  }

  // Merges the KV split into the total.
  __device__ void add_split() {
#pragma unroll
    for (int m = 0; m < kTiles; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float now = fmaxf(total_most_[m][h], most_[m][h]), by = shrunk(total_most_[m][h], now),
                    split_by = shrunk(most_[m][h], now);
        total_most_[m][h] = now, total_sum_[m][h] = merged(total_sum_[m][h], by, sums_[m][2 * h], split_by);
#pragma unroll
        for (int v = 0; v < kOwn; v++)
#pragma unroll
          for (int i = 2 * h; i < 2 * h + 2; i++)
            total_[m][v][i] = merged(total_[m][v][i], by, out_[m][v][i], split_by);
      }
  }
  __device__ void write_total(const RowsOf& rows, int kv_head) const {
#pragma unroll
    for (int m = 0; m < kTiles; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int pair = pair_of(m, h);
        if (pair >= rows.count || !rows.has(pair, kv_head)) continue;
        const int row = rows.row(pair), head = rows.head(pair, kv_head), column = head * kLatentDim + own_feature();
        const float sum = with_sink(a_, head, total_sum_[m][h], total_most_[m][h]);
#pragma unroll
        for (int v = 0; v < kOwn; v++)
          decode::put_two(a_.out, row, column + v * 8, share(total_[m][v][2 * h], sum),
                          share(total_[m][v][2 * h + 1], sum));
      }
  }
  // Writes the result of the KV split, or the total up to it, to the split's place for the merge.
  __device__ void leave_split(const KvSplits& splits) const {
    leave(splits, out_[0], most_[0], sums_[0][0], sums_[0][2]);
  }
  __device__ void leave_total(const KvSplits& splits) const {
    leave(splits, total_[0], total_most_[0], total_sum_[0][0], total_sum_[0][1]);
  }

 private:
  __device__ int pair_of(int m, int h) const { return m * kDecodePairs + lane_ / 4 + 8 * h; }
  __device__ int own_feature() const { return warp_ * kOwn * 8 + lane_ % 4 * 2; }

  __device__ void leave(const KvSplits& splits, const float (&values)[kOwn][4], const float (&most)[2], float first_sum,
                        float second_sum) const {
    const RowsOf& rows = splits.rows();
    float* to = partial_of(a_, rows.tile.first, splits.kv_head(), splits.split());
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int pair = lane_ / 4 + 8 * h;
      if (pair >= rows.count || !rows.has(pair, splits.kv_head())) continue;
      if (warp_ == 0 && lane_ % 4 == 0) to[pair] = most[h], to[kDecodePairs + pair] = h ? second_sum : first_sum;
#pragma unroll
      for (int v = 0; v < kOwn; v++)
        *reinterpret_cast<float2*>(to + 2 * kDecodePairs + pair * kLatentDim + own_feature() + v * 8) =
            make_float2(values[v][2 * h], values[v][2 * h + 1]);
    }
  }

  // Adds the 64 positions from `begin` on. Positions that a pair does not see have the weight zero.
  __device__ void attend_block(int begin) {
    PipelineStage stage[kBlockStages];
    uint32_t rows[kBlockStages];
#pragma unroll
    for (int i = 0; i < kBlockStages; i++)
      stage[i] = place_, rows[i] = ring_ + place_.stage * kLatentStage, place_.advance(1, stages_);
    float scores[kTiles][kBlockStages][4] = {};  // of half the positions, in eights
#pragma unroll
    for (int j = 0; j < kBlockStages / 2; j++) {
      const PipelineStage own = half_ ? stage[kBlockStages / 2 + j] : stage[j];
      wait_barrier(full_ + 8 * own.stage, own.parity);
    }
    const uint32_t columns = quarter_ * kSteps * 32;  // offset of the quarter
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
      uint32_t query[kTiles][4];
#pragma unroll
      for (int m = 0; m < kTiles; m++) {
        if constexpr (kTiles == 1) {
#pragma unroll
          for (int i = 0; i < 4; i++) query[0][i] = query_[s][i];
        } else {
          load_cores(query[m], shared_address(memory_.queries) + (m * kDecodePairs + lane_ % 16) * kStride + columns +
                                   s * 32 + lane_ / 16 * 16);
        }
      }
#pragma unroll
      for (int j = 0; j < kBlockStages / 2; j++) {
        uint32_t k[4];
        load_cores(k, (half_ ? rows[kBlockStages / 2 + j] : rows[j]) + (lane_ / 16 * 8 + lane_ % 8) * kStride +
                          columns + s * 32 + lane_ / 8 % 2 * 16);
#pragma unroll
        for (int m = 0; m < kTiles; m++) {
          multiply_add(scores[m][2 * j], query[m], k[0], k[1]);
          multiply_add(scores[m][2 * j + 1], query[m], k[2], k[3]);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kTiles; m++)
#pragma unroll
      for (int i = 0; i < kBlockStages; i++) {
        const float(&x)[4] = scores[m][i];
        memory_.quarters[m][quarter_][half_ * (kEights / 2) + i][lane_] = make_float4(x[0], x[1], x[2], x[3]);
      }
    consumers_meet();
    float score[kTiles][4];
#pragma unroll
    for (int m = 0; m < kTiles; m++) {
      add_quarters(m, score[m]);
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (begin + warp_ * 8 + lane_ % 4 * 2 + i % 2 > positions_[m][i / 2]) score[m][i] = -INFINITY;
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float now = fmaxf(score[m][2 * h], score[m][2 * h + 1]);
        now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 1));
        now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 2));
        if (lane_ % 4 == 0) memory_.maxima[pair_of(m, h)][warp_] = now;
      }
    }
    consumers_meet();
#pragma unroll
    for (int m = 0; m < kTiles; m++) {
      float by[2];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float4* maxima = reinterpret_cast<const float4*>(memory_.maxima[pair_of(m, h)]);
        const float4 low = maxima[0], high = maxima[1];
        const float block =
            fmaxf(fmaxf(fmaxf(low.x, low.y), fmaxf(low.z, low.w)), fmaxf(fmaxf(high.x, high.y), fmaxf(high.z, high.w)));
        const float most = fmaxf(most_[m][h], block * factor_);
        by[h] = shrunk(most_[m][h], most), most_[m][h] = most;
      }
      // Two eights are a step of 16 positions, the first operand of mma.sync.
      const float(&x)[4] = score[m];
      reinterpret_cast<uint2*>(&memory_.shared.weights[m * kBlockStages + warp_ / 2][lane_])[warp_ % 2] =
          make_uint2(to_dtype16x2(weight_of(x[0], factor_, most_[m][0]), weight_of(x[1], factor_, most_[m][0])),
                     to_dtype16x2(weight_of(x[2], factor_, most_[m][1]), weight_of(x[3], factor_, most_[m][1])));
#pragma unroll
      for (int i = 0; i < 4; i++) {
        sums_[m][i] *= by[i / 2];
#pragma unroll
        for (int v = 0; v < kOwn; v++) out_[m][v][i] *= by[i / 2];
      }
    }
    consumers_meet();
#pragma unroll
    for (int s = 0; s < kBlockStages; s++) {
      wait_barrier(full_ + 8 * stage[s].stage, stage[s].parity);
      uint32_t weights[kTiles][4];
#pragma unroll
      for (int m = 0; m < kTiles; m++) {
        const uint4 four = memory_.shared.weights[m * kBlockStages + s][lane_];
        weights[m][0] = four.x, weights[m][1] = four.y, weights[m][2] = four.z, weights[m][3] = four.w;
        multiply_add(sums_[m], weights[m], kOnes, kOnes);
      }
      const uint32_t from = rows[s] + lane_ % 16 * kStride + (warp_ * kOwn + lane_ / 16) * 16;
#pragma unroll
      for (int v = 0; v < kOwn; v += 2) {
        uint32_t x[4];
        load_cores_transposed(x, from + v * 16);
#pragma unroll
        for (int m = 0; m < kTiles; m++) {
          multiply_add(out_[m][v], weights[m], x[0], x[1]);
          multiply_add(out_[m][v + 1], weights[m], x[2], x[3]);
        }
      }
      __syncwarp();
      if (lane_ == 0) arrive(empty_ + 8 * stage[s].stage);
    }
  }

  // The warp's eight positions.
  __device__ void add_quarters(int m, float (&score)[4]) const {
    float4 sum = memory_.quarters[m][0][warp_][lane_];
#pragma unroll
    for (int q = 1; q < kQuarters; q++) sum = sum_of(sum, memory_.quarters[m][q][warp_][lane_]);
    score[0] = sum.x, score[1] = sum.y, score[2] = sum.z, score[3] = sum.w;
  }

  const Attention& a_;
  Memory<kTiles>& memory_;
  const uint32_t ring_, full_, empty_;
  const int stages_, lane_ = threadIdx.x % 32, warp_ = threadIdx.x / 32;
  const int quarter_ = warp_ % kQuarters, half_ = warp_ / kQuarters;
  const float factor_;
  PipelineStage place_;
  uint32_t query_[kTiles == 1 ? kSteps : 1][4];
  int positions_[kTiles][2];
  float out_[kTiles][kOwn][4], total_[kTiles][kOwn][4];
  float sums_[kTiles][4];  // of weights, as a column of a product: a thread's pairs have the first and the third
  float most_[kTiles][2], total_most_[kTiles][2], total_sum_[kTiles][2];
};

__device__ inline void init_ring(Shared& shared, int stages) {
  for (int stage = threadIdx.x / 32; threadIdx.x % 32 == 0 && stage < stages; stage += kThreads / 32)
    init_barrier(shared_address(shared.full) + 8 * stage, kCopiers),
        init_barrier(shared_address(shared.empty) + 8 * stage, kConsumers);
}

// Copying warps leave registers to the computing ones, if the chip can do that.
__device__ inline void leave_registers() {
#if __CUDA_ARCH__ >= 900
  asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
#endif
}
__device__ inline void take_registers() {
#if __CUDA_ARCH__ >= 900
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
#endif
}

// The last position of a KV split that any pair sees.
template <typename RowsOf>
__device__ int last_of(const RowsOf& rows, int split) {
  return min(rows.position(rows.count - 1), (split + 1) * kKvSplitTokens - 1);
}

template <Sees kSees>
__global__ void __launch_bounds__(kThreads, 1)
    attend_latent_decode_kernel(const __grid_constant__ Attention a, const AttentionTile* tiles, int count,
                                bool several, int stages) {
  extern __shared__ __align__(128) char bytes[];
  let_next_begin();
  Memory<1>& memory = *reinterpret_cast<Memory<1>*>(bytes);
  Shared& shared = memory.shared;
  const uint32_t ring = shared_address(bytes + sizeof(memory));
  init_ring(shared, stages);
  // Tiles, tables and earlier positions in the cache were written before the step's first kernel.
  decode::Begin begin = decode::share_out_tiles(a, count);
  if (several && threadIdx.x < 32) {
    begin = decode::share_out(a, tiles, count);
    if (threadIdx.x == 0) shared.begin = begin;
  }
  __syncthreads();
  if (several) begin = shared.begin;
  KvSplits splits(a, tiles, several, begin);
  if (!splits.left()) return;
  if (threadIdx.x >= 32 * kConsumers) {
    Copier<kSees> copier(a, ring, shared_address(shared.full), shared_address(shared.empty), stages);
    for (; splits.left(); splits.next())
      if (splits.rows().count)
        copier.copy_split(splits.rows().tile, splits.split(), last_of(splits.rows(), splits.split()));
    return copier.end();
  }
  Attender<DecodeRows, 1> attender(a, memory, ring, stages);
  await_previous();
  bool begins = true, merges = false;
  for (; splits.left(); splits.next()) {
    const DecodeRows& rows = splits.rows();
    if (!rows.count) continue;
    if (begins)
      attender.begin_tile(rows, splits.kv_head()), begins = false, merges = splits.split() == rows.first_split;
    attender.attend_split(splits.split(), last_of(rows, splits.split()));
    if (merges) attender.add_split();
    else attender.leave_split(splits);
    if (splits.split() < splits.last_own()) continue;
    begins = true;
    if (merges && splits.split() == rows.last_split) {
      attender.write_total(rows, splits.kv_head());
    } else {
      if (merges) attender.leave_total(splits);
      decode::leave_part(a, splits);
    }
  }
  if (!several || shared.begin.whole) return;
  // Other CTAs may have parts of this CTA's first tile and of its last tile.
  begin = shared.begin;
  consumers_meet();  // no warp reads the ring any more
  const bool same = begin.tile == splits.tile() && begin.kv_head == splits.kv_head(),
             end = threadIdx.x >= 32 * decode::kMergers;
  if (same && !end) return;
  const decode::Part part(a, tiles, end ? splits.tile() : begin.tile, end ? splits.kv_head() : begin.kv_head,
                          end ? splits.split() : begin.split, end ? splits.number() : begin.number, begin);
  if (part.blocks > 1) decode::merge_part<kLatentDim>(a, part, shared, ring, stages * kLatentStage / kConsumers);
}

template <int kTiles, Sees kSees>
__global__ void __launch_bounds__(kThreads, 1)
    attend_latent_prefill_kernel(const __grid_constant__ Attention a, const AttentionTile* tiles, int items, int parts,
                                 int stages) {
  extern __shared__ __align__(128) char bytes[];
  let_next_begin();
  Memory<kTiles>& memory = *reinterpret_cast<Memory<kTiles>*>(bytes);
  const uint32_t ring = shared_address(bytes + sizeof(memory));
  init_ring(memory.shared, stages);
  __syncthreads();
  const auto each = [&](auto work) {
    constexpr int kPairs = kTiles * kDecodePairs;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
      AttentionTile tile = tiles[item / parts];
      tile.first += item % parts * kPairs;
      const TileRows rows(a, tile, kPairs);
      if (rows.count) work(tile, rows);
      if (kSees == Sees::positions) break;
    }
  };
  if (threadIdx.x >= 32 * kConsumers) {
    if (kTiles > 1) leave_registers();
    Copier<kSees> copier(a, ring, shared_address(memory.shared.full), shared_address(memory.shared.empty), stages);
    each([&](const AttentionTile& tile, const TileRows& rows) {
      for (int split = rows.first_split; split <= rows.last_split; split++)
        copier.copy_split(tile, split, last_of(rows, split));
    });
    return copier.end();
  }
  if (kTiles > 1) take_registers();
  Attender<TileRows, kTiles> attender(a, memory, ring, stages);
  await_previous();
  each([&](const AttentionTile&, const TileRows& rows) {
    attender.begin_tile(rows, blockIdx.y);
    for (int split = rows.first_split; split <= rows.last_split; split++)
      attender.attend_split(split, last_of(rows, split)), attender.add_split();
    attender.write_total(rows, blockIdx.y);
  });
}

// parts: of a tile and KV head, each an item. Of tiles of one row, which see few positions, CTAs take several in turn:
// they copy the next one's positions while one is computed.
template <int kTiles, Sees kSees>
void start_prefill(const Attention& a, const AttentionTile* tiles, int count, int parts, const Queue& queue) {
  const int stages = latent_stages(max_shared(), kTiles), bytes = latent_fixed(kTiles) + stages * kLatentStage;
  const auto kernel = attend_latent_prefill_kernel<kTiles, kSees>;
  const int items = count * parts, most = std::max(sm_count() / a.cache.kv_heads, 1);
  start(queue, kernel, dim3(kSees == Sees::positions ? items : std::min(items, most), a.cache.kv_heads), kThreads,
        bytes, a, tiles, items, parts, stages);
}

}  // namespace latent

void attend_latent_decode_mma(const Attention& a, const AttentionTile* tiles, int count, bool several,
                              const Queue& queue) {
  const int stages = latent_stages(max_shared(), 1), bytes = latent_fixed(1) + stages * kLatentStage;
  const int all = count * a.cache.kv_heads * (several ? a.max_splits : 1);
  const auto kernel = a.listed     ? latent::attend_latent_decode_kernel<latent::Sees::lists>
                      : a.selected ? latent::attend_latent_decode_kernel<latent::Sees::selected>
                                   : latent::attend_latent_decode_kernel<latent::Sees::positions>;
  start(queue, kernel, dim3(std::min(all, sm_count())), latent::kThreads, bytes, a, tiles, count, several, stages);
}

void attend_latent_prefill_mma(const Attention& a, const AttentionTile* tiles, int count, const Queue& queue) {
  constexpr int kParts = kPrefillPairs / kDecodePairs;
  if (latent_fits(max_shared(), 2))
    latent::start_prefill<2, latent::Sees::positions>(a, tiles, count, kParts / 2, queue);
  else latent::start_prefill<1, latent::Sees::positions>(a, tiles, count, kParts, queue);
}

namespace {

// A CTA has up to 32 heads of a row, as they see the same positions.
template <latent::Sees kSees>
void attend_rows(const Attention& a, const AttentionTile* tiles, int count, const Queue& queue) {
  if (a.queries <= kDecodePairs || !latent_fits(max_shared(), 2))
    return latent::start_prefill<1, kSees>(a, tiles, count, 1, queue);
  Attention wide = a;
  wide.cache.kv_heads = ceil_div(a.queries, 2 * kDecodePairs), wide.group = ceil_div(a.queries, wide.cache.kv_heads);
  latent::start_prefill<2, kSees>(wide, tiles, count, 1, queue);
}

}  // namespace

void attend_latent_selected_mma(const Attention& a, const AttentionTile* tiles, int count, const Queue& queue) {
  if (a.listed) attend_rows<latent::Sees::lists>(a, tiles, count, queue);
  else attend_rows<latent::Sees::selected>(a, tiles, count, queue);
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
