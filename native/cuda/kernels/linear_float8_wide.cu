// Products of floats of 8 bits (linear_float8.h) for many rows, as linear_wide.cu has those of bfloat16.
//
// A block of threads has a tile of 128 columns (rows of the weights) by 128 rows of activations at a time, and there
// are no more blocks than run at once: each computes one tile after the other. One thread has blocks of both sides
// copied into shared memory, several steps of 128 of K ahead and on into the next tile; two warpgroups multiply, each
// 64 columns with all rows, and add what wgmma has summed to sums in float32 step by step, while the other's products
// are under way. Four blocks of threads, which have two tiles of columns by two of rows, are a cluster: each copies
// half of what it shares for both.
#include <cstdint>

#include "cuda/kernels/column_sums.cuh"
#include "cuda/kernels/linear_integer.h"
#include "cuda/kernels/wgmma_registers.cuh"

namespace as {
namespace cuda {
namespace {

constexpr int kGroups = 2, kRowBlocks = 2, kRows = kRowBlocks * kBlock;  // warpgroups that multiply; rows of a tile
constexpr int kAcross = 2, kDown = 2, kCluster = kAcross * kDown;        // a cluster's tiles: of columns, of rows
constexpr int kThreads = 128 * (1 + kGroups);
constexpr int kStep = 2;  // blocks of K
constexpr int kStageRows = kStep * kRowBlocks * kByteBlock, kStageBytes = kStageRows + kStep * kGroups * kByteBlock;
constexpr int kStages = (226 << 10) / kStageBytes, kShared = kStages * kStageBytes;
static_assert(kStep == kFloat8Blocks);
// How many clusters' tiles of rows are shared by blocks that are at work at the same time: they stay in the cache.
[[maybe_unused]] constexpr int kBand = 8;

// The tiles of a product, cluster by cluster.
struct Walk {
  int down, across;  // clusters' tiles

  Walk(int rows, int columns)
      : down(ceil_div(rows, kDown * kRows)), across(ceil_div(columns, kAcross * kGroups * kBlock)) {}
  AS_BOTH int count() const { return down * across; }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// A block's tile among a cluster's, counted in blocks of 64: in their order some tiles of rows take one of columns
// after the other.
struct TilePlace {
  int row_block, column_block;

