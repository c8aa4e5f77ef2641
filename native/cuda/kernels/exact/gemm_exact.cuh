// The GEMM of the exact recipe, by mma.sync with bytes.
//
// A CTA computes 128 columns of up to 64 entries of an expert; a warp has 32 of the columns, as two operands of 16: of
// gate and up, one of each, so that the activation follows in registers. Weights go from global memory to registers,
// one stage ahead; activations, scales and sums go through shared memory.
//
// The sums of a group of at most 64 columns are formed and added for 8 entries at a time. Longer groups keep both
// planes' sums of all entries, so that a warp has half of the entries only.
#pragma once
#include "cuda/kernels/exact/unpack.cuh"

namespace as::cuda {
namespace exact_gemm {

constexpr int kColumns = 128, kWarpColumns = 32, kRows = kExactTile, kStages = 3;

// kGroup: steps of a group: 1, 2, or 0 for any number.
template <ExactFormat kFormat_, int kStep_, int kGroup, bool kOffsets_>
struct Form {
  static constexpr ExactFormat kFormat = kFormat_;
  static constexpr int kStep = kStep_, kPlanes = exact_planes(kFormat);
  static constexpr bool kSingle = kGroup == 1, kShort = kGroup > 0, kOffsets = kOffsets_;
  static constexpr int kJoined = kGroup == 2 ? 2 : 1;  // steps that are multiplied together
  static constexpr int kSteps = kExactStageK / kStep;  // of a stage
  static constexpr int kRowWarps = kShort ? 1 : 2, kThreads = kRowWarps * kColumns / kWarpColumns * 32;
  static constexpr int kTiles = kRows / 8 / kRowWarps;  // of 8 entries, of a warp
  // Whether sums are always small enough for GroupSums::value().
  static constexpr bool kSmallSums = kShort || kFormat == ExactFormat::e2m1 || kFormat == ExactFormat::int4;
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

// Where an expert's panels are; null: it is not computed.
__device__ inline const char* panels_of(const ExactGemm& p, int expert) {
  if (expert < p.first || expert >= p.end) return nullptr;
  const char* const own = p.experts ? p.experts[expert] : nullptr;
  return own || !p.adjacent ? own : p.adjacent + (size_t)(expert - p.first) * p.w.bytes;
}

// A thread's part of the groups' scales: one column of the CTA.
template <typename F>
struct ScaleReader {
  const char* panel = nullptr;
  int lane = 0;
  int group = 0, in_group = 0;  // of the next step
  StoredScale stored[F::kSteps] = {};
  int groups[F::kSteps] = {};

  __device__ ScaleReader(const ExactGemm& p, const char* matrix) {
    const int column = max(0, column_of(p, threadIdx.x % kColumns));
    panel = matrix + (size_t)(column / p.w.panel) * p.w.panel_bytes, lane = column % p.w.panel;
  }
  // Reads those of the groups that end in the next stage, whose first step is `step` of `steps`.
  __device__ void read(const ExactMatrix& w, int step, int steps, int steps_of_group) {
#pragma unroll
    for (int i = 0; i < F::kSteps; i++, step++) {
      if (step >= steps) return;
      groups[i] = F::kSingle ? step : group;
      const bool ends = F::kSingle || step + 1 == steps || ++in_group == steps_of_group;
      if (ends) {
        stored[i] = load_scale<F::kOffsets>(w, panel + w.first_group + groups[i] * w.group_bytes, lane);
        group++, in_group = 0;
      }
    }
  }
  __device__ void write(const ExactMatrix& w, Shared<F>& shared, int buffer) const {
    if (F::kRowWarps > 1 && threadIdx.x >= kColumns) return;
#pragma unroll
    for (int i = 0; i < F::kSteps; i++) {
      const GroupScale found = exact_group_scale<F::kOffsets>(w, stored[i], panel, groups[i], lane);
      shared.scales[buffer][i][threadIdx.x] = found.scale;
      if (F::kOffsets) shared.offsets[buffer][i][threadIdx.x] = found.offset;
    }
  }
};

// Copies stages of the entries' activations, and of the sums of groups that end in them.
template <typename F>
struct RowCopies {
  static constexpr int kBytes = F::kSteps * F::kPlanes * F::kStep, kChunks = kBytes / 16,  // of a row and stage
      kApart = F::kThreads / kChunks, kEach = kRows / kApart;                              // rows of a thread
  uint32_t from[kEach];                                                                    // in 16 bytes
  int count;  // of these rows that there are

