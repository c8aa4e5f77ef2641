// The GEMM of the exact recipe for few rows, which is as fast as weights can be read.
//
// A CTA computes 32 columns of an expert. Totals are one chain over the groups of a row, but the groups' sums are not:
// warps form the sums of different groups at once and leave them in shared memory; then each thread adds those of one
// column and row in order. Entries are taken eight at a time, the columns of a product. Up to four of 16-bit
// activations are taken as pairs instead: an entry's two planes are adjacent columns of one product, and a thread has
// both sums.
#pragma once
#include "cuda/kernels/exact/gemm_exact.cuh"

namespace as::cuda {
namespace exact_gemm {

constexpr int kFewColumns = kWarpColumns, kFewWarps = 8, kFewSteps = 4;

template <typename F, bool kPairs>
struct FewShared {
  static constexpr int kRows = kPairs ? kExactPairs : 8;
  static constexpr int kPitch = kPairs ? 40 : 36;  // words from a row's sums to the next: threads write to all banks
  // Of a round: kSingle: values of each step's group; otherwise both planes' sums of each warp's steps.
  static constexpr int kGroups = F::kSingle ? kFewWarps * kFewSteps : kFewWarps, kPlanes = F::kSingle ? 1 : F::kPlanes;
  int sums[kGroups][kPlanes][kRows * kPitch];
  float scales[kGroups][kFewColumns], offsets[F::kOffsets ? kGroups : 1][kFewColumns];
  float of_rows[F::kOffsets ? kGroups : 1][kRows];
};

// Up to kFewSteps adjacent steps of a group, or of as many groups, of a thread's columns and row.
template <typename F, bool kPairs>
struct FewSteps {
  using Weights = typename F::Weights;
  static constexpr int kRegisters = Weights::kRegisters, kOperands = kPairs ? 1 : F::kPlanes;
  Weights weights[kFewSteps][2][2];
  uint32_t values[kFewSteps][kOperands][kRegisters];

  // x: of the thread's row and, of pairs, its plane.
  __device__ void load(const ExactMatrix& w, const char* matrix, const uint32_t (&rows_at)[2][2], const int8_t* x,
                       int t, int first, int count, int steps, int steps_of_group) {
    const int first_group = F::kSingle ? first : first / steps_of_group;
#pragma unroll
    for (int s = 0; s < kFewSteps; s++) {
      const int step = first + s;
      if (s >= count || step >= steps) return;
      const int group = F::kSingle ? step : first_group,
                in_group = F::kSingle ? 0 : step - first_group * steps_of_group,
                left = min(w.group, w.k - group * w.group) - in_group * F::kStep;
      const uint32_t at = group * w.group_bytes + w.head_bytes + in_group * Weights::step_bytes(w.panel);
      uint32_t places[Weights::kWords];
      Weights::places(t, w.panel, left, places);
#pragma unroll
      for (int m = 0; m < 2; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) weights[s][m][h].load(matrix + rows_at[m][h] + at, places);
#pragma unroll
      for (int plane = 0; plane < kOperands; plane++) {
        const uint32_t* from =
            reinterpret_cast<const uint32_t*>(x + ((size_t)step * F::kPlanes + plane) * F::kStep + t * 4 * kRegisters);
        if constexpr (kRegisters == 2) {
          const uint2 both = __ldg(reinterpret_cast<const uint2*>(from));
          values[s][plane][0] = both.x, values[s][plane][1] = both.y;
        } else {
          values[s][plane][0] = __ldg(from);
        }
      }
    }
  }
  __device__ void operand(int s, int m, int t, uint32_t (&a)[2 * kRegisters]) const {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      uint32_t own[kRegisters];
      weights[s][m][h].unpack(t, own);
#pragma unroll
      for (int i = 0; i < kRegisters; i++) a[2 * i + h] = own[i];
    }
  }
};

template <typename F, bool kPairs>
__global__ void __launch_bounds__(kFewWarps * 32, kPairs ? 3 : 2) few_kernel(const __grid_constant__ ExactGemm p) {
  using Weights = typename F::Weights;
  using S = FewShared<F, kPairs>;
  static_assert(!kPairs || F::kPlanes == 2);
  constexpr int kOperands = FewSteps<F, kPairs>::kOperands;
  __shared__ S shared;
  after_previous();
  const int tiles = __ldcg(p.routing.tile_count);
  const int4 found = __ldcg(reinterpret_cast<const int4*>(p.routing.tiles + blockIdx.y));
  if ((int)blockIdx.y >= tiles) return;
  const ExpertTile tile{found.x, found.y, found.z};
  const char* const matrix = panels_of(p, tile.expert);
  if (!matrix) return;
  const ExactMatrix& w = p.w;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, r = lane / 4, t = lane % 4;
  const int steps = w.steps(), whole_steps = w.whole_steps(), steps_of_group = w.steps_of_group();
  // Steps of a warp in a round: never of two groups, but where each step is a group.
  const int own_steps = F::kSingle || steps_of_group % 4 == 0 ? 4
                        : steps_of_group % 2 == 0             ? 2
                                                              : 1,
            round_steps = own_steps * kFewWarps;
  const auto group_of = [&](int step) { return F::kSingle ? step : step / steps_of_group; };

  uint32_t rows_at[2][2];
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int column = max(0, column_of<kFewColumns>(p, m * 16 + h * 8 + r));
      rows_at[m][h] = column / w.panel * w.panel_bytes + w.first_group + column % w.panel * 4;
    }
  const int column = column_of<kFewColumns>(p, lane), column_lane = max(0, column) % w.panel;
  const char* const panel = matrix + (size_t)(max(0, column) / w.panel) * w.panel_bytes;
  const int width = p.gate == ExactGate::none ? w.n : w.n / 2;
  const GroupSums<F::kFormat> group_sums;
  // The plane of an operand's i-th sum of a thread, and where this sum starts.
  const auto plane_of = [](int operand, int i) { return kPairs ? i % 2 : operand; };
  const auto start_of = [&](int operand, int i) {
    return F::kSmallSums ? group_sums.starts[plane_of(operand, i)][i] : 0;
  };
  const auto row_of = [&](int entry) {
    entry = min(entry, tile.count - 1) + tile.first;
    return p.gathers ? __ldcg(p.routing.row_of + entry) : entry;
  };

