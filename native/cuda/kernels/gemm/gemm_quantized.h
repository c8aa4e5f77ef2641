// GEMMs of quantized weights with activations in bfloat16.
#pragma once
#include "cuda/kernels/gemm/gemm.h"

namespace as::cuda {

// mma.sync, any chip; wgmma, capability 9.0.
void gemm_quantized_mma(const GemmArgs& p, int rows, const Queue& queue);
void gemm_quantized_stream_k(const GemmArgs& p, int rows, const Queue& queue);
void gemm_small_floats_stream_k(const GemmArgs& p, int rows, const Queue& queue);
// mma.sync, capability 9.0: one row, p.x or p.unnormed, which the kernel normalizes itself.
void gemv_quantized(const GemmArgs& p, const Queue& queue);

}  // namespace as::cuda