  __device__ TilePlace(const Walk& walk, int tile, int down, int across) {
    const int first = tile / (kBand * walk.across) * kBand, there = min(kBand, walk.down - first);
    const int within = tile - first * walk.across;
    row_block = ((first + within % there) * kDown + down) * kRowBlocks;
    column_block = (within / there * kAcross + across) * kGroups;
  }
};
#endif

// kWhole: sums are of one piece of K, and need not be kept beside others.
template <bool kWhole>
__global__ void __launch_bounds__(kThreads, 1)
    linear_wide_kernel(const __grid_constant__ Product p, int rows, Pieces k, Walk walk) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kValues = kRows / 2;
  extern __shared__ __align__(1024) char shared[];
  __shared__ uint64_t full[kStages], empty[kStages];
  const int rank = blockIdx.x % kCluster, down = rank / kAcross, across = rank % kAcross;
  const int first_tile = blockIdx.x / kCluster, stride = gridDim.x / kCluster;
  const int row_blocks = blocks_of(rows), column_blocks = blocks_of(p.w.n);
  const uint32_t stages = shared_address(shared);
  let_next_begin();
  if (threadIdx.x == 0) {
    // Of a stage: copied is what this block asked for; empty is it at all blocks of the cluster.
    for (int i = 0; i < kStages; i++) barrier_init(&full[i], 1), barrier_init(&empty[i], kCluster * kGroups);
    barriers_are_there();
  }
  __syncthreads();
  cluster_barrier();
  const int group = threadIdx.x / 128 - 1;
  Ring<kStages> ring;
  if (group < 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) {
      // The blocks that take part in a row of a cluster are adjacent.
      const uint16_t for_weights = (1 | 1 << kAcross) << across, for_rows = ((1 << kAcross) - 1) << (down * kAcross);
      const char *words = reinterpret_cast<const char*>(p.w.codes.words),
                 *x = reinterpret_cast<const char*>(p.bytes.values);
      const auto fetch_weights = [&](const TilePlace& tile, int block, int stage) {
        const int blocks = min(kStep, k.blocks - block), columns = min(kGroups, column_blocks - tile.column_block),
                  its_rows = min(kRowBlocks, row_blocks - tile.row_block);
        barrier_expect(&full[stage], (max(columns, 0) + max(its_rows, 0)) * blocks * kByteBlock);
        if (down < columns)
          copy_bulk_to(stages + stage * kStageBytes + kStageRows + down * kStep * kByteBlock,
                       words + ((size_t)(tile.column_block + down) * k.blocks + block) * kByteBlock,
                       blocks * kByteBlock, &full[stage], for_weights);
      };
      const auto fetch_rows = [&](const TilePlace& tile, int block, int stage) {
        if (tile.row_block + across >= row_blocks) return;
        const int blocks = min(kStep, k.blocks - block);
        for (int j = 0; j < blocks; j++)
          copy_bulk_to(stages + stage * kStageBytes + (j * kRowBlocks + across) * kByteBlock,
                       x + ((size_t)(tile.row_block + across) * k.blocks + block + j) * kByteBlock, kByteBlock,
                       &full[stage], for_rows);
      };
      // Weights are on their way before the kernel before this one has made the rows.
      const int steps = (k.blocks + kStep - 1) / kStep;
      int ahead = min(kStages, steps);
      const TilePlace first(walk, first_tile, down, across);
      for (int s = 0; s < ahead; s++) fetch_weights(first, s * kStep, s);
      await_previous();
      for (int tile = first_tile; tile < walk.count(); tile += stride) {
        const TilePlace place(walk, tile, down, across);
        for (int s = 0; s < steps; s++, ring.next()) {
          if (ahead > 0) {
            ahead--;
          } else {
            barrier_wait(&empty[ring.stage], ring.parity ^ 1);
            fetch_weights(place, s * kStep, ring.stage);
          }
          fetch_rows(place, s * kStep, ring.stage);
        }
      }
    }
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    await_previous();
    float d[kValues], total[kValues], all[kWhole ? 1 : kValues];
    const int teller = threadIdx.x % 128;  // all blocks of the cluster are told, by a thread each
    for (int tile = first_tile; tile < walk.count(); tile += stride) {
      const TilePlace place(walk, tile, down, across);
      const int first_row = place.row_block * kBlock, column_block = place.column_block + group;
      const bool there = first_row < rows && column_block < column_blocks;
      if constexpr (!kWhole) {
#pragma unroll
        for (int i = 0; i < kValues; i++) all[i] = -0.0f;  // with which a sum is what is added
      }
      for (int piece = 0, block = 0; piece < k.count; piece++) {
        const int end = min(block + k.length, k.blocks);
#pragma unroll
        for (int i = 0; i < kValues; i++) total[i] = 0;
#pragma unroll 1
        for (; block < end; block += kStep, ring.next()) {
          barrier_wait(&full[ring.stage], ring.parity);
          if (there) {
            const uint32_t x = stages + ring.stage * kStageBytes, own = x + kStageRows + group * kStep * kByteBlock;
            begin_products();
#pragma unroll
            for (int i = 0; i < 2; i++)
              Float8Tile<kRows>::multiply(d, byte_descriptor(own + i * kStepBytes), byte_descriptor(x + i * kStepBytes),
                                          i > 0);
            commit_products();
            if (block + 1 < k.blocks) {
              begin_products();
#pragma unroll
              for (int i = 0; i < 2; i++)
                Float8Tile<kRows>::multiply(d, byte_descriptor(own + kByteBlock + i * kStepBytes),
                                            byte_descriptor(x + kRowBlocks * kByteBlock + i * kStepBytes), 1);
              commit_products();
            }
            wait_products<0>();
            settle(d);
          }
          if (teller < kCluster) barrier_arrive_at(&empty[ring.stage], teller);
#pragma unroll
          for (int i = 0; i < kValues; i++) total[i] = __fadd_rn(total[i], d[i]);
        }
        if constexpr (!kWhole) {
#pragma unroll
          for (int i = 0; i < kValues; i++) all[i] = __fadd_rn(all[i], total[i]);
        }
      }
      if (!there) continue;
      if constexpr (kWhole) finish_columns<SumScales::columns_and_rows>(p, rows, first_row, column_block, total);
      else finish_columns<SumScales::columns_and_rows>(p, rows, first_row, column_block, all);
    }
  }
  __syncwarp();
  cluster_barrier();  // other blocks may still tell this one's barriers
#endif
}

// How many clusters run at once.
template <bool kWhole>
int clusters() {
  static const int count = [] {
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = kCluster, attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(kCluster), config.blockDim = dim3(kThreads), config.dynamicSmemBytes = kShared;
    config.attrs = &attribute, config.numAttrs = 1;
    int found = 0;
    allow_shared(linear_wide_kernel<kWhole>, kShared);
    if (cudaOccupancyMaxActiveClusters(&found, linear_wide_kernel<kWhole>, &config) != cudaSuccess) cudaGetLastError();
    return found > 0 ? found : processors() / kCluster;
  }();
  return count;
}

template <bool kWhole>
void start_wide(const Product& p, int rows, const Queue& queue) {
  const Walk walk(rows, p.w.n);
  allow_shared(linear_wide_kernel<kWhole>, kShared);
  const int most = clusters<kWhole>(), blocks = kCluster * (walk.count() < most ? walk.count() : most);
  start_clusters(queue, linear_wide_kernel<kWhole>, dim3(blocks), dim3(kCluster), kThreads, kShared, p, rows,
                 Pieces(p.w.k, p.w.most_pieces), walk);
  launched("linear in floats of 8 bits, many rows");
}

}  // namespace

void linear_float8_wide(const Product& p, int rows, const Queue& queue) {
  if (Pieces(p.w.k, p.w.most_pieces).count == 1) start_wide<true>(p, rows, queue);
  else start_wide<false>(p, rows, queue);
}

}  // namespace cuda
}  // namespace as
