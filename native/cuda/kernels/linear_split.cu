// Products in bfloat16 by wgmma for some rows, as when many sequences decode: all that counts is how fast the weights
// stream by, and the rows are too many for every block of threads to read them for a few columns.
//
// A cluster of blocks of threads has 64 or 128 columns (rows of the weights) and up to 256 rows of activations; each
// block computes one piece of K (tiles.h). One thread has blocks of both sides copied into shared memory, several
// stages ahead. Then all add up the pieces in ascending order, each a share of the values, out of each other's memory.
#include "cuda/kernels/linear_wgmma.h"
#include "cuda/kernels/wgmma.cuh"

namespace as {
namespace cuda {
namespace {

// kRows: of activations; kGroups: warpgroups, of 64 columns each.
template <int kRows, int kGroups>
struct Shape {
  static constexpr int kColumns = kBlock * kGroups;
  [[maybe_unused]] static constexpr int kStride = kColumns + 4;  // of sums: rows lie in different banks
  // So that several blocks fit a processor; of 256 rows one does.
  static constexpr int kStages = kRows <= 16 ? 5 : kRows <= 64 || kRows == 256 ? 4 : 3;
  static constexpr int kStageBytes = (kColumns + kRows) * kRowBytes;
  static constexpr int kThreads = 128 * kGroups + 32;
  static constexpr int kShared = kStages * kStageBytes;
};

template <int kRows, int kGroups>
__global__ void __launch_bounds__(Shape<kRows, kGroups>::kThreads)
    linear_split_kernel(const __grid_constant__ Product p, int rows, Pieces k) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = Shape<kRows, kGroups>;
  constexpr int kStages = S::kStages;
  extern __shared__ __align__(1024) char shared[];
  __shared__ uint64_t full[kStages], empty[kStages];
  const int piece = blockIdx.x, column_block = blockIdx.y * kGroups, first_row = blockIdx.z * kRows;
  const int first = piece * k.length, blocks = min(k.length, k.blocks - first);
  const int group = threadIdx.x / 128, lane = threadIdx.x % 32;
  const uint32_t stages = shared_address(shared);
  let_next_begin();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; i++) barrier_init(&full[i], 1), barrier_init(&empty[i], kGroups);
    barriers_are_there();
  }
  __syncthreads();
  if (group == kGroups) {
    if (lane == 0) {
      const int groups = min(kGroups, blocks_of(p.w.n) - column_block);
      // Of rows there are so many blocks, or a part of one.
      const int row_blocks = kRows <= kBlock ? 1 : min(kRows / kBlock, blocks_of(rows) - first_row / kBlock);
      const int row_bytes = kRows <= kBlock ? min(kRows, rows - first_row) * kRowBytes : kBlockBytes;
      const char* x = reinterpret_cast<const char*>(p.x.tiles) + first_row % kBlock * kRowBytes;
      const auto fetch_weights = [&](int b) {
        const int stage = b % kStages;
        barrier_expect(&full[stage], groups * kBlockBytes + row_blocks * row_bytes);
        for (int i = 0; i < groups; i++)
          copy_bulk(stages + stage * S::kStageBytes + i * kBlockBytes,
                    reinterpret_cast<const char*>(p.w.tiles) +
                        ((size_t)(column_block + i) * k.blocks + first + b) * kBlockBytes,
                    kBlockBytes, &full[stage]);
      };
      const auto fetch_rows = [&](int b) {
        const int stage = b % kStages;
        for (int i = 0; i < row_blocks; i++)
          copy_bulk(stages + stage * S::kStageBytes + kGroups * kBlockBytes + i * kBlockBytes,
                    x + ((size_t)(first_row / kBlock + i) * k.blocks + first + b) * kBlockBytes, row_bytes,
                    &full[stage]);
      };
      // Weights are on their way before the kernel before this one has made the rows.
      const int ahead = min(kStages, blocks);
      for (int b = 0; b < ahead; b++) fetch_weights(b);
      await_previous();
      for (int b = 0; b < ahead; b++) fetch_rows(b);
      for (int b = ahead; b < blocks; b++) {
        barrier_wait(&empty[b % kStages], (b / kStages - 1) % 2);
        fetch_weights(b), fetch_rows(b);
      }
    }
    __syncwarp();
  } else {
    float d[kRows / 2];
    for (int b = 0; b < blocks; b++) {
      const int stage = b % kStages;
      barrier_wait(&full[stage], b / kStages % 2);
      const uint32_t own = stages + stage * S::kStageBytes + group * kBlockBytes,
                     theirs = stages + stage * S::kStageBytes + kGroups * kBlockBytes;
      begin_products();
#pragma unroll
      for (int step = 0; step < 4; step++)
        Tile<kRows>::multiply(d, descriptor(own + step * kStepBytes), descriptor(theirs + step * kStepBytes),
                              step > 0 || b > 0);
      commit_products();
      wait_products<1>();
      if (b > 0 && threadIdx.x % 128 == 0) barrier_arrive(&empty[(b - 1) % kStages]);
    }
    wait_products<0>();
    settle(d);
    asm volatile("bar.sync 1, %0;" ::"n"(128 * kGroups) : "memory");  // nobody reads the stages any more
    float* sums = reinterpret_cast<float*>(shared);
#pragma unroll
    for (int i = 0; i < kRows / 2; i++)
      sums[(i / 4 * 8 + lane % 4 * 2 + i % 2) * S::kStride + threadIdx.x / 32 * 16 + lane / 4 + i % 4 / 2 * 8] = d[i];
  }
  await_previous();
  __syncwarp();
  cluster_barrier();
  // Sums of four columns: all pieces are asked for before they are added.
  const auto total = [&](int row, int column, float(&sums)[4]) {
    const uint32_t at = stages + (row * S::kStride + column) * 4;
    float4 pieces[kMostPieces];
#pragma unroll
    for (int i = 0; i < kMostPieces; i++)
      if (i < k.count) pieces[i] = read_at(at, i);
    sums[0] = pieces[0].x, sums[1] = pieces[0].y, sums[2] = pieces[0].z, sums[3] = pieces[0].w;
#pragma unroll
    for (int i = 1; i < kMostPieces; i++)
      if (i < k.count) {
        sums[0] = __fadd_rn(sums[0], pieces[i].x), sums[1] = __fadd_rn(sums[1], pieces[i].y);
        sums[2] = __fadd_rn(sums[2], pieces[i].z), sums[3] = __fadd_rn(sums[3], pieces[i].w);
      }
  };
  const int width = (p.gated ? S::kColumns / 2 : S::kColumns) / 4, there = min(kRows, rows - first_row);
  for (int i = piece * blockDim.x + threadIdx.x; i < there * width; i += k.count * blockDim.x) {
    const int row = i / width, c = i % width * 4;
    float sums[4], ups[4];
    if (p.gated) {
      const int column = column_block * (kBlock / 2) + c, gate = c / 8 * 16 + c % 8;
      total(row, gate, sums), total(row, gate + 8, ups);
#pragma unroll
      for (int j = 0; j < 4; j++)
        if (column + j < p.y.width) finish_gated(p, first_row + row, column + j, sums[j], ups[j]);
    } else {
      total(row, c, sums);
      finish<4>(p, rows, p.w.n, sums, [&](int j) { return Place{first_row + row, column_block * kBlock + c + j}; });
    }
  }
  cluster_barrier();  // others may still read
#endif
}

