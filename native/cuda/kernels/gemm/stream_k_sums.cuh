// How the CTAs of a stream-K GEMM of quantized weights (gemm_quantized_stream_k.cuh) pass sums on to each other.
#pragma once
#include "cuda/kernels/common/tiles.h"
#include "cuda/kernels/common/waits.cuh"
#include "cuda/kernels/gemm/stream_k_copies.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
__device__ inline void leave(int* flag) { asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(flag) : "memory"); }
// Not inlined: with a bounded loop inlined, ptxas spills up to 300 bytes of a thread's sums.
static __device__ __noinline__ void take(int* flag, int* given_up) {
  await_flag(flag, Waiter::gemm_quantized_stream_k, given_up);
  asm volatile("st.relaxed.gpu.global.s32 [%0], 0;" ::"l"(flag) : "memory");
}
__device__ inline int arrive(int* count) {
  int before;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(before) : "l"(count) : "memory");
  return before;
}
// Arrives with a split-K part of a tile, of whose rows the CTAs add up several eights each. Returns the first of the
// CTA's own. The last CTA has the first, and does not wait. Not inlined, see take().
constexpr int kLeaving = 1 << 16;
static __device__ __noinline__ int arrive_and_wait(int* count, int k_parts, int eights, int* given_up) {
  const int first = k_parts - 1 - arrive(count) % kLeaving;
  if (first > 0 && first < eights)
    await_flag(count, Waiter::gemm_quantized_stream_k, given_up, [&](int now) { return now % kLeaving == k_parts; });
  return first;
}
__device__ inline void group_barrier(int group) {
  asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "n"(kGroupThreads) : "memory");
}
#endif

template <typename Sum, int kValues>
__device__ inline void clear(Sum (&d)[kValues]) {
#pragma unroll
  for (int i = 0; i < kValues; i++) d[i] = 0;
}

// Adds all split-K parts in ascending order. With few values, all loads are issued before the first addition.
template <int kValues, int kStride, size_t kPiece>
__device__ inline void add_parts(const float* from, int k_parts, float (&sums)[kValues]) {
  if constexpr (kValues <= 16) {
    constexpr int kTogether = 4;
#pragma unroll
    for (int first = 0; first < kValues; first += kTogether) {
      float all[kMaxQuantSplitK][kTogether];
#pragma unroll
      for (int k_part = 0; k_part < kMaxQuantSplitK; k_part++)
#pragma unroll
        for (int i = 0; i < kTogether; i++)
          if (k_part < k_parts) all[k_part][i] = __ldcg(from + k_part * kPiece + (first + i) * kStride);
#pragma unroll
      for (int i = 0; i < kTogether; i++) sums[first + i] = all[0][i];
#pragma unroll
      for (int k_part = 1; k_part < kMaxQuantSplitK; k_part++)
#pragma unroll
        for (int i = 0; i < kTogether; i++)
          if (k_part < k_parts) sums[first + i] = __fadd_rn(sums[first + i], all[k_part][i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kValues; i++) sums[i] = __ldcg(from + i * kStride);
    for (int k_part = 1; k_part < k_parts; k_part++) {
      from += kPiece;
#pragma unroll
      for (int i = 0; i < kValues; i++) sums[i] = __fadd_rn(sums[i], __ldcg(from + i * kStride));
    }
  }
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
