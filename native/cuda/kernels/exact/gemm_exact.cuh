// The GEMM of the exact recipe, by mma.sync with bytes.
//
// A CTA computes 128 columns of up to 64 entries of an expert; a warp has 32 of the columns, as two operands of 16: of
// gate and up, one of each, so that the activation follows in registers. Weights go from global memory to registers,
// one stage ahead; activations, scales and sums go through shared memory.
//
// The sums of a group of at most 32 columns are formed and added for 8 entries at a time. Longer groups keep both
// planes' sums of all entries, so that a warp has half of the entries only.
#pragma once
#include "cuda/kernels/exact/unpack.cuh"

namespace as::cuda {
namespace exact_gemm {

constexpr int kColumns = 128, kWarpColumns = 32, kRows = kExactTile, kStages = 3;

template <ExactFormat kFormat_, int kStep_, bool kSingle_, bool kOffsets_>
struct Form {
  static constexpr ExactFormat kFormat = kFormat_;
  static constexpr int kStep = kStep_, kPlanes = exact_planes(kFormat);
  static constexpr bool kSingle = kSingle_, kOffsets = kOffsets_;  // kSingle: a group is one step
  static constexpr int kSteps = kExactStageK / kStep;              // of a stage
  static constexpr int kRowWarps = kSingle ? 1 : 2, kThreads = kRowWarps * kColumns / kWarpColumns * 32;
  static constexpr int kTiles = kRows / 8 / kRowWarps;  // of 8 entries, of a warp
  // Whether sums are always small enough for GroupSums::value().
  static constexpr bool kSmallSums = kSingle || kFormat == ExactFormat::e2m1 || kFormat == ExactFormat::int4;
  using Weights = Lanes<kFormat, kStep>;
};

template <typename F>
struct Shared {
  alignas(16) int8_t values[kStages][F::kSteps][F::kPlanes][kRows][F::kStep];
  float sums[F::kOffsets ? kStages : 1][F::kSteps][kRows];
  // Of groups that end in a step: two stages, written one ahead.
  float scales[2][F::kSteps][kColumns], offsets[F::kOffsets ? 2 : 1][F::kSteps][kColumns];
  float row_scales[kRows];
  int rows[kRows];
};

// The steps of a row of weights in order.
struct Cursor {
  uint32_t group_at;  // of the group's head, from the panel's first group on
  uint32_t at;        // of the step's weights
  int left;           // columns of the group from the step on
  int k;              // columns of the row from the group on

  __device__ explicit Cursor(const ExactMatrix& w) : group_at(0), at(w.head_bytes), left(min(w.group, w.k)), k(w.k) {}
  template <typename F>
  __device__ bool ends() const {
    return F::kSingle || left <= F::kStep;
  }
  template <typename F>
  __device__ void next(const ExactMatrix& w) {
    if (!ends<F>()) {
      left -= F::kStep, at += F::Weights::step_bytes(w.panel);
      return;
    }
    k -= w.group, group_at += w.group_bytes, at = group_at + w.head_bytes, left = min(w.group, k);
  }
};

// The column of the matrix that column `slot` of a CTA with kOwn columns is, or -1.
template <int kOwn = kColumns>
__device__ inline int column_of(const ExactGemm& p, int slot) {
  const int half = p.w.n / 2;
  if (p.gate == ExactGate::none) {
    const int column = blockIdx.x * kOwn + slot;
    return column < p.w.n ? column : -1;
  }
  const int column = blockIdx.x * (kOwn / 2) + slot / kWarpColumns * 16 + slot % 16;
  return column >= half ? -1 : slot % kWarpColumns < 16 ? column : half + column;
}

// A thread's part of the groups' scales: one column of the CTA.
template <typename F>
struct ScaleReader {
  const char* panel = nullptr;
  int lane = 0;
  Cursor cursor;
  StoredScale stored[F::kSteps] = {};
  uint32_t heads[F::kSteps] = {};