template <int kRows, int kGroups>
void start_split(const Product& p, int rows, const Queue& queue) {
  using S = Shape<kRows, kGroups>;
  const Pieces k(p.w.k, p.w.most_pieces);
  allow_shared(linear_split_kernel<kRows, kGroups>, S::kShared);
  start_clusters(queue, linear_split_kernel<kRows, kGroups>,
                 dim3(k.count, ceil_div(p.w.n, S::kColumns), ceil_div(rows, kRows)), dim3(k.count), S::kThreads,
                 S::kShared, p, rows, k);
  launched("linear in bfloat16, pieces side by side");
}

}  // namespace

void linear_split(const Product& p, int rows, const Queue& queue) {
  if (rows <= 16) return start_split<16, 1>(p, rows, queue);
  if (rows <= 32) return start_split<32, 1>(p, rows, queue);
  if (rows <= 64) return start_split<64, 1>(p, rows, queue);
  // Rows are read once for each block of columns: of 256 at a time weights are read once, if all clusters run at once.
#ifndef AS_SPLIT_128
  const int pieces = Pieces(p.w.k, p.w.most_pieces).count, at_once = processors() / pieces - 3;
  if (rows > 128 && ceil_div(p.w.n, 2 * kBlock) <= at_once) return start_split<256, 2>(p, rows, queue);
#endif
  start_split<128, 2>(p, rows, queue);
}

}  // namespace cuda
}  // namespace as
