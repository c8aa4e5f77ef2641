// Products in bfloat16 by wgmma for many rows.
//
// A block of threads has 128 columns (rows of the weights) and 192 rows of activations. One thread has blocks of both
// sides copied into shared memory, several stages ahead; two warpgroups multiply, each 64 columns with all rows. Sums
// of a piece of K (tiles.h) are added to those of the pieces before in registers. Two blocks of threads with the same
// rows are a cluster, and each copies half of the rows for both: what the second-level cache delivers is the limit.
#include "cuda/kernels/linear_wgmma.h"
#include "cuda/kernels/wgmma.cuh"

namespace as {
namespace cuda {
namespace {

constexpr int kColumns = kWideColumns, kRows = kWideRows, kGroups = kColumns / kBlock, kStages = 5, kPair = 2;
constexpr int kThreads = 128 * (1 + kGroups);
[[maybe_unused]] constexpr int kValues = kRows / 2;
constexpr int kTogether =
    12;  // tiles of rows that blocks at work at the same time share: what they read stays in the cache
constexpr int kStageBytes = (kColumns + kRows) / kBlock * kBlockBytes, kSharedBytes = kStages * kStageBytes;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
struct Barriers {
  uint64_t full[kStages], empty[kStages];
};

__device__ void copy_blocks(const Product& p, int column_block, int row_block, int rank, int rows, const Pieces& k,
                            uint32_t stages, Barriers& barriers) {
  const char* weights = reinterpret_cast<const char*>(p.w.tiles);
  const char* x = reinterpret_cast<const char*>(p.x.tiles);
  const int columns = max(0, min(kGroups, blocks_of(p.w.n) - column_block)),
            row_blocks = min(kRows / kBlock, blocks_of(rows) - row_block);
  constexpr int kHalf = kBlockBytes / kPair;
  for (int b = 0; b < k.blocks; b++) {
    const int stage = b % kStages;
    if (b >= kStages) barrier_wait(&barriers.empty[stage], (b / kStages - 1) % 2);
    const uint32_t to = stages + stage * kStageBytes;
    barrier_expect(&barriers.full[stage], (columns + row_blocks) * kBlockBytes);
    for (int i = 0; i < columns; i++)
      copy_bulk(to + i * kBlockBytes, weights + ((size_t)(column_block + i) * k.blocks + b) * kBlockBytes, kBlockBytes,
                &barriers.full[stage]);
    for (int i = 0; i < row_blocks; i++)
      copy_bulk_to(to + (kGroups + i) * kBlockBytes + rank * kHalf,
                   x + ((size_t)(row_block + i) * k.blocks + b) * kBlockBytes + rank * kHalf, kHalf,
                   &barriers.full[stage], (1 << kPair) - 1);
  }
}
#endif

__global__ void __launch_bounds__(kThreads, 1)
    linear_wide_kernel(const __grid_constant__ Product p, int rows, Pieces k) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char shared[];
  __shared__ Barriers barriers;
  // Neighbours in time share rows and columns: some tiles of rows with one pair of tiles of columns after the other.
  const int pairs = (blocks_of(p.w.n) + kPair * kGroups - 1) / (kPair * kGroups), tiles = (rows + kRows - 1) / kRows;
  const int together = blockIdx.y / (kTogether * pairs) * kTogether, within = blockIdx.y % (kTogether * pairs);
  const int there = min(kTogether, tiles - together), rank = blockIdx.x;
  const int column_block = (within / there * kPair + rank) * kGroups,
            row_block = (together + within % there) * (kRows / kBlock);
  const uint32_t stages = shared_address(shared);
  let_next_begin();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; i++)
      barrier_init(&barriers.full[i], 1), barrier_init(&barriers.empty[i], kPair * kGroups);
    barriers_are_there();
  }
  __syncthreads();
  cluster_barrier();
  await_previous();
  const int group = threadIdx.x / 128 - 1;
  if (group < 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) copy_blocks(p, column_block, row_block, rank, rows, k, stages, barriers);
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    float d[kValues], total[kValues];
    const int teller = threadIdx.x % 128;
    const auto release = [&](int b) {
      if (teller < kPair) barrier_arrive_at(&barriers.empty[b % kStages], teller);
    };
    for (int piece = 0, b = 0; piece < k.count; piece++) {
      const int first = b, end = min(b + k.length, k.blocks);
      for (; b < end; b++) {
        const int stage = b % kStages;
        barrier_wait(&barriers.full[stage], b / kStages % 2);
        const uint32_t own = stages + stage * kStageBytes + group * kBlockBytes,
                       theirs = stages + stage * kStageBytes + kGroups * kBlockBytes;
        begin_products();
#pragma unroll
        for (int step = 0; step < 4; step++)
          Tile<kRows>::multiply(d, descriptor(own + step * kStepBytes), descriptor(theirs + step * kStepBytes),
                                step > 0 || b > first);
        commit_products();
        wait_products<1>();
        if (b > first) release(b - 1);
      }
      wait_products<0>();
      release(b - 1);
      settle(d);
#pragma unroll
      for (int i = 0; i < kValues; i++) total[i] = piece ? __fadd_rn(total[i], d[i]) : d[i];
    }
    // Through shared memory, so that rows are written, and what is added to is read, whole lines at a time.
    constexpr int kStride = kColumns + 4;  // rows lie in different banks
    float* sums = reinterpret_cast<float*>(shared);
    const int thread = threadIdx.x - 128, lane = thread % 32;
    const auto meet = [] { asm volatile("bar.sync 1, %0;" ::"n"(128 * kGroups) : "memory"); };
    meet();  // nobody reads the stages any more
#pragma unroll
    for (int i = 0; i < kValues; i++)
      sums[(i / 4 * 8 + lane % 4 * 2 + i % 2) * kStride + thread / 32 * 16 + lane / 4 + i % 4 / 2 * 8] = total[i];
    meet();
    const int first_row = row_block * kBlock, count = min(kRows, rows - first_row);
    if (p.gated) {
      constexpr int kEights = kColumns / 16;
      for (int i = thread; i < count * kEights; i += 128 * kGroups) {
        const int row = i / kEights, c = i % kEights, column = column_block * (kBlock / 2) + c * 8;
        const float* gates = sums + row * kStride + c * 16;
        float values[8];
#pragma unroll
        for (int j = 0; j < 8; j++)
          values[j] = column + j < p.y.width ? gated(p, column + j, gates[j], gates[8 + j]) : 0;
        put_eight(p.y, first_row + row, column, p.y.width, values);
      }
    } else {
      constexpr int kEights = kColumns / 8;
#pragma unroll 2
      for (int i = thread; i < count * kEights; i += 128 * kGroups) {
        const int row = i / kEights, c = i % kEights * 8;
        finish_eight(p, first_row + row, column_block * kBlock + c, sums + row * kStride + c);
      }
    }
  }
  __syncwarp();
  cluster_barrier();  // the other block may still tell this one's barriers
#endif
}

}  // namespace

void linear_wide(const Product& p, int rows, const Queue& queue) {
  allow_shared(linear_wide_kernel, kSharedBytes);
  const int pairs = ceil_div(p.w.n, kPair * kColumns);
  start_clusters(queue, linear_wide_kernel, dim3(kPair, pairs * ceil_div(rows, kRows)), dim3(kPair), kThreads,
                 kSharedBytes, p, rows, Pieces(p.w.n, p.w.k));
  launched("linear in bfloat16, many rows");
}

}  // namespace cuda
}  // namespace as
