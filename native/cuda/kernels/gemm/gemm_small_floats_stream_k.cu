// Stream-K GEMMs of small floats (Codes in kernels/common/quantized.h) with bfloat16 activations by wgmma.
#include "cuda/kernels/gemm/gemm_quantized.h"
#include "cuda/kernels/gemm/gemm_quantized_stream_k.cuh"

namespace as::cuda {

void gemm_small_floats_stream_k(const GemmArgs& p, int rows, const Queue& queue) {
  by_small_floats(p.w.quants, [&](auto type) { start_quantized_stream_k<Rounded<decltype(type)>>(p, rows, queue); });
}

}  // namespace as::cuda
