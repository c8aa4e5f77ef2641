// Products of quantized weights with activations in bfloat16.
#pragma once
#include "cuda/kernels/gemm/gemm.h"

namespace as::cuda {

// By mma.sync: any chip. By wgmma: chips of capability 9.0.
void gemm_quantized_mma(const GemmArgs& p, int rows, const Queue& queue);
void gemm_quantized_stream_k(const GemmArgs& p, int rows, const Queue& queue);
// By mma.sync, of one row, which it may norm itself. Chips of capability 9.0.
void gemv_quantized(const GemmArgs& p, const Queue& queue);

}  // namespace as::cuda
