// Stream-K GEMMs with 8-bit activations by wgmma: integers (gemm_integer.h) and floats (gemm_float8.h).
#include "cuda/kernels/gemm/gemm_quantized_stream_k.cuh"
#include "cuda/kernels/gemm/gemm_wgmma.h"

namespace as::cuda {

void gemm_integer_stream_k(const GemmArgs& p, int rows, const Queue& queue) {
  if (p.w.quants.bits == 4) start_quantized_stream_k<Integers<4>>(p, rows, queue);
  else if (p.w.quants.groups == 1) start_quantized_stream_k<Integers<8, true>>(p, rows, queue);
  else start_quantized_stream_k<Integers<8>>(p, rows, queue);
}

void gemm_float8_stream_k(const GemmArgs& p, int rows, const Queue& queue) {
  if (p.w.has_float_groups()) start_quantized_stream_k<Floats<true>>(p, rows, queue);
  else start_quantized_stream_k<Floats<>>(p, rows, queue);
}

void gemm_float8(const GemmArgs& p, int rows, const Queue& queue, GemmAlgo algo) {
  if (algo == GemmAlgo::small_m) gemm_few_rows_8bit(p, rows, queue);
  else if (algo == GemmAlgo::prefill) gemm_float8_prefill(p, rows, queue);
  else gemm_float8_stream_k(p, rows, queue);
}

void gemv_8bit(const GemmArgs& p, const Queue& queue, GemmAlgo algo) {
  if (algo == GemmAlgo::gemv) gemv(p, queue);
  else if (p.w.has_float_groups()) start_stream_k_rows<Floats<true>, 8, 4, true>(p, 1, queue);
  else if (p.w.kind == Kind::float8) start_stream_k_rows<Floats<>, 8, 4, true>(p, 1, queue);
  else if (p.w.quants.bits == 4) start_stream_k_rows<Integers<4>, 8, 4, true>(p, 1, queue);
  else if (p.w.quants.groups == 1) start_stream_k_rows<Integers<8, true>, 8, 4, true>(p, 1, queue);
  else start_stream_k_rows<Integers<8>, 8, 4, true>(p, 1, queue);
}

}  // namespace as::cuda
