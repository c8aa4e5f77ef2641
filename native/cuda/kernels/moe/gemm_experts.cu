// GEMMs of rows with the matrices of their experts. A work item is a tile of an expert's entries and several columns
// (rows of the weights). Only the GPU knows the number of items, so CTAs are persistent and compute one after the
// other.
//
// With 16-bit weights, and with quantized weights, which are dequantized to bfloat16 in registers, each warp has its
// own items: 32 columns and up to 64 entries. It copies its part of both operands to shared memory several stages
// ahead, and on into its next item. These copies gather the rows.
#include "cuda/kernels/gemm/gemm_f32.cuh"
#include "cuda/kernels/moe/gemm_experts.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace {

constexpr int kColumnTiles = 2;  // tiles of 16 columns of an item
constexpr int kWarps = 4;
constexpr int kRowTile = 8, kStageRows = kRowTile * kRowBytes;

// Shared memory of a CTA: as usual; much, where few warps work and each has many stages; as little as any chip has.
enum class Ring { usual, deep, small };
constexpr int kSmallRing = 99 << 10;

// Type: of the weights. kTiles: tiles of 8 entries.
template <typename Type, int kTiles, Ring kRing = Ring::usual>
struct Shape : ColumnTiles<Type, kColumnTiles> {
  static constexpr int kRowsAt = ColumnTiles<Type, kColumnTiles>::kBytes;
  static constexpr int kStageBytes = kRowsAt + kTiles * kStageRows;
  static constexpr bool kDeep = kRing == Ring::deep;
  static constexpr int kRings = kRing == Ring::small ? kSmallRing  // bytes of all warps' stages
                                : kDeep              ? 204 << 10
                                : kTiles == 8        ? 150 << 10
                                                     : 104 << 10;
  static constexpr int kStages = std::min(kRings / kWarps / kStageBytes, kDeep ? 16 : 8);
  static constexpr int kShared = kWarps * kStages * kStageBytes;
};

// The next copies of a warp: an item and a block of K.
template <int kTiles>
struct Ahead {
  int item, block;
  const char* weights;
  const uint32_t* scales;  // scales of the item's columns in the first group
  int rows[2 * kTiles];    // a lane's offsets into x; -1: there is no such row
};

