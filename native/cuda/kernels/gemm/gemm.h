// Products of activations and weights.
#pragma once
#include "cuda/kernels/norm/norm.h"
#include "cuda/kernels/quantize/quantize.h"

namespace as {
namespace cuda {

// y = x w^T + bias, or that added to what y has. gated: silu of the first half of the sums times the second, w being
// what pair_rows() made.
struct Product {
  Matrix w;
  const float* bias = nullptr;
  bool adds = false, gated = false;
  Rows x, y;
  uint16_t* widened = nullptr;      // of codes: widened_bytes() to work in
  ByteRows bytes = {};              // of activations of 8 bits: what x has been quantized into
  const float* unnormed = nullptr;  // if any: the one row whose norm x would be, which the product norms itself
  Norm norm = {};
};

void gemm_f32(const Product& p, int rows, const Queue& queue);
// The bits are the same by every kernel: mma.sync, or wgmma (chips of capability 9.0 alone) with pieces side by side
// for some rows or in a stream of weights, or one after the other for many.
enum class GemmAlgo { any, mma, split_k, stream_k, prefill };
void gemm_dtype16(const Product& p, int rows, const Queue& queue, GemmAlgo algo = GemmAlgo::any);
// Whether it norms such rows itself, if asked to.
bool gemm_dtype16_norms(const Product& p, int rows, const Queue& queue);
// Of codes, with activations in bfloat16.
void gemm_quantized(const Product& p, int rows, const Queue& queue, GemmAlgo algo = GemmAlgo::any);
// Whether it norms such rows itself, if asked to.
bool gemm_quantized_norms(const Product& p, int rows, const Queue& queue);
// What that takes for a matrix [n, k] and so many rows at most; gated: n as pair_rows() makes it.
size_t widened_bytes(int n, int k, bool gated, int rows);
// Of integers: what is multiplied is p.bytes.
void gemm_integer(const Product& p, int rows, const Queue& queue, GemmAlgo algo = GemmAlgo::any);
// The same of floats of 8 bits; for chips of capability 9.0.
void gemm_float8(const Product& p, int rows, const Queue& queue, GemmAlgo algo = GemmAlgo::any);

// Of one row, p.x or p.unnormed, which becomes 8 bits on its way; false, and nothing is done: there is no kernel that
// does so. Chips of capability 9.0.
bool gemv_8bit(const Product& p, const Queue& queue);

}  // namespace cuda
}  // namespace as
