// Products by wgmma, of floats of 16 bits but for those of one row.
#pragma once
#include "cuda/kernels/common/dtype16.h"
#include "cuda/kernels/gemm/gemm.h"

namespace as::cuda {
namespace AS_DTYPE16 {

void gemm_stream_k(const GemmArgs& p, int rows, const Queue& queue);
void gemm_split_k(const GemmArgs& p, int rows, const Queue& queue);
void gemm_prefill(const GemmArgs& p, int rows, const Queue& queue);
// One row, of matrices whose sums are in pieces: of p.x, or of p.unnormed, which becomes what it should be on its way.
void gemv(const GemmArgs& p, const Queue& queue);
// Few rows of the same matrices of 8 bits, which p.bytes has.
void gemm_few_rows_8bit(const GemmArgs& p, int rows, const Queue& queue);

}  // namespace AS_DTYPE16
}  // namespace as::cuda
