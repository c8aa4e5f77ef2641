// The kernels that a model's step would take, for benchmarks that launch them one by one. Compile with
// native/cuda/kernel_choice.cpp.
#pragma once
#include "cuda/kernel_choice.h"
#include "cuda/kernels/by_dtype16.h"
#include "cuda/kernels/common/shared_limit.h"

namespace as {
namespace cuda {

inline Chip chip_of(const Queue& queue) {
  int device = 0, sms = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  return {queue.capability, sms, max_shared(), sms / 2};
}

inline AttentionChoice choice_of(const Attention& a, const Queue& queue) {
  return choose_attention(chip_of(queue), a.cache.type, a.cache.head_dim, a.slopes);
}

// fused: p.unnormed is normed, or p.x quantized, by the kernel.
inline GemmChoice chosen(const GemmArgs& p, int rows, const Queue& queue, GemmAlgo wanted = GemmAlgo::any) {
  Gemm gemm = gemm_of(p);
  gemm.normed = p.unnormed, gemm.fuses = p.unnormed || p.w.takes_bytes(), gemm.pushed = p.y.copy;
  return choose_gemm(chip_of(queue), gemm, rows, wanted);
}
// What is chosen once the row has been normed, and quantized.
inline GemmAlgo plain(GemmArgs p, int rows, const Queue& queue, GemmAlgo wanted = GemmAlgo::any) {
  Gemm gemm = gemm_of(p);
  gemm.pushed = p.y.copy;
  return choose_gemm(chip_of(queue), gemm, rows, wanted).algo;
}

}  // namespace cuda
}  // namespace as
