// Expert GEMMs of 8-bit weights and 8-bit activations on Hopper: e4m3 with a scale for each row or for each group
// (gemm_float8.h), and integers (gemm_integer.h).
//
// A CTA computes a tile of an expert's entries and kGroups x 64 columns (rows of the weights) at a time. CTAs are
// persistent and compute one tile after the other from the list in GPU memory. One warpgroup copies several stages
// ahead and on into the next tile: weights and their scales in bulk, rows in 16-byte chunks, which gathers them. The
// other warpgroups multiply, each 64 columns with all entries of the tile; wgmma reads both operands from shared
// memory.
#include <algorithm>
#include <type_traits>

#include "cuda/kernels/common/wgmma.cuh"
#include "cuda/kernels/gemm/gemm_integer.h"
#include "cuda/kernels/moe/copy_stages.cuh"

namespace as::cuda {
namespace {

enum class Form { floats, float_groups, integers, integer_groups };

// kRows: entries of a tile; kGroups: warpgroups that multiply.
template <Form kForm_, int kRows_, int kGroups_>
struct Shape {
  static constexpr Form kForm = kForm_;
  static constexpr bool kFloats = kForm == Form::floats || kForm == Form::float_groups,
                        kScaled = kForm == Form::float_groups || kForm == Form::integer_groups;
  using Sum = std::conditional_t<kFloats, float, int>;
  static constexpr int kRows = kRows_, kGroups = kGroups_, kCopiers = 128, kThreads = kCopiers + 128 * kGroups;
  static constexpr int kDepth = 2;  // blocks of K of a stage: a group of floats
  static_assert(kDepth * kBlock == kFloatGroup && kRows <= kCopiers);
  // In groups, a stage has sets of scales of the weights. It has sets of values of its rows: for floats scales, for
  // integers sums of activations, and behind them scales, which only the last stage of a sum needs.
  static constexpr int kSets = !kScaled ? 0 : kFloats ? 1 : kDepth, kSetBytes = kScaleWords * 4;
  static constexpr int kOfRows = kFloats ? 1 : std::max(kSets, 1) + 1;
  static constexpr int kWeightBytes = kDepth * kByteBlock, kRowsBytes = kRows * kByteRow;
  static constexpr int kRowsAt = kGroups * kWeightBytes, kScalesAt = kRowsAt + kDepth * kRowsBytes,
                       kValuesAt = kScalesAt + kGroups * kSets * kSetBytes;
  static constexpr int kStageBytes = (kValuesAt + kOfRows * kRows * 4 + 1023) / 1024 * 1024;
  static constexpr int kMost = (208 << 10) / kStageBytes, kStages = kMost < 12 ? kMost : 12;
  static constexpr int kShared = kStages * kStageBytes;
  // Rows of a block that the copying threads copy at once, a chunk each; copies of a thread for a stage.
  static constexpr int kChunks = kDepth * kByteRow / 16, kAround = kCopiers / kChunks,
                       kCopies = (kRows + kAround - 1) / kAround;
  // With many sums, threads that multiply take registers from those that copy.
  static constexpr bool kTrades = kRows > 64;
  static_assert(!kTrades || kGroups == 3);
  // Stages whose rows may still be in flight when those of another one are requested.
  static constexpr int kLag = 2;
  static_assert(kLag < kStages && kGroups <= kCopiers / 32);
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
template <int kRows>
__device__ void multiply(float (&d)[kRows / 2], uint32_t weights, uint32_t rows, int adds) {
  Float8Tile<kRows>::multiply(d, byte_descriptor(weights), byte_descriptor(rows), adds);
}
template <int kRows>
__device__ void multiply(int (&d)[kRows / 2], uint32_t weights, uint32_t rows, int adds) {
  QuantTile<kRows>::multiply(d, byte_descriptor(weights), byte_descriptor(rows), adds);
}

// A set of values of rows in a stage, in the order of a thread's sums.
class OfRows {
 public:
  __device__ explicit OfRows(uint32_t set) : at_(set + threadIdx.x % 4 * 8) {}
  // The value of the row of sum i.
  __device__ float operator[](int i) const {
    const uint2 two = load_8(at_ + i / 4 * 32);
    return __uint_as_float(i % 2 ? two.y : two.x);
  }

