// Products of activations of 8 bits by wgmma: of integers (linear_integer.h) and of floats (linear_float8.h).
#include "cuda/kernels/gemm/linear_wgmma.h"
#include "cuda/kernels/gemm/quantized_stream.cuh"

namespace as {
namespace cuda {

void linear_integer_stream(const Product& p, int rows, const Queue& queue) {
  if (p.w.codes.bits == 4) start_quantized_stream<Integers<4>>(p, rows, queue);
  else if (p.w.codes.groups == 1) start_quantized_stream<Integers<8, true>>(p, rows, queue);
  else start_quantized_stream<Integers<8>>(p, rows, queue);
}

void linear_float8_stream(const Product& p, int rows, const Queue& queue) {
  start_quantized_stream<Floats>(p, rows, queue);
}

void linear_float8(const Product& p, int rows, const Queue& queue, By by) {
  if (by == By::any && linear_few_bytes(p, rows, queue)) return;
  if (by == By::any) by = rows > kMostStreamed ? By::wide : By::stream;
  if (by == By::wide) linear_float8_wide(p, rows, queue);
  else linear_float8_stream(p, rows, queue);
}

bool linear_byte_row(const Product& p, const Queue& queue) {
  if (queue.capability != 90 || !p.w.takes_bytes()) return false;
  if (has_linear_row(p, queue)) return linear_row(p, queue), true;
  if (!p.unnormed || p.w.k > kNormedBytes) return false;
  if (p.w.kind == Kind::float8) start_stream_rows<Floats, 8, 4, true>(p, 1, queue);
  else if (p.w.codes.bits == 4) start_stream_rows<Integers<4>, 8, 4, true>(p, 1, queue);
  else if (p.w.codes.groups == 1) start_stream_rows<Integers<8, true>, 8, 4, true>(p, 1, queue);
  else start_stream_rows<Integers<8>, 8, 4, true>(p, 1, queue);
  return true;
}

}  // namespace cuda
}  // namespace as
