// LoRA adapters of experts: low-rank products, each entry with the matrices that its row's adapter has for its expert.
//
// Recipe, independent of the rest of a launch. a x: a warp computes a rank; a lane has a chain of fused multiply-adds
// over its columns, eight of each 256, in ascending order; lanes are added as warp_sum() does, and the sum is
// multiplied by the scale. b u: one chain over the rank, from zero, which is then added to y. Up to kTogether adjacent
// entries of an expert share the reads of a matrix if they have the same adapter; the chains are the same.
//
// Only the GPU knows which entries there are: CTAs go through the tiles that route() wrote.
#include "cuda/kernels/lora/lora.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace {

constexpr int kWarps = 8, kTogether = 4, kExpandThreads = 128, kGateThreads = 256;

__device__ void read_x(const Rows& x, int row, int column, float (&values)[8]) {
  if (!x.tiles) return read_eight(x.values + (size_t)row * x.width, column, x.width, values);
#pragma unroll
  for (int j = 0; j < 8; j++)
    values[j] = column + j < x.width ? from_dtype16(x.tiles[tile_offset(row, column + j, blocks_of(x.width))]) : 0.0f;
}

// Values of a matrix from `at` on; in float32 or 16 bits.
__device__ float value_at(const AdaptedSums& a, const char* matrix, size_t at) {
  return a.is_dtype16 ? from_dtype16(reinterpret_cast<const uint16_t*>(matrix)[at])
                      : reinterpret_cast<const float*>(matrix)[at];
}

// Calls work(pair, first entry, with) for up to kTogether entries with the same adapter, a bit of `with` for each.
template <typename Work>
__device__ void each_group(const ExpertSums& e, const Work& work) {
  const AdaptedSums& a = e.sums;
  const int count = __ldcg(e.routing.tile_count);
#pragma unroll 1
  for (int t = blockIdx.x; t < count; t += gridDim.x) {
    const ExpertTile tile = e.routing.tiles[t];
    const int target = a.columns[0].target + e.routing.begin + tile.expert;
#pragma unroll 1
    for (int begin = 0; begin < tile.count; begin += kTogether) {
      int adapters[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; i++) {
        adapters[i] = -1;
        if (begin + i >= tile.count) continue;
        const int row = __ldcg(e.routing.row_of + tile.first + begin + i);
        adapters[i] = a.adapters[a.chosen ? a.chosen[row] : row];
      }
#pragma unroll
      for (int i = 0; i < kTogether; i++) {
        uint32_t with = 0;
#pragma unroll
        for (int j = 0; j < kTogether; j++) with |= (uint32_t)(adapters[j] == adapters[i]) << j;
        if (adapters[i] < 0 || (with & ((1u << i) - 1))) continue;
        const LoraPair pair = a.pairs[(size_t)adapters[i] * a.targets + target];
        if (pair.rank) work(pair, tile.first + begin, with);
      }
    }
  }
}

