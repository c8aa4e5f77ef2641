// Exchanges values among the lanes of a warp.
#pragma once
#include "cuda/kernels/common/device.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {

// Transposes an 8 x 8 matrix of 16-bit values; lane 4 r + q has values 2 q and 2 q + 1 of its row r.
__device__ __forceinline__ uint32_t transposed(uint32_t pair) {
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(pair));
  return pair;
}

// Transposes four words each of four lanes: word i of all of them goes to lane i.
__device__ inline void exchange(uint32_t (&words)[4]) {
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t found = __shfl_xor_sync(0xffffffffu, odd ? words[i] : words[i + 1], 1);
    words[i] = odd ? found : words[i], words[i + 1] = odd ? words[i + 1] : found;
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint32_t found = __shfl_xor_sync(0xffffffffu, high ? words[i] : words[i + 2], 2);
    words[i] = high ? found : words[i], words[i + 2] = high ? words[i + 2] : found;
  }
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
