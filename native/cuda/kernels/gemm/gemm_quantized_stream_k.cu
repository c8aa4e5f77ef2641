// Stream-K GEMMs of quantized integers with bfloat16 activations by wgmma.
#include "cuda/kernels/gemm/gemm_quantized.h"
#include "cuda/kernels/gemm/gemm_quantized_stream_k.cuh"

namespace as::cuda {

void gemm_quantized_stream_k(const GemmArgs& p, int rows, const Queue& queue) {
  by_integers(p.w.quants, [&](auto type) { start_quantized_stream_k<Rounded<decltype(type)>>(p, rows, queue); });
}

}  // namespace as::cuda
