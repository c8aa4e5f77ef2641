// Stream-K GEMMs of quantized weights with bfloat16 activations by wgmma.
#include "cuda/kernels/gemm/gemm_quantized.h"
#include "cuda/kernels/gemm/gemm_quantized_stream_k.cuh"

namespace as::cuda {

void gemm_quantized_stream_k(const GemmArgs& p, int rows, const Queue& queue) {
  const bool fine = p.w.quants.groups > 1 && p.w.quants.group < kBlock;
  if (p.w.quants.bits == 4 && fine) start_quantized_stream_k<Rounded<4, true>>(p, rows, queue);
  else if (p.w.quants.bits == 4) start_quantized_stream_k<Rounded<4, false>>(p, rows, queue);
  else if (fine) start_quantized_stream_k<Rounded<8, true>>(p, rows, queue);
  else start_quantized_stream_k<Rounded<8, false>>(p, rows, queue);
}

}  // namespace as::cuda
