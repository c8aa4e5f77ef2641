// GEMMs of activations and weights.
#pragma once
#include "cuda/kernels/norm/norm.h"
#include "cuda/kernels/quantize/quantize.h"

namespace as::cuda {

// y = x w^T + bias; adds: y += x w^T + bias. gated: y = silu(gate) * up of the two halves of the result, with w paired
// by pair_rows().
struct GemmArgs {
  Matrix w;
  const float* bias = nullptr;
  bool adds = false, gated = false;
  Rows x, y;
  uint16_t* widened = nullptr;      // for quantized weights: widened_bytes() of scratch memory
  ByteRows bytes = {};              // 8-bit activations: x quantized
  const float* unnormed = nullptr;  // or null: a single row that the kernel normalizes itself to get x
  Norm norm = {};
};

// The GEMM kernels. All give the same bits. cuda/kernel_choice.h says which ones support a GEMM on a chip.
enum class GemmAlgo {
  any,          // the fastest; not for launches
  simt,         // float32
  small_n,      // float32 of few columns
  long_k,       // the same of long rows
  mma,          // mma.sync: any chip
  mma_prefill,  // mma.sync: tiles of many rows; any chip
  gemv,         // one row
  small_m,      // a few 8-bit rows
  split_k,      // wgmma: split-K parts in parallel, in a cluster
  stream_k,     // wgmma: persistent CTAs share the weights evenly
  prefill,      // wgmma: tiles of many rows, or so many columns that each CTA has one tile
};
void gemm_f32(const GemmArgs& p, int rows, const Queue& queue);
// Like gemm_f32(), but with another order of sums; p.adds and p.gated are not supported. p.unnormed: null, or all rows,
// which the kernel normalizes itself.
void gemm_long_k(const GemmArgs& p, int rows, const Queue& queue);
// 16-bit weights: mma, mma_prefill, gemv (for p.x or p.unnormed), split_k, stream_k or prefill.
void gemm_dtype16(const GemmArgs& p, int rows, const Queue& queue, GemmAlgo algo);
// Quantized weights with bfloat16 activations: mma, gemv (for p.x or p.unnormed), stream_k or prefill.
void gemm_quantized(const GemmArgs& p, int rows, const Queue& queue, GemmAlgo algo);
// Dequantizes a quantized matrix into 16-bit tiles, as gemm_quantized() does first for many rows.
void widen_quantized(const Matrix& w, uint16_t* to, const Queue& queue);
// Scratch bytes of gemm_quantized() for a matrix [n, k] and at most this many rows. gated: n counts paired_rows().
size_t widened_bytes(int n, int k, bool gated, int rows);
// Integer weights with activations p.bytes: mma, small_m, stream_k or prefill.
void gemm_integer(const GemmArgs& p, int rows, const Queue& queue, GemmAlgo algo);
// The same with e4m3 weights, on Hopper only: small_m, stream_k or prefill.
void gemm_float8(const GemmArgs& p, int rows, const Queue& queue, GemmAlgo algo);
// One row, p.x or p.unnormed, which the kernel quantizes to 8 bits itself; Hopper only. algo: gemv, or stream_k for
// p.unnormed.
void gemv_8bit(const GemmArgs& p, const Queue& queue, GemmAlgo algo);
// Clusters of gemm_prefill()'s largest tile for whole sums that run at once.
int prefill_clusters(DType16 dtype);

}  // namespace as::cuda
