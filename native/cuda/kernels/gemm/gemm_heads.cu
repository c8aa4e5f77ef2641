// GEMMs of each head with its own matrix: latent attention's projections of queries and of weighted sums of latents,
// DeepSeek-V4's output projection in groups. A CTA computes some columns of a head for some rows. It copies some blocks
// of the matrix at a time, of long rows some ahead, and rounds the rows' float32 values. Each value is one chain of
// tensor-core multiply-adds in ascending order, whatever the rows of a CTA.
#include <algorithm>

#include "cuda/kernels/common/device.cuh"
#include "cuda/kernels/gemm/gemm_heads.h"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace {

constexpr int kBlockThreads = 128, kFewRows = 16, kManyRows = 64;  // threads for 64 columns

// kRows: rows of a CTA, in tiles of 16. kBlocks: blocks of the depth in shared memory, of each of kWide blocks of
// columns. kStages: 2 if the next blocks arrive while some are multiplied.
template <int kRows, int kBlocks, int kWide, int kStages>
__global__ void __launch_bounds__(kWide* kBlockThreads) gemm_heads_kernel(HeadGemm p, int rows) {
  extern __shared__ __align__(128) char memory[];
  constexpr int kThreads = kWide * kBlockThreads, kTiles = kRows / 16, kRowBlock = kRows * kRowBytes;
  constexpr int kWeights = kWide * kBlocks * kBlockBytes, kStage = kWeights + kBlocks * kRowBlock;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, n = p.w.n, k = p.w.k, depth_blocks = blocks_of(k);
  const int head = blockIdx.y, column0 = blockIdx.x * kWide * kBlock, row0 = blockIdx.z * kRows;
  const char* from = reinterpret_cast<const char*>(p.w.tiles) +
                     ((size_t)head * blocks_of(n) + blockIdx.x * kWide) * depth_blocks * kBlockBytes;
  const int wide = min(kWide, blocks_of(n) - (int)blockIdx.x * kWide);  // blocks of columns that there are
  const float* x = p.x + (size_t)row0 * p.width + (size_t)head * k;
  const bool aligned = (reinterpret_cast<uintptr_t>(p.x) / 4 | p.width | k) % 4 == 0;
  float sums[kTiles][2][4] = {};
  const auto copy_weights = [&](int b0) {
    const int chunks = min(kBlocks, depth_blocks - b0) * (kBlockBytes / 16);
    const uint32_t to = shared_address(memory) + b0 / kBlocks % kStages * kStage;
    for (int c = 0; c < wide; c++)
      for (int i = threadIdx.x; i < chunks; i += kThreads)
        copy_16(to + c * kBlocks * kBlockBytes + i * 16, from + ((size_t)c * depth_blocks + b0) * kBlockBytes + i * 16);
    commit_copies();
  };
  const auto round_rows = [&](int b0) {
    const int blocks = min(kBlocks, depth_blocks - b0);
    char* to = memory + b0 / kBlocks % kStages * kStage + kWeights;
    for (int i = threadIdx.x; i < kRows * blocks * 8; i += kThreads) {  // eight columns of a row
      const int row = i / (blocks * 8), chunk = i % (blocks * 8), column = b0 * kBlock + chunk * 8;
      float values[8] = {};
      if (row0 + row < rows && column < k) {
        const float* own = x + (size_t)row * p.width;
        if (aligned) read_eight(own, column, k, values);
        else
          for (int j = 0; j < 8 && column + j < k; j++) values[j] = own[column + j];
      }
      *reinterpret_cast<uint4*>(to + chunk / 8 * kRowBlock + chunk_offset(row, chunk % 8)) =
          make_uint4(to_dtype16x2(values[0], values[1]), to_dtype16x2(values[2], values[3]),
                     to_dtype16x2(values[4], values[5]), to_dtype16x2(values[6], values[7]));
    }
  };
  let_next_begin();
  copy_weights(0);
  await_previous();
  if (kStages > 1) round_rows(0);
  for (int b0 = 0; b0 < depth_blocks; b0 += kBlocks) {
    const bool more = b0 + kBlocks < depth_blocks;
    if (kStages > 1 && more) {
      copy_weights(b0 + kBlocks);
      round_rows(b0 + kBlocks);
    }
    if (kStages == 1) {
      if (b0) copy_weights(b0);
      round_rows(b0);
    }
    if (kStages > 1 && more) wait_copies<1>();
    else wait_copies<0>();
    __syncthreads();
    const uint32_t stage = shared_address(memory) + b0 / kBlocks % kStages * kStage,
                   weights = stage + warp / 4 * kBlocks * kBlockBytes, xs = stage + kWeights;
#pragma unroll 4
    for (int s = 0; s < min(kBlocks, depth_blocks - b0) * kBlock / 16; s++) {
      const int block = s / 4, chunk = s % 4 * 2;
      uint32_t w[4];
      load_cores(w, weights + block * kBlockBytes +
                        chunk_offset(warp % 4 * 16 + lane / 16 * 8 + lane % 8, chunk + lane / 8 % 2));
#pragma unroll
      for (int t = 0; t < kTiles; t++) {
        uint32_t a[4];
        load_cores(a, xs + block * kRowBlock + chunk_offset(t * 16 + lane % 16, chunk + lane / 16));
        multiply_add(sums[t][0], a, w[0], w[1]);
        multiply_add(sums[t][1], a, w[2], w[3]);
      }
    }
    if (more) __syncthreads();
  }
#pragma unroll
  for (int t = 0; t < kTiles; t++)
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int row = row0 + t * 16 + lane / 4 + i / 2 * 8,
                  column = column0 + warp * 16 + j * 8 + lane % 4 * 2 + i % 2;
        if (row < rows && column < n) put(p.y, row, head * n + column, sums[t][j][i]);
      }
}

