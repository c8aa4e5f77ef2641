// 16-bit GEMMs. mma.sync has tiles of 16 columns for few rows.
#include "cuda/kernels/gemm/gemm_mma.cuh"
#include "cuda/kernels/gemm/gemm_wgmma.h"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace {

constexpr int kMostShared = 112 << 10;  // two CTAs fit an SM of Hopper or the A100

template <int kTiles, int kStages>
using Shape = MmaShape<WeightType<16, Scales::none>, false, kTiles, 1, kStages, kMostShared>;

// Up to eight rows. If no SM has more than two CTAs, a deeper pipeline prefetches more weights before the rows are
// ready.
void start_few(const GemmArgs& p, int rows, const Queue& queue) {
  constexpr int kDeep = 8;
  const bool few = ceil_div(p.w.n, kTileRows) <= 2 * sm_count();
  if (queue.capability == 90 && few && SplitK(p.w.k, p.w.max_split_k).length >= kDeep)
    return start_gemm_mma<Shape<1, kDeep>>(p, rows, queue, kMaxSplitK);
  start_gemm_mma<Shape<1, 5>>(p, rows, queue);
}

}  // namespace

void gemm_dtype16(const GemmArgs& p, int rows, const Queue& queue, GemmAlgo algo) {
  if (algo == GemmAlgo::gemv) return gemv(p, queue);
  if (algo == GemmAlgo::split_k) return gemm_split_k(p, rows, queue);
  if (algo == GemmAlgo::stream_k) return gemm_stream_k(p, rows, queue);
  if (algo == GemmAlgo::prefill) return gemm_prefill(p, rows, queue);
  if (algo == GemmAlgo::mma_prefill) return gemm_mma_prefill(p, rows, queue);
  if (rows <= 8) start_few(p, rows, queue);
  else if (rows <= 16) start_gemm_mma<Shape<2, 4>>(p, rows, queue);
  else if (rows <= 32) start_gemm_mma<Shape<4, 3>>(p, rows, queue);
  else start_gemm_mma<Shape<8, 2>>(p, rows, queue);
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
