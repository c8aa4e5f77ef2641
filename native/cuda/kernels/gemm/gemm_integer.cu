// Integer GEMMs (gemm_integer.h).
#include "cuda/kernels/gemm/gemm_mma.cuh"
#include "cuda/kernels/gemm/gemm_wgmma.h"

namespace as::cuda {
namespace {

constexpr int kMostShared = 108 << 10;  // two CTAs fit an SM of Hopper or the A100

template <int kBits, int kTiles, int kColumnTiles>
void start_tiles(const GemmArgs& p, int rows, const Queue& queue) {
  constexpr int kStages = kTiles == 1 ? (kBits == 4 ? 9 : 7) : kTiles == 2 ? 5 : kTiles == 4 ? 4 : 3;
  using Type = WeightType<kBits, Scales::blocks>;
  start_gemm_mma<MmaShape<Type, true, kTiles, kColumnTiles, kStages, kMostShared>>(p, rows, queue);
}

template <int kBits>
void start_rows(const GemmArgs& p, int rows, const Queue& queue) {
  if (rows <= 2 && p.w.n < kManyColumns) start_tiles<kBits, 1, 1>(p, rows, queue);
  else if (rows <= 8) start_tiles<kBits, 1, 2>(p, rows, queue);
  else if (rows <= 16) start_tiles<kBits, 2, 2>(p, rows, queue);
  else if (rows <= 32) start_tiles<kBits, 4, 2>(p, rows, queue);
  else start_tiles<kBits, 8, 2>(p, rows, queue);
}

}  // namespace

void gemm_integer(const GemmArgs& p, int rows, const Queue& queue, GemmAlgo algo) {
  if (algo == GemmAlgo::small_m) gemm_few_rows_8bit(p, rows, queue);
  else if (algo == GemmAlgo::prefill) gemm_integer_prefill(p, rows, queue);
  else if (algo == GemmAlgo::stream_k) gemm_integer_stream_k(p, rows, queue);
  else if (p.w.quants.bits == 4) start_rows<4>(p, rows, queue);
  else start_rows<8>(p, rows, queue);
}

}  // namespace as::cuda
