// GEMMs of each head with its own matrix: latent attention's projections of queries and of weighted sums of latents.
// A CTA computes 64 columns of a head for some rows. It copies some blocks of the matrix at a time, and rounds the
// rows' float32 values. Each value is one chain of tensor-core multiply-adds in ascending order, whatever the rows of a
// CTA.
#include <algorithm>

#include "cuda/kernels/common/device.cuh"
#include "cuda/kernels/gemm/gemm_heads.h"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace {

constexpr int kThreads = 128, kFewRows = 16, kManyRows = 64;

// kRows: rows of a CTA, in tiles of 16. kBlocks: blocks of the matrix in shared memory.
template <int kRows, int kBlocks>
__global__ void __launch_bounds__(kThreads) gemm_heads_kernel(HeadGemm p, int rows) {
  extern __shared__ __align__(128) char memory[];
  constexpr int kTiles = kRows / 16, kDepth = kBlocks * kBlock, kRowBlock = kRows * kRowBytes;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, n = p.w.n, k = p.w.k, depth_blocks = blocks_of(k);
  const int head = blockIdx.y, column0 = blockIdx.x * kBlock, row0 = blockIdx.z * kRows;
  const uint32_t weights = shared_address(memory), xs = weights + kBlocks * kBlockBytes;
  const char* from = reinterpret_cast<const char*>(p.w.tiles) +
                     (size_t)head * blocks_of(n) * depth_blocks * kBlockBytes +
                     (size_t)blockIdx.x * depth_blocks * kBlockBytes;
  const float* x = p.x + (size_t)row0 * p.width + (size_t)head * k;
  const bool aligned = (reinterpret_cast<uintptr_t>(p.x) / 4 | p.width | k) % 4 == 0;
  float sums[kTiles][2][4] = {};
  let_next_begin();
  for (int b0 = 0; b0 < depth_blocks; b0 += kBlocks) {
    const int blocks = min(kBlocks, depth_blocks - b0), chunks = blocks * (kBlockBytes / 16);
    if (b0) __syncthreads();
    for (int i = threadIdx.x; i < chunks; i += kThreads)
      copy_16(weights + i * 16, from + (size_t)b0 * kBlockBytes + i * 16);
    commit_copies();
    if (!b0) await_previous();
    for (int i = threadIdx.x; i < kRows * blocks * 8; i += kThreads) {  // eight columns of a row
      const int row = i / (blocks * 8), chunk = i % (blocks * 8), column = b0 * kBlock + chunk * 8;
      float values[8] = {};
      if (row0 + row < rows && column < k) {
        const float* own = x + (size_t)row * p.width;
        if (aligned) read_eight(own, column, k, values);
        else
          for (int j = 0; j < 8 && column + j < k; j++) values[j] = own[column + j];
      }
      *reinterpret_cast<uint4*>(memory + kBlocks * kBlockBytes + chunk / 8 * kRowBlock + chunk_offset(row, chunk % 8)) =
          make_uint4(to_dtype16x2(values[0], values[1]), to_dtype16x2(values[2], values[3]),
                     to_dtype16x2(values[4], values[5]), to_dtype16x2(values[6], values[7]));
    }
    wait_copies<0>();
    __syncthreads();
#pragma unroll 4
    for (int s = 0; s < min(kDepth, blocks * kBlock) / 16; s++) {
      const int block = s / 4, chunk = s % 4 * 2;
      uint32_t w[4];
      load_cores(
          w, weights + block * kBlockBytes + chunk_offset(warp * 16 + lane / 16 * 8 + lane % 8, chunk + lane / 8 % 2));
#pragma unroll
      for (int t = 0; t < kTiles; t++) {
        uint32_t a[4];
        load_cores(a, xs + block * kRowBlock + chunk_offset(t * 16 + lane % 16, chunk + lane / 16));
        multiply_add(sums[t][0], a, w[0], w[1]);
        multiply_add(sums[t][1], a, w[2], w[3]);
      }
    }
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

template <int kRows, int kBlocks>
void start_heads(const HeadGemm& p, int rows, const Queue& queue) {
  constexpr int kBytes = kBlocks * (kBlockBytes + kRows * kRowBytes);
  const auto kernel = gemm_heads_kernel<kRows, kBlocks>;
  start(queue, kernel, dim3(blocks_of(p.w.n), p.w.experts, ceil_div(rows, kRows)), kThreads, kBytes, p, rows);
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
  if (p.w.kind == Kind::f32)
    start(queue, gemm_heads_f32_kernel, dim3(ceil_div((size_t)p.w.n * p.w.experts, kThreads), rows), kThreads, 0, p,
          rows);
  else if (rows <= kFewRows) start_heads<kFewRows, 8>(p, rows, queue);
  else start_heads<kManyRows, 2>(p, rows, queue);
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