 private:
  const uint32_t at_;
};

// Quantized values are unsigned: 128 more than the integers that they stand for. sums: of the rows' activations.
template <int kValues>
__device__ __forceinline__ void make_signed(int (&d)[kValues], OfRows sums) {
#pragma unroll
  for (int i = 0; i < kValues; i++) d[i] -= 128 * (int)sums[i];
}

// Adds sums d of a group or segment to totals. of_weights: the scales of a thread's two rows of weights.
template <int kValues, typename Sum>
__device__ __forceinline__ void add_scaled(const Sum (&d)[kValues], uint2 of_weights, OfRows of_rows,
                                           float (&totals)[kValues]) {
#pragma unroll
  for (int i = 0; i < kValues; i++) {
    const uint32_t of_weight = i % 4 / 2 ? of_weights.y : of_weights.x;
    if constexpr (std::is_same_v<Sum, float>) add_group(totals[i], __uint_as_float(of_weight), of_rows[i], d[i]);
    else add_segment(totals[i], of_weight, d[i], of_rows[i]);
  }
}
#endif

template <typename S>
__global__ void __launch_bounds__(S::kThreads, 1)
    gemm_experts_8bit_kernel(const __grid_constant__ ExpertGemmArgs e, int columns, int blocks, Segments segments,
                             size_t expert_bytes) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kRows = S::kRows, kGroups = S::kGroups, kStages = S::kStages, kValues = kRows / 2;
  extern __shared__ __align__(1024) char shared[];
  __shared__ uint64_t full[kStages], empty[kStages];
  const GemmArgs& p = e.gemm;
  const Routing& r = e.routing;
  const uint32_t stages = shared_address(shared);
  if (threadIdx.x == 0) {
    // Arrivals at a full stage: one of each copying thread for its rows, one of each thread that copies weights. At an
    // empty one: one of each warp that multiplies.
    for (int i = 0; i < kStages; i++)
      barrier_init(&full[i], S::kCopiers + kGroups), barrier_init(&empty[i], 4 * kGroups);
    barriers_are_there();
  }
  __syncthreads();
  // After such a GEMM the lists are there, and weights are copied before the rows are written.
  if (!e.follows) await_previous();
  let_next_begin();  // only here, so that the next kernel finds the lists that this kernel waited for
  const int items = __ldcg(r.tile_count) * columns, column_blocks = blocks_of(p.w.n), groups = p.w.quants.groups;
  const int group = (int)threadIdx.x / 128 - 1, thread = threadIdx.x % 128,
            stages_of_k = (blocks + S::kDepth - 1) / S::kDepth;
  if (group < 0) {
    if constexpr (S::kTrades) asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    constexpr int kAround = S::kAround, kSetBytes = S::kSetBytes;
    const int chunk = thread % S::kChunks, stride = blocks_of(e.x_rows) * kBlock;
    const char* x = reinterpret_cast<const char*>(p.bytes.values) + (size_t)(chunk / 4) * kByteBlock;
    const char *words = reinterpret_cast<const char*>(p.w.quants.words),
               *scales = reinterpret_cast<const char*>(p.w.quants.scales);
    // Copies the weights of stage number b of an item to a stage.
    const auto ask = [&](const ExpertTile& tile, int item, int b, int stage) {
      const int i = thread / 32, block = item % columns * kGroups + i;
      if (thread % 32 || i >= kGroups) return;
      if (block >= column_blocks) return barrier_expect(&full[stage], 0);
      barrier_expect(&full[stage], S::kWeightBytes + S::kSets * kSetBytes);
      const size_t expert = tile.expert * expert_bytes;
      const char* from = words + expert + ((size_t)block * blocks + b * S::kDepth) * kByteBlock;
      const uint32_t to = stages + stage * S::kStageBytes + i * S::kWeightBytes;
      if (b * S::kDepth + 1 < blocks) {
        copy_bulk(to, from, S::kWeightBytes, &full[stage]);
      } else {  // the second block is multiplied by zeros: it must not have values that are not finite
        copy_bulk(to, from, kByteBlock, &full[stage]);
        copy_bulk(to + kByteBlock, from, kByteBlock, &full[stage]);
      }
#pragma unroll
      for (int j = 0; j < S::kSets; j++) {
        const int set = S::kFloats ? b : segments.group(min(b * S::kDepth + j, blocks - 1));
        copy_bulk(stages + stage * S::kStageBytes + S::kScalesAt + (i * S::kSets + j) * kSetBytes,
                  scales + expert + ((size_t)block * groups + set) * kSetBytes, kSetBytes, &full[stage]);
      }
    };
    struct Places {
      int offsets[S::kCopies];  // of chunks in x; -1: there is no such row
      int own;                  // the row whose values this thread copies
    };
    const auto rows_of = [&](const ExpertTile& tile) {
      const auto row_at = [&](int slot) {  // -1: there is no such row
        if (slot >= tile.count) return -1;
        return e.gathers ? __ldcg(r.row_of + tile.first + slot) : tile.first + slot;
      };
      Places rows;
#pragma unroll
      for (int i = 0; i < S::kCopies; i++) {
        const int row = row_at(thread / S::kChunks + i * kAround);
        rows.offsets[i] = row < 0 ? -1 : row / kBlock * blocks * kByteBlock + byte_chunk(row % kBlock, chunk % 4);
      }
      rows.own = thread < kRows ? row_at(thread) : -1;
      return rows;
    };
    const auto copy = [&](const Places& rows, int b, int stage) {
      const uint32_t to = stages + stage * S::kStageBytes;
      const bool there = b * S::kDepth + chunk / 4 < blocks;
#pragma unroll
      for (int i = 0; i < S::kCopies; i++) {
        const int row = thread / S::kChunks + i * kAround;
        if (kRows % kAround == 0 || row < kRows)
          copy_16(to + S::kRowsAt + chunk / 4 * S::kRowsBytes + byte_chunk(row, chunk % 4),
                  x + (there ? max(rows.offsets[i], 0) + (size_t)b * S::kDepth * kByteBlock : 0),
                  there && rows.offsets[i] >= 0);
      }
      if (thread >= kRows) return;
      const uint32_t values = to + S::kValuesAt + thread * 4;
      const bool last = b == stages_of_k - 1;
      const auto bring = [&](int set, const float* from) {
        copy_4(values + set * kRows * 4, from + max(rows.own, 0), rows.own >= 0);
      };
      if constexpr (S::kScaled) {
        for (int j = 0; j < S::kSets; j++)
          bring(j, p.bytes.sums + (size_t)segments.end(min(b * S::kDepth + j, blocks - 1)) * stride);
      } else if (last && !S::kFloats) {
        bring(0, p.bytes.sums + (size_t)(blocks - 1) * stride);
      }
      if (last && S::kForm != Form::float_groups) bring(S::kOfRows - 1, p.bytes.scales);
    };
    copy_stages<S>(
        full, empty, [&](int i) { return tile_at(r, i); }, items, columns, stages_of_k, e.follows, ask, rows_of, copy);
  } else {
    if constexpr (S::kTrades) asm volatile("setmaxnreg.inc.sync.aligned.u32 152;");
    Pipeline<kStages> ring;
    typename S::Sum d[kValues];
    float totals[kValues];
    // Scales of a thread's two rows of weights are adjacent.
    const int scales_at = thread / 32 * kTileRows + thread % 32 / 4 * 2;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
      const ExpertTile tile = tile_at(r, item / columns);  // read early for the epilogue
      const int block = item % columns * kGroups + group;
      uint2 of_weights = {};
      if (!S::kScaled && block < column_blocks)
        of_weights = *reinterpret_cast<const uint2*>(p.w.quants.scales + tile.expert * (expert_bytes / 4) +
                                                     (size_t)block * kScaleWords + scales_at);
#pragma unroll
      for (int i = 0; i < kValues; i++) totals[i] = 0;
      int last = 0, segment_end = segments.end(0);
      bool adds = false;
      const auto release = [&](int stage) {
        __syncwarp();
        if (thread % 32 == 0) barrier_arrive(&empty[stage]);
      };
      for (int b = 0; b < stages_of_k; b++, ring.next()) {
        barrier_wait(&full[ring.stage], ring.parity);
        const uint32_t stage = stages + ring.stage * S::kStageBytes;
        const auto multiply_block = [&](int j, bool adds) {
#pragma unroll
          for (int i = 0; i < 2; i++)
            multiply<kRows>(d, stage + group * S::kWeightBytes + j * kByteBlock + i * kStepBytes,
                            stage + S::kRowsAt + j * S::kRowsBytes + i * kStepBytes, i > 0 || adds);
        };
        const auto scales_of = [&](int j) {
          return load_8(stage + S::kScalesAt + (group * S::kSets + j) * S::kSetBytes + scales_at * 4);
        };
        const auto rows_of = [&](int set) { return OfRows(stage + S::kValuesAt + set * kRows * 4); };
        if constexpr (S::kForm == Form::float_groups) {
          begin_wgmma();
          multiply_block(0, false), multiply_block(1, true);
          commit_wgmma();
          const uint2 scales = scales_of(0);
          wait_wgmma<0>();
          settle(d);
          add_scaled(d, scales, rows_of(0), totals);
          release(ring.stage);
        } else if constexpr (S::kForm == Form::integer_groups) {
#pragma unroll
          for (int j = 0; j < S::kDepth; j++) {
            const int at = b * S::kDepth + j;
            begin_wgmma();
            multiply_block(j, adds);
            commit_wgmma();
            wait_wgmma<0>();
            settle(d);
            adds = at != segment_end;
            if (adds || at >= blocks) continue;
            segment_end = segments.end(at + 1);
            const OfRows sums = rows_of(j);
            make_signed(d, sums);
            add_scaled(d, scales_of(j), sums, totals);
          }
          if (b + 1 == stages_of_k) {
            const OfRows scales = rows_of(S::kOfRows - 1);
#pragma unroll
            for (int i = 0; i < kValues; i++) totals[i] = __fmul_rn(totals[i], scales[i]);
          }
          release(ring.stage);
        } else {
          begin_wgmma();
          multiply_block(0, b > 0), multiply_block(1, true);
          commit_wgmma();
          wait_wgmma<1>();
          if (b > 0) release(last);
          last = ring.stage;
        }
      }
      if constexpr (!S::kScaled) {
        wait_wgmma<0>();
        settle(d);
        const uint32_t values = stages + last * S::kStageBytes + S::kValuesAt;
        const OfRows scales(values + (S::kOfRows - 1) * kRows * 4), sums(values);
        if constexpr (!S::kFloats) {
          make_signed(d, sums);
          add_scaled(d, of_weights, sums, totals);
        }
#pragma unroll
        for (int i = 0; i < kValues; i++) {
          if constexpr (S::kFloats)
            totals[i] = __fmul_rn(d[i], __uint_as_float(i % 4 / 2 ? of_weights.y : of_weights.x));
          totals[i] = __fmul_rn(totals[i], scales[i]);
        }
        release(last);
      }
      write_sums(e, tile, block, totals);
      __syncwarp();
    }
  }
#endif
}

template <typename S>
void start_shape(const ExpertGemmArgs& p, int entries, const Queue& queue) {
  const Matrix& w = p.gemm.w;
  const int columns = ceil_div(blocks_of(w.n), S::kGroups);
  const int grid = std::min(max_items(p, entries, S::kRows, columns), sm_count());
  start(queue, gemm_experts_8bit_kernel<S>, grid, S::kThreads, S::kShared, p, columns, blocks_of(w.k),
        Segments(w, SplitK(w.k, w.max_split_k)), bytes_of_expert(w));
}

// Few columns of tiles of few entries spread the bytes evenly over SMs. Two more warpgroups need registers of their
// own.
template <Form kForm>
void start_form(const ExpertGemmArgs& p, int entries, int tile_rows, const Queue& queue) {
  if (tile_rows <= 8) start_shape<Shape<kForm, 8, 2>>(p, entries, queue);
  else if (tile_rows <= 16) start_shape<Shape<kForm, 16, 2>>(p, entries, queue);
  else if (tile_rows <= 32) start_shape<Shape<kForm, 32, 4>>(p, entries, queue);
  else if (tile_rows <= 64) start_shape<Shape<kForm, 64, 4>>(p, entries, queue);
  else start_shape<Shape<kForm, 128, 3>>(p, entries, queue);
}

}  // namespace

void gemm_experts_8bit(const ExpertGemmArgs& p, int entries, int tile_rows, const Queue& queue) {
  const Matrix& w = p.gemm.w;
  const bool groups = w.quants.groups > 1;
  if (w.quants.floats)
    groups ? start_form<Form::float_groups>(p, entries, tile_rows, queue)
           : start_form<Form::floats>(p, entries, tile_rows, queue);
  else
    groups ? start_form<Form::integer_groups>(p, entries, tile_rows, queue)
           : start_form<Form::integers>(p, entries, tile_rows, queue);
}

}  // namespace as::cuda