template <typename Type, int kTiles, Ring kRing>
__global__ void __launch_bounds__(32 * kWarps)
    gemm_experts_kernel(const __grid_constant__ ExpertGemmArgs e, int columns, int most, int blocks,
                        size_t expert_bytes) {
  using S = Shape<Type, kTiles, kRing>;
  constexpr int kBits = S::kBits;
  extern __shared__ __align__(128) char shared[];
  constexpr int kStages = S::kStages, kBytes = S::kStageBytes;
  const GemmArgs& p = e.gemm;
  const Routing& r = e.routing;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, step = gridDim.x * kWarps;
  char* own = shared + warp * kStages * kBytes;
  const uint32_t ring = shared_address(own);
  const char* x = reinterpret_cast<const char*>(p.x.tiles);
  const char* matrices =
      kBits == 16 ? reinterpret_cast<const char*>(p.w.tiles) : reinterpret_cast<const char*>(p.w.quants.words);
  if (!e.follows) await_previous();
  const int first_item = warp * gridDim.x + blockIdx.x;
  // Both loads are issued at once: beyond its last tile the list has readable memory. most: limit of items.
  const int count = __ldcg(r.tile_count);
  const ExpertTile first_tile = tile_at(r, min(first_item, most - 1) / columns);
  const int items = count * columns;

  Ahead<kTiles> ahead{first_item, 0, nullptr, nullptr, {}};
  const auto begin_weights = [&](const ExpertTile& tile) {
    const int column = ahead.item % columns;
    ahead.weights = matrices + tile.expert * expert_bytes + (size_t)(column / 2) * blocks * S::kBlockBytes +
                    column % 2 * S::kWeights;
    if constexpr (S::kSets)
      ahead.scales = p.w.quants.scales + tile.expert * expert_bytes / 4 +
                     (size_t)(column / 2) * p.w.quants.groups * kScaleWords + column % 2 * S::kColumns;
  };
  const auto begin_rows = [&](const ExpertTile& tile) {
#pragma unroll
    for (int i = 0; i < 2 * kTiles; i++) ahead.rows[i] = row_offset(e, tile, lane / 8 + 4 * i, lane % 8, blocks);
  };
  const auto fetch_weights = [&](int stage, int block) {
    const uint32_t to = ring + stage * kBytes;
    copy_by_warp<S::kWeights>(to, ahead.weights + (size_t)block * S::kBlockBytes);
    if constexpr (S::kSets) {
      const int group = min(block * kBlock + (S::kFine ? lane / 8 * 16 : 0), p.w.k - 1) / p.w.quants.group;
      if (lane < S::kSets * 8)
        copy_16(to + S::kWeights + lane * 16, ahead.scales + (size_t)group * kScaleWords + lane % 8 * 4);
    }
  };
  // Copies the next block; the weights of the first `there` blocks are already on their way.
  const auto fetch = [&](int stage, int there = 0) {
    if (ahead.item < items) {
      if (ahead.block >= there) fetch_weights(stage, ahead.block);
#pragma unroll
      for (int i = 0; i < 2 * kTiles; i++)
        copy_16(ring + stage * kBytes + S::kRowsAt + chunk_offset(lane / 8 + 4 * i, lane % 8),
                x + max(ahead.rows[i], 0) + (size_t)ahead.block * kBlockBytes, ahead.rows[i] >= 0);
      if (++ahead.block == blocks) {
        ahead.block = 0, ahead.item += step;
        if (ahead.item < items) {
          const ExpertTile tile = tile_at(r, ahead.item / columns);
          begin_weights(tile), begin_rows(tile);
        } else if (warp == 0) {
          // An earlier start would delay these copies. The next kernel finds the lists that this one waited for.
          let_next_begin();
        }
      }
    }
    commit_copies();
  };
  // Weights are prefetched before the rows' places are known and, after such a GEMM, before the rows are written.
  int there = 0;
  if (first_item < items) {
    begin_weights(first_tile);
    for (; there < min(kStages - 1, blocks); there++) fetch_weights(there, there);
  }
  if (e.follows) await_previous();
  if (first_item < items) begin_rows(first_tile);
#pragma unroll
  for (int i = 0; i < kStages - 1; i++) fetch(i, ahead.item == first_item ? there : 0);

  int stage = 0;
  for (int item = first_item; item < items; item += step) {
    const ExpertTile tile = tile_at(r, item / columns);  // read early for the epilogue
    float d[kColumnTiles][kTiles][4] = {};
    for (int b = 0; b < blocks; b++) {
      wait_copies<kStages - 2>();
      __syncwarp();
      fetch(stage == 0 ? kStages - 1 : stage - 1);  // the stage that was consumed last
      Fragments<S> weights(own + stage * kBytes, p.w.k - b * kBlock);
      multiply_block(weights, ring + stage * kBytes + S::kRowsAt, d);
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    // Number i of a thread belongs to column lane / 4 + i / 2 * 8 of a tile and to entry 2 * (lane % 4) + i % 2.
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
            const int column = column_tile * (kTileRows / 2) + lane / 4;
            if (column >= width) continue;
            float gate = d[m][t][j], up = d[m][t][2 + j];
            if (bias) gate = __fadd_rn(gate, bias[column]), up = __fadd_rn(up, bias[width + column]);
            put(p.y, tile.first + slot, column, gated_by(e.gating, gate, up));
            continue;
          }
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const int column = column_tile * kTileRows + lane / 4 + 8 * h;
            if (column >= width) continue;
            const float sum = d[m][t][2 * h + j];
            put(p.y, tile.first + slot, column, bias ? __fadd_rn(sum, bias[column]) : sum);
          }
        }
  }
}

