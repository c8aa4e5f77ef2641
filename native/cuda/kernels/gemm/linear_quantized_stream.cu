// Products of quantized weights with activations in bfloat16 by wgmma.
#include "cuda/kernels/gemm/linear_quantized.h"
#include "cuda/kernels/gemm/quantized_stream.cuh"

namespace as {
namespace cuda {

void linear_quantized_stream(const Product& p, int rows, const Queue& queue) {
  const bool fine = p.w.codes.groups > 1 && p.w.codes.group < kBlock;
  if (p.w.codes.bits == 4 && fine) start_quantized_stream<Rounded<4, true>>(p, rows, queue);
  else if (p.w.codes.bits == 4) start_quantized_stream<Rounded<4, false>>(p, rows, queue);
  else if (fine) start_quantized_stream<Rounded<8, true>>(p, rows, queue);
  else start_quantized_stream<Rounded<8, false>>(p, rows, queue);
}

}  // namespace cuda
}  // namespace as