  __device__ ScaleReader(const ExactGemm& p, const char* matrix) : cursor(p.w) {
    const int column = max(0, column_of(p, threadIdx.x % kColumns));
    panel = matrix + (size_t)(column / p.w.panel) * p.w.panel_bytes, lane = column % p.w.panel;
  }
  // Reads those of the groups that end in the next stage, whose first step is `step` of `steps`.
  __device__ void read(const ExactMatrix& w, int step, int steps) {
#pragma unroll
    for (int i = 0; i < F::kSteps; i++, step++) {
      if (step >= steps) return;
      heads[i] = cursor.group_at;
      if (cursor.ends<F>()) stored[i] = load_scale(w, panel + w.first_group + heads[i], lane);
      cursor.next<F>(w);
    }
  }
  __device__ void write(const ExactMatrix& w, Shared<F>& shared, int buffer) const {
    if (F::kRowWarps > 1 && threadIdx.x >= kColumns) return;
#pragma unroll
    for (int i = 0; i < F::kSteps; i++) {
      const GroupScale found = exact_group_scale(w, stored[i], super_scales(w, panel, heads[i] / w.group_bytes), lane);
      shared.scales[buffer][i][threadIdx.x] = found.scale;
      if (F::kOffsets) shared.offsets[buffer][i][threadIdx.x] = found.offset;
    }
  }
};

// Copies a stage of the entries' activations, and of the sums of groups that end in it.
template <typename F>
__device__ void copy_stage(const ExactGemm& p, Shared<F>& shared, int stage, int count, int whole_steps,
                           int steps_of_group) {
  constexpr int kBytes = F::kSteps * F::kPlanes * F::kStep, kChunks = kBytes / 16;
  const int buffer = stage % kStages;
  for (int i = threadIdx.x; i < count * kChunks; i += F::kThreads) {
    const int row = i / kChunks, at = i % kChunks * 16, step = at / (F::kPlanes * F::kStep),
              plane = at / F::kStep % F::kPlanes;
    const int8_t* from =
        p.x.values + ((size_t)shared.rows[row] * whole_steps + stage * F::kSteps) * (F::kPlanes * F::kStep) + at;
    copy_16_to(&shared.values[buffer][step][plane][row][at % F::kStep], from);
  }
  if (F::kOffsets)
    for (int i = threadIdx.x; i < kRows * F::kSteps; i += F::kThreads) {
      const int row = i % kRows, step = i / kRows, group = (stage * F::kSteps + step) / steps_of_group;
      if (row < count && group < p.w.groups)
        copy_4_to(&shared.sums[buffer][step][row], p.x.sums + (size_t)shared.rows[row] * p.w.groups + group);
    }
}

// Computes the tile; each warp has kTiles tiles of eight entries.
template <typename F, int kTiles>
__device__ __forceinline__ void multiply(const ExactGemm& p, const ExpertTile& tile, Shared<F>& shared) {
  using Weights = typename F::Weights;
  constexpr int kOperands = kWarpColumns / 16, kRegisters = Weights::kRegisters;
  const ExactMatrix& w = p.w;
  const char* const matrix = p.experts[tile.expert];
  const int warp = threadIdx.x / 32 % (kColumns / kWarpColumns), lane = threadIdx.x % 32, r = lane / 4, t = lane % 4;
  const int first_row = threadIdx.x / kColumns * kTiles * 8;
  const int steps = w.steps(), whole_steps = w.whole_steps(), steps_of_group = w.steps_of_group(),
            stages = whole_steps / F::kSteps;

  uint32_t rows_at[kOperands][2];  // of the thread's columns, and its lane of a step
#pragma unroll
  for (int m = 0; m < kOperands; m++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int column = max(0, column_of(p, warp * kWarpColumns + m * 16 + h * 8 + r));
      rows_at[m][h] =
          column / w.panel * w.panel_bytes + w.first_group + column % w.panel * 4 + Weights::offset(t, w.panel);
    }
  Cursor ahead(w);
  Weights weights[F::kSteps][kOperands][2];
  const auto load = [&](Weights(&to)[kOperands][2]) {
#pragma unroll
    for (int m = 0; m < kOperands; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) to[m][h].load(matrix + rows_at[m][h] + ahead.at, w.panel, t, ahead.left);
    ahead.next<F>(w);
  };
  ScaleReader<F> scales(p, matrix);

  float total[kOperands][kTiles][4] = {};
  int sums[F::kSingle ? 1 : F::kPlanes][kOperands][kTiles][4];
  const GroupSums<F::kFormat> group_sums;
  const auto start_of = [&](int plane, int i) { return F::kSmallSums ? group_sums.starts[plane][i] : 0; };
  if constexpr (!F::kSingle) {
#pragma unroll
    for (int i = 0; i < F::kPlanes * kOperands * kTiles * 4; i++)
      (&sums[0][0][0][0])[i] = start_of(i / (kOperands * kTiles * 4), i % 4);
  }
  int left = min(w.group, w.k), k = w.k;  // as in Cursor

  scales.read(w, 0, steps);
#pragma unroll
  for (int i = 0; i < F::kSteps; i++)
    if (i < steps) load(weights[i]);
#pragma unroll
  for (int i = 0; i < kStages - 1; i++) {
    if (i < stages) copy_stage<F>(p, shared, i, tile.count, whole_steps, steps_of_group);
    commit_copies();
  }
  scales.write(w, shared, 0);

  for (int stage = 0, step = 0; stage < stages; stage++) {
    wait_copies<kStages - 2>();
    __syncthreads();
    if (stage + kStages - 1 < stages)
      copy_stage<F>(p, shared, stage + kStages - 1, tile.count, whole_steps, steps_of_group);
    commit_copies();
    scales.read(w, (stage + 1) * F::kSteps, steps);
    const int buffer = stage % kStages, scale_buffer = stage % 2;
#pragma unroll
    for (int s = 0; s < F::kSteps; s++, step++) {
      if (step >= steps) break;
      uint32_t a[kOperands][2 * kRegisters];
#pragma unroll
      for (int m = 0; m < kOperands; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          uint32_t own[kRegisters];
          weights[s][m][h].unpack(t, own);
#pragma unroll
          for (int i = 0; i < kRegisters; i++) a[m][2 * i + h] = own[i];
        }
      if (step + F::kSteps < steps) load(weights[s]);
      const bool ends = F::kSingle || left <= F::kStep;
      float scale[kOperands][2], offset[kOperands][2];
      if (ends) {
#pragma unroll
        for (int m = 0; m < kOperands; m++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const int slot = warp * kWarpColumns + m * 16 + h * 8 + r;
            scale[m][h] = shared.scales[scale_buffer][s][slot];
            if (F::kOffsets) offset[m][h] = shared.offsets[scale_buffer][s][slot];
          }
      }
#pragma unroll
      for (int n = 0; n < kTiles; n++) {
        uint32_t b[F::kPlanes][kRegisters];
#pragma unroll
        for (int plane = 0; plane < F::kPlanes; plane++) {
          const uint32_t* from = reinterpret_cast<const uint32_t*>(
              &shared.values[buffer][s][plane][first_row + n * 8 + r][t * 4 * kRegisters]);
          if constexpr (kRegisters == 2) {
            const uint2 both = *reinterpret_cast<const uint2*>(from);
            b[plane][0] = both.x, b[plane][1] = both.y;
          } else {
            b[plane][0] = *from;
          }
        }
        float2 of_rows;
        if (F::kOffsets && ends)
          of_rows = *reinterpret_cast<const float2*>(&shared.sums[buffer][s][first_row + n * 8 + 2 * t]);
#pragma unroll
        for (int m = 0; m < kOperands; m++) {
          float value[4];
          if constexpr (F::kSingle) {
            int own[F::kPlanes][4];
#pragma unroll
            for (int plane = 0; plane < F::kPlanes; plane++)
              multiply_bytes(own[plane], a[m], b[plane], group_sums.starts[plane]);
#pragma unroll
            for (int i = 0; i < 4; i++) value[i] = group_sums.value(own[0][i], own[F::kPlanes - 1][i]);
          } else {
#pragma unroll
            for (int plane = 0; plane < F::kPlanes; plane++)
              multiply_bytes(sums[plane][m][n], a[m], b[plane], sums[plane][m][n]);
            if (!ends) continue;
#pragma unroll
            for (int i = 0; i < 4; i++) {
              int &high = sums[0][m][n][i], &low = sums[F::kPlanes - 1][m][n][i];
              value[i] = F::kSmallSums ? group_sums.value(high, low) : group_sums.converted(high, low);
              high = start_of(0, i), low = start_of(F::kPlanes - 1, i);
            }
          }
#pragma unroll
          for (int i = 0; i < 4; i++) {
            float& sum = total[m][n][i];
            sum = __fmaf_rn(scale[m][i / 2], value[i], sum);
            if (F::kOffsets) sum = __fmaf_rn(offset[m][i / 2], i % 2 ? of_rows.y : of_rows.x, sum);
          }
        }
      }
      if (!F::kSingle) {
        if (ends) k -= w.group, left = min(w.group, k);
        else left -= F::kStep;
      }
    }
    if (stage + 1 < stages) scales.write(w, shared, scale_buffer ^ 1);
  }

  const int width = p.gate == ExactGate::none ? w.n : w.n / 2;
  const float* bias = p.bias ? p.bias + (size_t)tile.expert * w.n : nullptr;
#pragma unroll
  for (int n = 0; n < kTiles; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = first_row + n * 8 + 2 * t + i % 2;
      if (row >= tile.count) continue;
      float* const y = p.y + (size_t)(tile.first + row) * width;
      float found[kOperands];
#pragma unroll
      for (int m = 0; m < kOperands; m++) {
        const int column = column_of(p, warp * kWarpColumns + m * 16 + i / 2 * 8 + r);
        found[m] = __fmul_rn(total[m][n][i], shared.row_scales[row]);
        if (column < 0) continue;
        if (bias) found[m] = __fadd_rn(found[m], bias[column]);
        if (p.gate == ExactGate::none) y[column] = found[m];
        else if (m == 1) y[column - width] = exact_gated(p.gate, p.alpha, p.limit, found[0], found[1]);
      }
    }
}

template <typename F>
__global__ void __launch_bounds__(F::kThreads, F::kSingle ? 3 : 1) kernel(const __grid_constant__ ExactGemm p) {
  __shared__ Shared<F> shared;
  after_previous();
  if ((int)blockIdx.y >= __ldcg(p.routing.tile_count)) return;
  const int4 found = __ldcg(reinterpret_cast<const int4*>(p.routing.tiles + blockIdx.y));
  const ExpertTile tile{found.x, found.y, found.z};
  if (!p.experts[tile.expert]) return;
  for (int i = threadIdx.x; i < tile.count; i += F::kThreads) {
    const int entry = tile.first + i, row = p.gathers ? __ldcg(p.routing.row_of + entry) : entry;
    shared.rows[i] = row, shared.row_scales[i] = p.x.scales[row];
  }
  __syncthreads();
  // All warps of a CTA take the same branch, since they wait for each other.
  const int tiles = (tile.count + 8 * F::kRowWarps - 1) / (8 * F::kRowWarps);
  if (tiles <= F::kTiles / 4) multiply<F, F::kTiles / 4>(p, tile, shared);
  else if (tiles <= F::kTiles / 2) multiply<F, F::kTiles / 2>(p, tile, shared);
  else multiply<F, F::kTiles>(p, tile, shared);
}

}  // namespace exact_gemm
}  // namespace as::cuda