  for (int first_row = 0; first_row < tile.count; first_row += S::kRows) {
    const int8_t* const x = p.x.values +
                            (size_t)row_of(first_row + (kPairs ? r / 2 : r)) * whole_steps * (F::kPlanes * F::kStep) +
                            (kPairs ? r % 2 * F::kStep : 0);
    const bool has_row = warp < S::kRows && first_row + warp < tile.count;
    const float own_scale = p.x.scales[row_of(first_row + warp)];  // of the thread's total
    float total = 0;
    int high = 0, low = 0;  // of a group, over several rounds
    FewSteps<F, kPairs> now;
    now.load(w, matrix, rows_at, x, t, warp * own_steps, own_steps, steps, steps_of_group);
    for (int base = 0; base < steps; base += round_steps) {
      // Scales: thread (warp, lane) has those of groups `warp`, `warp` + 8, ... of the round.
      constexpr int kEach = S::kGroups / kFewWarps;
      StoredScale stored[kEach] = {};
      float of_row[kEach] = {};
#pragma unroll
      for (int i = 0; i < kEach; i++) {
        const int number = i * kFewWarps + warp, step = base + number * (F::kSingle ? 1 : own_steps);
        if (step >= steps) break;
        stored[i] = load_scale<F::kOffsets>(w, panel + w.first_group + group_of(step) * w.group_bytes, column_lane);
        if (F::kOffsets && lane < S::kRows)
          of_row[i] = p.x.sums[(size_t)row_of(first_row + lane) * w.groups + group_of(step)];
      }
      int kept_sums[F::kSingle ? 1 : kOperands][2][4];
      if constexpr (!F::kSingle) {
#pragma unroll
        for (int i = 0; i < kOperands * 8; i++) (&kept_sums[0][0][0])[i] = start_of(i / 8, i % 4);
      }
#pragma unroll
      for (int s = 0; s < kFewSteps; s++) {
        if (s >= own_steps || base + warp * own_steps + s >= steps) break;
#pragma unroll
        for (int m = 0; m < 2; m++) {
          uint32_t a[2 * Weights::kRegisters];
          now.operand(s, m, t, a);
          if constexpr (F::kSingle && kPairs) {
            int own[4] = {start_of(0, 0), start_of(0, 1), start_of(0, 2), start_of(0, 3)};
            multiply_bytes(own, a, now.values[s][0], own);
#pragma unroll
            for (int half = 0; half < 2; half++)
              shared.sums[warp * kFewSteps + s][0][t * S::kPitch + m * 16 + half * 8 + r] =
                  (int)__float_as_uint(group_sums.value(own[2 * half], own[2 * half + 1]));
          } else if constexpr (F::kSingle) {
            int own[F::kPlanes][4];
#pragma unroll
            for (int plane = 0; plane < F::kPlanes; plane++)
              multiply_bytes(own[plane], a, now.values[s][plane], group_sums.starts[plane]);
#pragma unroll
            for (int i = 0; i < 4; i++)
              shared.sums[warp * kFewSteps + s][0][(2 * t + i % 2) * S::kPitch + m * 16 + i / 2 * 8 + r] =
                  (int)__float_as_uint(group_sums.value(own[0][i], own[F::kPlanes - 1][i]));
          } else {
#pragma unroll
            for (int i = 0; i < kOperands; i++) multiply_bytes(kept_sums[i][m], a, now.values[s][i], kept_sums[i][m]);
          }
        }
      }
      if constexpr (!F::kSingle) {
#pragma unroll
        for (int operand = 0; operand < kOperands; operand++)
#pragma unroll
          for (int m = 0; m < 2; m++)
#pragma unroll
            for (int i = 0; i < 4; i++)
              shared
                  .sums[warp][plane_of(operand, i)][(kPairs ? t : 2 * t + i % 2) * S::kPitch + m * 16 + i / 2 * 8 + r] =
                  kept_sums[operand][m][i] - start_of(operand, i);
      }
      now.load(w, matrix, rows_at, x, t, base + round_steps + warp * own_steps, own_steps, steps, steps_of_group);
#pragma unroll
      for (int i = 0; i < kEach; i++) {
        const int number = i * kFewWarps + warp, step = base + number * (F::kSingle ? 1 : own_steps);
        if (step >= steps) break;
        const GroupScale scale = exact_group_scale<F::kOffsets>(w, stored[i], panel, group_of(step), column_lane);
        shared.scales[number][lane] = scale.scale;
        if (F::kOffsets) shared.offsets[number][lane] = scale.offset;
        if (F::kOffsets && lane < S::kRows) shared.of_rows[number][lane] = of_row[i];
      }
      __syncthreads();
      const int groups = !has_row ? 0
                                  : min(S::kGroups, (steps - base + (F::kSingle ? 1 : own_steps) - 1) /
                                                        (F::kSingle ? 1 : own_steps)),
                at = warp * S::kPitch + lane;
#pragma unroll 4
      for (int i = 0; i < groups; i++) {
        float value;
        if constexpr (F::kSingle) {
          value = __uint_as_float((uint32_t)shared.sums[i][0][at]);
        } else {
          high += shared.sums[i][0][at], low += shared.sums[i][S::kPlanes - 1][at];
          const int next = base + (i + 1) * own_steps;
          if (next % steps_of_group && next < steps) continue;
          value = group_sums.converted(high, low), high = low = 0;
        }
        total = __fmaf_rn(shared.scales[i][lane], value, total);
        if (F::kOffsets) total = __fmaf_rn(shared.offsets[i][lane], shared.of_rows[i][warp], total);
      }
      __syncthreads();
    }
    if (!has_row) continue;
    float y = __fmul_rn(total, own_scale);
    if (p.bias && column >= 0) y = __fadd_rn(y, p.bias[(size_t)tile.expert * w.n + column]);
    if (p.gate != ExactGate::none) {
      const float up = __shfl_sync(0xffffffffu, y, lane % 16 + 16);
      y = exact_gated(p.gate, p.alpha, p.limit, y, up);
      if (lane >= 16) continue;
    }
    if (column >= 0) p.y[(size_t)(tile.first + first_row + warp) * width + column] = y;
  }
}

}  // namespace exact_gemm
}  // namespace as::cuda