template <typename Type, int kTiles, Ring kRing>
void start_tiles(const ExpertGemmArgs& e, int items, int columns, const Queue& queue) {
  using S = Shape<Type, kTiles, kRing>;
  static_assert(S::kStages >= (kRing == Ring::small ? 2 : 3));
  const auto kernel = gemm_experts_kernel<Type, kTiles, kRing>;
  const Matrix& w = e.gemm.w;
  allow_shared(kernel, S::kShared);
  int merged = 1;
  if (!S::kDeep) cudaOccupancyMaxActiveBlocksPerMultiprocessor(&merged, kernel, 32 * kWarps, S::kShared);
  const int grid = std::min(items, std::max(merged, 1) * sm_count());
  start(queue, kernel, grid, 32 * kWarps, S::kShared, e, columns, items, blocks_of(w.k), bytes_of_expert(w));
}

template <typename Type, int kTiles>
void start_tiles(const ExpertGemmArgs& e, int entries, const Queue& queue) {
  const int columns = ceil_div(e.gemm.w.n, kColumnTiles * kTileRows),
            items = max_items(e, entries, kTiles * kRowTile, columns);
  if (kTiles == 1 && queue.capability == 90 && items <= kWarps * sm_count())
    return start_tiles<Type, 1, Ring::deep>(e, items, columns, queue);
  constexpr int kShared = Shape<Type, kTiles>::kShared;
  if constexpr (kShared > kSmallRing)
    if (max_shared() < kShared) return start_tiles<Type, kTiles, Ring::small>(e, items, columns, queue);
  start_tiles<Type, kTiles, Ring::usual>(e, items, columns, queue);
}

template <typename Type>
void start_rows(const ExpertGemmArgs& e, int entries, int tile_rows, const Queue& queue) {
  if (tile_rows <= 8) start_tiles<Type, 1>(e, entries, queue);
  else if (tile_rows <= 16) start_tiles<Type, 2>(e, entries, queue);
  else if (tile_rows <= 32) start_tiles<Type, 4>(e, entries, queue);
  else start_tiles<Type, 8>(e, entries, queue);
}

__global__ void __launch_bounds__(kTileThreads)
    gemm_experts_f32_kernel(const __grid_constant__ ExpertGemmArgs e, int columns) {
  __shared__ int rows[kTile];
  const GemmArgs& p = e.gemm;
  const Routing& r = e.routing;
  const int k = p.w.k, n = p.w.n;
  after_previous();
  const int items = *r.tile_count * columns;
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const ExpertTile tile = tile_at(r, item / columns);
    const int column0 = item % columns * kTile;
    if (threadIdx.x < kTile) {
      const int entry = tile.first + threadIdx.x;
      rows[threadIdx.x] = threadIdx.x >= tile.count ? -1 : e.gathers ? r.row_of[entry] : entry;
    }
    __syncthreads();
    float sums[kEach][kEach];
    multiply_tile(
        p.x.values, p.w.values + ((size_t)tile.expert * n + column0) * k, n - column0, k,
        [&](int i) { return rows[i]; }, sums);
#pragma unroll
    for (int i = 0; i < kEach; i++)
#pragma unroll
      for (int j = 0; j < kEach; j++) {
        const int slot = threadIdx.x / 16 + 16 * i, column = column0 + threadIdx.x % 16 + 16 * j;
        if (slot >= tile.count || column >= n) continue;
        const float bias = p.bias ? p.bias[(size_t)tile.expert * n + column] : 0.0f;
        put(p.y, tile.first + slot, column, p.bias ? __fadd_rn(sums[i][j], bias) : sums[i][j]);
      }
  }
}

}  // namespace

void gemm_experts(const ExpertGemmArgs& p, int entries, int tile_rows, const Queue& queue, GemmAlgo algo) {
  const Matrix& w = p.gemm.w;
  if (w.kind == Kind::f32) {
    const int columns = ceil_div(w.n, kTile);
    const int grid = std::min(max_items(p, entries, kTile, columns), 8 * sm_count());
    start(queue, gemm_experts_f32_kernel, grid, kTileThreads, 0, p, columns);
    return;
  }
  if (w.takes_bytes()) return gemm_experts_8bit(p, entries, tile_rows, queue);
  if (algo == GemmAlgo::prefill) return gemm_experts_prefill(p, entries, tile_rows, queue);
  by_type<true>(w, [&](auto type) { start_rows<decltype(type)>(p, entries, tile_rows, queue); });
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
