// Products of rows with the matrices of their experts. A work item is a tile of an expert's entries and some columns
// (rows of the weights); how many there are is known to the device alone, so blocks of threads stay and take one after
// the other.
//
// In bfloat16 each warp has items of its own: 32 columns and up to 64 entries. It copies its part of both sides into
// shared memory several stages ahead and on into its next item, and no other warp sees that; rows are gathered on the
// way.
#include "cuda/kernels/linear_experts.cuh"

namespace as {
namespace cuda {
namespace {

constexpr int kColumnTiles = 2, kColumnTile = 16, kColumns = kColumnTiles * kColumnTile;  // of an item
constexpr int kWarps = 4;
constexpr int kStageWeights = kColumns * kRowBytes;  // bytes of a stage: 64 of K
constexpr int kRowTile = 8, kStageRows = kRowTile * kRowBytes;

// kTiles: of 8 entries each.
template <int kTiles>
struct Shape {
  static constexpr int kStages = kTiles <= 1 ? 5 : kTiles <= 2 ? 4 : 3;
  static constexpr int kStageBytes = kStageWeights + kTiles * kStageRows;
  static constexpr int kShared = kWarps * kStages * kStageBytes;
};

// Where a warp copies from: an item, a block of K.
template <int kTiles>
struct Ahead {
  int item, block;
  const char* weights;
  int rows[2 * kTiles];  // of a lane: offsets into x; -1: there is no such row
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
  if (!e.follows) await_previous();
  const int items = __ldcg(r.tile_count) * columns, first_item = warp * gridDim.x + blockIdx.x;

  Ahead<kTiles> ahead{first_item, 0, nullptr, {}};
  const auto begin_item = [&] {
    if (ahead.item >= items) return;
    const ExpertTile tile = tile_at(r, ahead.item / columns);
    const int column = ahead.item % columns;
    ahead.weights = reinterpret_cast<const char*>(p.w.tiles) + tile.expert * expert_bytes +
                    (size_t)(column / 2) * blocks * kBlockBytes + column % 2 * kStageWeights;
#pragma unroll
    for (int i = 0; i < 2 * kTiles; i++) ahead.rows[i] = row_offset(e, tile, lane / 8 + 4 * i, lane % 8, blocks);
  };
  const auto fetch_weights = [&](int stage, int block) {
    const char* from = ahead.weights + (size_t)block * kBlockBytes;
#pragma unroll
    for (int i = 0; i < kStageWeights / 512; i++)
      copy_16(ring + stage * kBytes + i * 512 + lane * 16, from + i * 512 + lane * 16);
  };
  // The next block, of whose weights the first `there` are on their way.
  const auto fetch = [&](int stage, int there = 0) {
    if (ahead.item < items) {
      if (ahead.block >= there) fetch_weights(stage, ahead.block);
#pragma unroll
      for (int i = 0; i < 2 * kTiles; i++)
        copy_16(ring + stage * kBytes + kStageWeights + piece_offset(lane / 8 + 4 * i, lane % 8),
                x + max(ahead.rows[i], 0) + (size_t)ahead.block * kBlockBytes, ahead.rows[i] >= 0);
      if (++ahead.block == blocks) ahead.block = 0, ahead.item += step, begin_item();
    }
    commit_copies();
  };
  begin_item();
  int there = 0;
  if (e.follows) {
    // Weights are on their way before the kernel before this one has made the rows.
    if (first_item < items)
      for (; there < min(kStages - 1, blocks); there++) fetch_weights(there, there);
    await_previous();
  }
  let_next_begin();  // from here on: so what follows finds the lists that this kernel waited for
#pragma unroll
  for (int i = 0; i < kStages - 1; i++) fetch(i, ahead.item == first_item ? there : 0);