// Grid: tiles in turn, groups of ranks.
__global__ void __launch_bounds__(32 * kWarps) shrink_experts_kernel(ExpertSums e) {
  after_previous();
  const AdaptedSums& a = e.sums;
  const int lane = threadIdx.x % 32, rank = blockIdx.y * kWarps + threadIdx.x / 32, k = a.x.width;
  each_group(e, [&](const LoraPair& pair, int first, uint32_t with) {
    if (rank >= pair.rank) return;
    int rows[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; i++)
      rows[i] = with >> i & 1 ? e.gathers ? __ldcg(e.routing.row_of + first + i) : first + i : 0;
    float sums[kTogether] = {};
    for (int column = lane * 8; column < k; column += 32 * 8) {
      float w[8];
#pragma unroll
      for (int j = 0; j < 8; j++)
        w[j] = column + j < k ? value_at(a, pair.a, (size_t)rank * lora_stride(k) + column + j) : 0.0f;
#pragma unroll
      for (int i = 0; i < kTogether; i++) {
        if (!(with >> i & 1)) continue;
        float x[8];
        read_x(a.x, rows[i], column, x);
#pragma unroll
        for (int j = 0; j < 8; j++) sums[i] = __fmaf_rn(w[j], x[j], sums[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kTogether; i++) {
      const float sum = warp_sum(sums[i]);
      if (lane == 0 && (with >> i & 1))
        a.inner[(size_t)(first + i) * whole_ranks(a.max_rank) + rank] = __fmul_rn(sum, pair.scale);
    }
  });
}

// Grid: tiles in turn, columns.
__global__ void __launch_bounds__(kExpandThreads) expand_experts_kernel(ExpertSums e) {
  after_previous();
  const AdaptedSums& a = e.sums;
  const AdaptedColumns own = a.columns[0];
  const int column = blockIdx.y * kExpandThreads + threadIdx.x;
  if (column >= own.columns) return;
  each_group(e, [&](const LoraPair& pair, int first, uint32_t with) {
    // 16 bits: [columns, whole ranks]; float32: transposed
    const size_t begin = a.is_dtype16 ? (size_t)column * whole_ranks(pair.rank) : column,
                 step = a.is_dtype16 ? 1 : lora_stride(own.columns);
    float sums[kTogether] = {};
#pragma unroll 4
    for (int rank = 0; rank < pair.rank; rank++) {
      const float w = value_at(a, pair.b, begin + rank * step);
#pragma unroll
      for (int i = 0; i < kTogether; i++)
        if (with >> i & 1)
          sums[i] = __fmaf_rn(w, a.inner[(size_t)(first + i) * whole_ranks(a.max_rank) + rank], sums[i]);
    }
#pragma unroll
    for (int i = 0; i < kTogether; i++)
      if (with >> i & 1) {
        const int at = place_of(a, own.offset + column);
        if (e.tiles) {
          uint16_t& y = e.tiles[tile_offset(first + i, at, blocks_of(a.width))];
          y = to_dtype16(__fadd_rn(from_dtype16(y), sums[i]));
        } else {
          float& y = a.y[(size_t)(first + i) * a.width + at];
          y = __fadd_rn(y, sums[i]);
        }
      }
  });
}

// Grid: tiles in turn, columns.
__global__ void __launch_bounds__(kGateThreads) gate_entries_kernel(GatedEntries g) {
  after_previous();
  const int column = blockIdx.y * kGateThreads + threadIdx.x, width = g.out.width;
  if (column >= width) return;
  const int count = __ldcg(g.routing.tile_count);
#pragma unroll 1
  for (int t = blockIdx.x; t < count; t += gridDim.x) {
    const ExpertTile tile = g.routing.tiles[t];
    const float* bias = g.bias ? g.bias + (size_t)tile.expert * 2 * width : nullptr;
    for (int entry = tile.first; entry < tile.first + tile.count; entry++) {
      const float* sums = g.pairs + (size_t)entry * g.pairs_width + column / 8 * 16 + column % 8;
      float gate = sums[0], up = sums[8];
      if (bias) gate = __fadd_rn(gate, bias[column]), up = __fadd_rn(up, bias[width + column]);
      put(g.out, entry, column, gated_by(g.gating, gate, up));
    }
  }
}

// CTAs that go through the tiles of a step with so many entries.
int tile_turns(int entries, int others) { return std::clamp(16 * sm_count() / std::max(1, others), 1, entries); }

}  // namespace

void add_expert_lora(const ExpertSums& e, int entries, const Queue& queue) {
  const int ranks = ceil_div(e.sums.max_rank, kWarps), columns = ceil_div(e.sums.columns[0].columns, kExpandThreads);
  start(queue, shrink_experts_kernel, dim3(tile_turns(entries, ranks), ranks), 32 * kWarps, 0, e);
  start(queue, expand_experts_kernel, dim3(tile_turns(entries, columns), columns), kExpandThreads, 0, e);
}

void gate_entries(const GatedEntries& g, int entries, const Queue& queue) {
  const int columns = ceil_div(g.out.width, kGateThreads);
  start(queue, gate_entries_kernel, dim3(tile_turns(entries, columns), columns), kGateThreads, 0, g);
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