template <int kRows, int kBlocks, int kWide, int kStages>
void start_heads(const HeadGemm& p, int rows, const Queue& queue) {
  constexpr int kBytes = kStages * kBlocks * (kWide * kBlockBytes + kRows * kRowBytes);
  const auto kernel = gemm_heads_kernel<kRows, kBlocks, kWide, kStages>;
  start(queue, kernel, dim3(ceil_div(blocks_of(p.w.n), kWide), p.w.experts, ceil_div(rows, kRows)),
        kWide * kBlockThreads, kBytes, p, rows);
}

// float32, for comparison: a thread for each value.
__global__ void gemm_heads_f32_kernel(HeadGemm p, int rows) {
  after_previous();
  const int column = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y, n = p.w.n, head = column / n;
  if (head >= p.w.experts) return;
  const float *x = p.x + (size_t)row * p.width + (size_t)head * p.w.k, *w = p.w.values + (size_t)column * p.w.k;
  float sum = 0;
  for (int i = 0; i < p.w.k; i++) sum = fmaf(x[i], w[i], sum);
  put(p.y, row, column, sum);
}

}  // namespace

void gemm_heads(const HeadGemm& p, int rows, const Queue& queue) {
  constexpr int kLongRow = 1024, kWideRows = 128, kMostStages = 168 << 10;  // bytes of the largest two stages
  const bool is_long = p.w.k >= kLongRow && max_shared() >= kMostStages;
  if (p.w.kind == Kind::f32)
    start(queue, gemm_heads_f32_kernel, dim3(ceil_div((size_t)p.w.n * p.w.experts, kBlockThreads), rows), kBlockThreads,
          0, p, rows);
  else if (rows <= kFewRows)
    is_long ? start_heads<kFewRows, 8, 1, 2>(p, rows, queue) : start_heads<kFewRows, 8, 1, 1>(p, rows, queue);
  else if (is_long && rows > kWideRows) start_heads<kWideRows, 2, 2, 1>(p, rows, queue);
  else if (is_long) start_heads<kManyRows, 4, 1, 2>(p, rows, queue);
  else start_heads<kManyRows, 2, 1, 1>(p, rows, queue);
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
