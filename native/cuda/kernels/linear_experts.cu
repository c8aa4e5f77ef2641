// Products of rows with the matrices of their experts. A work item is a tile of an expert's entries and some columns
// (rows of the weights); how many there are is known to the device alone, so blocks of threads stay and take one after
// the other.
//
// In bfloat16 each warp has items of its own: 16 columns and up to 64 entries. It copies its part of both sides into
// shared memory several stages ahead and on into its next item, and no other warp sees that; rows are gathered on the
// way.
#include <algorithm>

#include "cuda/experts.h"
#include "cuda/kernels/device.cuh"

namespace as {
namespace cuda {
namespace {

constexpr int kColumns = 16;  // of an item
constexpr int kWarps = 4;
constexpr int kStageWeights = kColumns * kBlock * 2;  // bytes of a stage: 64 of K
constexpr int kRowTile = 8, kStageRows = kRowTile * kBlock * 2;

// kTiles: of 8 entries each.
template <int kTiles>
struct Shape {
  static constexpr int kStages = kTiles <= 1 ? 6 : kTiles <= 2 ? 5 : kTiles <= 4 ? 4 : 3;
  static constexpr int kStageBytes = kStageWeights + kTiles * kStageRows;
  static constexpr int kShared = kWarps * kStages * kStageBytes;
};

// A warp's items: columns of a tile, and where a lane copies from.
template <int kTiles>
struct Ahead {
  int item, block;
  const char* weights;
  int rows[2 * kTiles];  // offsets into x; -1: there is no such row
};

template <int kTiles>
__global__ void __launch_bounds__(32 * kWarps)
    linear_experts_kernel(const __grid_constant__ ExpertProduct e, int columns, int blocks) {
  extern __shared__ __align__(128) char shared[];
  constexpr int kStages = Shape<kTiles>::kStages, kBytes = Shape<kTiles>::kStageBytes;
  const Product& p = e.product;
  const Routing& r = e.routing;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, step = gridDim.x * kWarps;
  const uint32_t ring = shared_address(shared) + warp * kStages * kBytes;
  const char* x = reinterpret_cast<const char*>(p.x.tiles);
  const size_t expert_bytes = (size_t)blocks_of(p.w.n) * blocks * kBlockBytes;
  after_previous();
  const int items = *r.tile_count * columns, first_item = warp * gridDim.x + blockIdx.x;

  Ahead<kTiles> ahead{first_item, 0, nullptr, {}};
  const auto begin_item = [&] {
    if (ahead.item >= items) return;
    const ExpertTile tile = r.tiles[ahead.item / columns];
    const int column = ahead.item % columns;
    ahead.weights = reinterpret_cast<const char*>(p.w.tiles) + tile.expert * expert_bytes +
                    (size_t)(column / 4) * blocks * kBlockBytes + column % 4 * kStageWeights;
#pragma unroll
    for (int i = 0; i < 2 * kTiles; i++) {
      const int slot = lane / 8 + 4 * i, entry = tile.first + slot;
      ahead.rows[i] = -1;
      if (slot >= tile.count) continue;
      const int row = e.gathers ? r.row_of[entry] : entry;
      ahead.rows[i] = row / kBlock * blocks * kBlockBytes + piece_offset(row % kBlock, lane % 8);
    }
  };
  const auto fetch = [&](int stage) {
    if (ahead.item < items) {
      const uint32_t to = ring + stage * kBytes;
      const char* from = ahead.weights + (size_t)ahead.block * kBlockBytes;
#pragma unroll
      for (int i = 0; i < kStageWeights / 512; i++) copy_16(to + i * 512 + lane * 16, from + i * 512 + lane * 16);
#pragma unroll
      for (int i = 0; i < 2 * kTiles; i++)
        copy_16(to + kStageWeights + piece_offset(lane / 8 + 4 * i, lane % 8),
                x + max(ahead.rows[i], 0) + (size_t)ahead.block * kBlockBytes, ahead.rows[i] >= 0);
      if (++ahead.block == blocks) ahead.block = 0, ahead.item += step, begin_item();
    }
    commit_copies();
  };
  begin_item();
#pragma unroll
  for (int i = 0; i < kStages - 1; i++) fetch(i);

  int stage = 0;
  for (int item = first_item; item < items; item += step) {
    float d[kTiles][4] = {};
    for (int b = 0; b < blocks; b++) {
      wait_copies<kStages - 2>();
      __syncwarp();
      fetch(stage == 0 ? kStages - 1 : stage - 1);  // what was computed with last
      const uint32_t at = ring + stage * kBytes;
      uint32_t y[kTiles][4];
#pragma unroll
      for (int step = 0; step < 4; step++) {
        uint32_t a[4];
        load_cores(a, at + piece_offset(lane % 16, 2 * step + lane / 16));
#pragma unroll
        for (int t = 0; t < kTiles; t++) {
          if (step % 2 == 0)
            load_cores(y[t], at + kStageWeights + t * kStageRows + piece_offset(lane % 8, 2 * step + lane / 8));
          multiply_add(d[t], a, y[t][step % 2 * 2], y[t][step % 2 * 2 + 1]);
        }
      }
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    // Number i of a thread is of column lane / 4 + i / 2 * 8, and of entry 2 * (lane % 4) + i % 2.
    const ExpertTile tile = r.tiles[item / columns];
    const int width = p.y.width, each = p.gated ? kColumns / 2 : kColumns, column = item % columns * each + lane / 4;
    const float* bias = p.bias ? p.bias + (size_t)tile.expert * (p.gated ? 2 * width : width) : nullptr;
#pragma unroll
    for (int t = 0; t < kTiles; t++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int slot = t * kRowTile + 2 * (lane % 4) + j;
        if (slot >= tile.count) continue;
        if (p.gated) {
          float gate = d[t][j], up = d[t][2 + j];
          if (column >= width) continue;
          if (bias) gate = __fadd_rn(gate, bias[column]), up = __fadd_rn(up, bias[width + column]);
          put(p.y, tile.first + slot, column, silu_times(gate, up));
          continue;
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int at = column + 8 * h;
          if (at >= width) continue;
          const float sum = d[t][2 * h + j];
          put(p.y, tile.first + slot, at, bias ? __fadd_rn(sum, bias[at]) : sum);
        }
      }
  }
}

// How many items there may be.
int most_items(const ExpertProduct& p, int entries, int tile_rows, int columns) {
  const int experts = p.routing.end - p.routing.begin;
  return std::min(entries, entries / tile_rows + experts) * columns;
}

template <int kTiles>
void start_tiles(const ExpertProduct& p, int entries, const Queue& queue) {
  const int columns = ceil_div(p.product.w.n, kColumns), items = most_items(p, entries, kTiles * kRowTile, columns);
  const size_t shared = Shape<kTiles>::kShared;
  allow_shared(linear_experts_kernel<kTiles>, shared);
  int together = 0;
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&together, linear_experts_kernel<kTiles>, 32 * kWarps, shared);
  const int grid = std::min(items, processors() * std::max(together, 1));
  start(queue, linear_experts_kernel<kTiles>, grid, 32 * kWarps, shared, p, columns, blocks_of(p.product.w.k));
  launched("linear of experts in bfloat16");
}

// In float32, as linear_f32.cu.
constexpr int kTile = 64, kDepth = 16, kThreads = 256, kEach = 4;

__global__ void __launch_bounds__(kThreads)
    linear_experts_f32_kernel(const __grid_constant__ ExpertProduct e, int columns) {
  __shared__ float xs[kDepth][kTile + 1], ws[kDepth][kTile + 1];
  __shared__ int rows[kTile];
  const Product& p = e.product;
  const Routing& r = e.routing;
  const int k = p.w.k, n = p.w.n, ty = threadIdx.x / 16, tx = threadIdx.x % 16;
  after_previous();
  const int items = *r.tile_count * columns;
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const ExpertTile tile = r.tiles[item / columns];
    const int column0 = item % columns * kTile;
    const float* weights = p.w.values + (size_t)tile.expert * n * k;
    if (threadIdx.x < kTile) {
      const int entry = tile.first + threadIdx.x;
      rows[threadIdx.x] = threadIdx.x >= tile.count ? -1 : e.gathers ? r.row_of[entry] : entry;
    }
    __syncthreads();
    float sums[kEach][kEach] = {};
    for (int k0 = 0; k0 < k; k0 += kDepth) {
      for (int i = threadIdx.x; i < kTile * kDepth; i += kThreads) {
        const int at = k0 + i % kDepth, row = rows[i / kDepth], column = column0 + i / kDepth;
        xs[i % kDepth][i / kDepth] = row >= 0 && at < k ? p.x.values[(size_t)row * k + at] : 0.0f;
        ws[i % kDepth][i / kDepth] = column < n && at < k ? weights[(size_t)column * k + at] : 0.0f;
      }
      __syncthreads();
      const int depth = min(kDepth, k - k0);
      for (int c = 0; c < depth; c++)
#pragma unroll
        for (int i = 0; i < kEach; i++)
#pragma unroll
          for (int j = 0; j < kEach; j++) sums[i][j] = fmaf(xs[c][ty + 16 * i], ws[c][tx + 16 * j], sums[i][j]);
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < kEach; i++)
#pragma unroll
      for (int j = 0; j < kEach; j++) {
        const int slot = ty + 16 * i, column = column0 + tx + 16 * j;
        if (slot >= tile.count || column >= n) continue;
        const float bias = p.bias ? p.bias[(size_t)tile.expert * n + column] : 0.0f;
        put(p.y, tile.first + slot, column, p.bias ? __fadd_rn(sums[i][j], bias) : sums[i][j]);
      }
  }
}

}  // namespace

int expert_tile_rows(Kind kind, int entries, int experts) {
  if (kind == Kind::f32) return kTile;
  // So that few experts have more than one tile.
  const int each = entries / std::max(experts, 1);
  return each <= 4 ? 8 : each <= 10 ? 16 : each <= 22 ? 32 : 64;
}

void linear_experts(const ExpertProduct& p, int entries, int tile_rows, const Queue& queue, By) {
  if (p.product.w.kind == Kind::f32) {
    const int columns = ceil_div(p.product.w.n, kTile);
    const int grid = std::min(most_items(p, entries, kTile, columns), 8 * processors());
    start(queue, linear_experts_f32_kernel, grid, kThreads, 0, p, columns);
    launched("linear of experts in float32");
    return;
  }
  if (tile_rows <= 8) start_tiles<1>(p, entries, queue);
  else if (tile_rows <= 16) start_tiles<2>(p, entries, queue);
  else if (tile_rows <= 32) start_tiles<4>(p, entries, queue);
  else start_tiles<8>(p, entries, queue);
}

}  // namespace cuda
}  // namespace as
