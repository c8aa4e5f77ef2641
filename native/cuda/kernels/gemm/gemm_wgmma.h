// 16-bit GEMMs on capability 9.0: wgmma, and gemv for one row.
#pragma once
#include "cuda/kernels/common/dtype16.h"
#include "cuda/kernels/gemm/gemm.h"

namespace as::cuda {
namespace AS_DTYPE16 {

void gemm_stream_k(const GemmArgs& p, int rows, const Queue& queue);
void gemm_split_k(const GemmArgs& p, int rows, const Queue& queue);
void gemm_prefill(const GemmArgs& p, int rows, const Queue& queue);
// Many rows by mma.sync. wanted: the number of a shape, for benchmarks.
void gemm_mma_prefill(const GemmArgs& p, int rows, const Queue& queue, int wanted = -1);
// One row, matrices with split-K: p.x, or p.unnormed, which the kernel normalizes (and quantizes) itself.
void gemv(const GemmArgs& p, const Queue& queue);
// Few rows p.bytes, 8-bit matrices with split-K.
void gemm_few_rows_8bit(const GemmArgs& p, int rows, const Queue& queue);

}  // namespace AS_DTYPE16
}  // namespace as::cuda