  __device__ RowCopies(const Shared<F>& shared, int rows, int whole_steps) {
    const int first = threadIdx.x / kChunks;
    count = rows > first ? (rows - first - 1) / kApart + 1 : 0;
#pragma unroll
    for (int i = 0; i < kEach; i++)
      from[i] = i < count ? shared.rows[first + i * kApart] * (whole_steps * (F::kPlanes * F::kStep / 16)) +
                                threadIdx.x % kChunks
                          : 0;
  }
  __device__ void copy(const ExactGemm& p, Shared<F>& shared, int stage, int steps_of_group, int rows) const {
    const int buffer = stage % kStages, at = threadIdx.x % kChunks * 16, step = at / (F::kPlanes * F::kStep),
              plane = at / F::kStep % F::kPlanes;
    int8_t* const to = &shared.values[buffer][step][plane][threadIdx.x / kChunks][at % F::kStep];
#pragma unroll
    for (int i = 0; i < kEach; i++)
      if (i < count) copy_16_to(to + i * kApart * F::kStep, p.x.values + (size_t)(from[i] + stage * kChunks) * 16);
    if (F::kOffsets)
      for (int i = threadIdx.x; i < kRows * F::kSteps; i += F::kThreads) {
        const int row = i % kRows, number = i / kRows, step = stage * F::kSteps + number,
                  group = F::kSingle ? step : step / steps_of_group;
        if (row < rows && group < p.w.groups)
          copy_4_to(&shared.sums[buffer][number][row], p.x.sums + (size_t)shared.rows[row] * p.w.groups + group);
      }
  }
};

// Computes the tile; each warp has kTiles tiles of eight entries.
template <typename F, int kTiles>
__device__ __forceinline__ void multiply(const ExactGemm& p, const ExpertTile& tile, Shared<F>& shared) {
  using Weights = typename F::Weights;
  constexpr int kOperands = kWarpColumns / 16, kRegisters = Weights::kRegisters;
  const ExactMatrix& w = p.w;
  const char* const matrix = panels_of(p, tile.expert);
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
      rows_at[m][h] = column / w.panel * w.panel_bytes + w.first_group + column % w.panel * 4;
    }
  Cursor ahead(w);
  Weights weights[F::kSteps][kOperands][2];
  const auto load = [&](Weights(&to)[kOperands][2]) {
    uint32_t places[Weights::kWords];
    Weights::places(t, w.panel, ahead.left, places);
#pragma unroll
    for (int m = 0; m < kOperands; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) to[m][h].load(matrix + rows_at[m][h] + ahead.at, places);
    ahead.next<F>(w);
  };
  ScaleReader<F> scales(p, matrix);

  float total[kOperands][kTiles][4] = {};
  int sums[F::kShort ? 1 : F::kPlanes][kOperands][kTiles][4];
  const GroupSums<F::kFormat> group_sums;
  const auto start_of = [&](int plane, int i) { return F::kSmallSums ? group_sums.starts[plane][i] : 0; };
  if constexpr (!F::kShort) {
#pragma unroll
    for (int i = 0; i < F::kPlanes * kOperands * kTiles * 4; i++)
      (&sums[0][0][0][0])[i] = start_of(i / (kOperands * kTiles * 4), i % 4);
  }
  int left = min(w.group, w.k), k = w.k;  // as in Cursor

  const RowCopies<F> copies(shared, tile.count, whole_steps);
  scales.read(w, 0, steps, steps_of_group);
#pragma unroll
  for (int i = 0; i < F::kSteps; i++)
    if (i < steps) load(weights[i]);
#pragma unroll
  for (int i = 0; i < kStages - 1; i++) {
    if (i < stages) copies.copy(p, shared, i, steps_of_group, tile.count);
    commit_copies();
  }
  scales.write(w, shared, 0);