  int stage = 0;
  for (int item = first_item; item < items; item += step) {
    float d[kColumnTiles][kTiles][4] = {};
    for (int b = 0; b < blocks; b++) {
      wait_copies<kStages - 2>();
      __syncwarp();
      fetch(stage == 0 ? kStages - 1 : stage - 1);  // what was computed with last
      const uint32_t at = ring + stage * kBytes;
      uint32_t y[kTiles][4];
#pragma unroll
      for (int step = 0; step < 4; step++) {
        uint32_t a[kColumnTiles][4];
#pragma unroll
        for (int m = 0; m < kColumnTiles; m++)
          load_cores(a[m], at + piece_offset(m * kColumnTile + lane % 16, 2 * step + lane / 16));
#pragma unroll
        for (int t = 0; t < kTiles; t++) {
          if (step % 2 == 0)
            load_cores(y[t], at + kStageWeights + t * kStageRows + piece_offset(lane % 8, 2 * step + lane / 8));
#pragma unroll
          for (int m = 0; m < kColumnTiles; m++)
            multiply_add(d[m][t], a[m], y[t][step % 2 * 2], y[t][step % 2 * 2 + 1]);
        }
      }
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    // Number i of a thread is of column lane / 4 + i / 2 * 8 of a tile of columns, and of entry 2 * (lane % 4) + i % 2.
    const ExpertTile tile = tile_at(r, item / columns);
    const int width = p.y.width;
    const float* bias = bias_of(e, tile.expert);
#pragma unroll
    for (int m = 0; m < kColumnTiles; m++)
#pragma unroll
      for (int t = 0; t < kTiles; t++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const int slot = t * kRowTile + 2 * (lane % 4) + j, column_tile = item % columns * kColumnTiles + m;
          if (slot >= tile.count) continue;
          if (p.gated) {
            const int column = column_tile * (kColumnTile / 2) + lane / 4;
            if (column >= width) continue;
            float gate = d[m][t][j], up = d[m][t][2 + j];
            if (bias) gate = __fadd_rn(gate, bias[column]), up = __fadd_rn(up, bias[width + column]);
            put(p.y, tile.first + slot, column, silu_times(gate, up));
            continue;
          }
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const int column = column_tile * kColumnTile + lane / 4 + 8 * h;
            if (column >= width) continue;
            const float sum = d[m][t][2 * h + j];
            put(p.y, tile.first + slot, column, bias ? __fadd_rn(sum, bias[column]) : sum);
          }
        }
  }
}

template <int kTiles>
void start_tiles(const ExpertProduct& p, int entries, const Queue& queue) {
  const int columns = ceil_div(p.product.w.n, kColumns), items = most_items(p, entries, kTiles * kRowTile, columns);
  const size_t shared = Shape<kTiles>::kShared;
  allow_shared(linear_experts_kernel<kTiles>, shared);
  int together = 0;
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&together, linear_experts_kernel<kTiles>, 32 * kWarps, shared);
  // Few items: one block on a processor, beside which there is room for the next product's.
  const int each = items <= kWarps * processors() ? 1 : std::max(together, 1),
            grid = std::min(items, each * processors());
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
    const ExpertTile tile = tile_at(r, item / columns);
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

int expert_tile_rows(Kind kind, int entries, int experts, const Queue& queue) {
  if (kind == Kind::f32) return kTile;
  // So that few experts have more than one tile.
  const int each = entries / std::max(experts, 1);
  return each <= 4 ? 8 : each <= 10 ? 16 : each <= 22 ? 32 : each <= 48 || queue.capability != 90 ? 64 : 128;
}

void linear_experts(const ExpertProduct& p, int entries, int tile_rows, const Queue& queue, By by) {
  if (p.product.w.kind == Kind::f32) {
    const int columns = ceil_div(p.product.w.n, kTile);
    const int grid = std::min(most_items(p, entries, kTile, columns), 8 * processors());
    start(queue, linear_experts_f32_kernel, grid, kThreads, 0, p, columns);
    launched("linear of experts in float32");
    return;
  }
  if (tile_rows >= 64 && queue.capability == 90 && by != By::mma)
    return linear_experts_wide(p, entries, tile_rows, queue);
  if (tile_rows <= 8) start_tiles<1>(p, entries, queue);
  else if (tile_rows <= 16) start_tiles<2>(p, entries, queue);
  else if (tile_rows <= 32) start_tiles<4>(p, entries, queue);
  else start_tiles<8>(p, entries, queue);
}

}  // namespace cuda
}  // namespace as