  for (int stage = 0, step = 0; stage < stages; stage++) {
    wait_copies<kStages - 2>();
    __syncthreads();
    if (stage + kStages - 1 < stages) copies.copy(p, shared, stage + kStages - 1, steps_of_group, tile.count);
    commit_copies();
    scales.read(w, (stage + 1) * F::kSteps, steps, steps_of_group);
    const int buffer = stage % kStages, scale_buffer = stage % 2;
#pragma unroll
    for (int s = 0; s < F::kSteps; s += F::kJoined, step += F::kJoined) {
      if (step >= steps) break;
      uint32_t a[F::kJoined][kOperands][2 * kRegisters];
#pragma unroll
      for (int j = 0; j < F::kJoined; j++) {  // those behind the row are multiplied by zeros
#pragma unroll
        for (int m = 0; m < kOperands; m++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            uint32_t own[kRegisters];
            weights[s + j][m][h].unpack(t, own);
#pragma unroll
            for (int i = 0; i < kRegisters; i++) a[j][m][2 * i + h] = own[i];
          }
        if (step + j + F::kSteps < steps) load(weights[s + j]);
      }
      const bool ends = F::kShort || left <= F::kStep;
      const int last = F::kJoined == 2 && step + 1 < steps ? s + 1 : s;  // the group's last step
      float scale[kOperands][2], offset[kOperands][2];
      if (ends) {
#pragma unroll
        for (int m = 0; m < kOperands; m++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const int slot = warp * kWarpColumns + m * 16 + h * 8 + r;
            scale[m][h] = shared.scales[scale_buffer][last][slot];
            if (F::kOffsets) offset[m][h] = shared.offsets[scale_buffer][last][slot];
          }
      }
#pragma unroll
      for (int n = 0; n < kTiles; n++) {
        uint32_t b[F::kJoined][F::kPlanes][kRegisters];
#pragma unroll
        for (int j = 0; j < F::kJoined; j++)
#pragma unroll
          for (int plane = 0; plane < F::kPlanes; plane++) {
            const uint32_t* from = reinterpret_cast<const uint32_t*>(
                &shared.values[buffer][s + j][plane][first_row + n * 8 + r][t * 4 * kRegisters]);
            if constexpr (kRegisters == 2) {
              const uint2 both = *reinterpret_cast<const uint2*>(from);
              b[j][plane][0] = both.x, b[j][plane][1] = both.y;
            } else {
              b[j][plane][0] = *from;
            }
          }
        float2 of_rows;
        if (F::kOffsets && ends)
          of_rows = *reinterpret_cast<const float2*>(&shared.sums[buffer][last][first_row + n * 8 + 2 * t]);
#pragma unroll
        for (int m = 0; m < kOperands; m++) {
          float value[4];
          if constexpr (F::kShort) {
            int own[F::kPlanes][4];
#pragma unroll
            for (int plane = 0; plane < F::kPlanes; plane++) {
              multiply_bytes(own[plane], a[0][m], b[0][plane], group_sums.starts[plane]);
              if constexpr (F::kJoined == 2) multiply_bytes(own[plane], a[1][m], b[1][plane], own[plane]);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) value[i] = group_sums.value(own[0][i], own[F::kPlanes - 1][i]);
          } else {
#pragma unroll
            for (int plane = 0; plane < F::kPlanes; plane++)
              multiply_bytes(sums[plane][m][n], a[0][m], b[0][plane], sums[plane][m][n]);
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
      if (!F::kShort) {
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
__global__ void __launch_bounds__(F::kThreads, F::kShort ? 3 : 1) kernel(const __grid_constant__ ExactGemm p) {
  __shared__ Shared<F> shared;
  after_previous();
  if ((int)blockIdx.y >= __ldcg(p.routing.tile_count)) return;
  const int4 found = __ldcg(reinterpret_cast<const int4*>(p.routing.tiles + blockIdx.y));
  const ExpertTile tile{found.x, found.y, found.z};
  if (!panels_of(p, tile.expert)) return;
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
