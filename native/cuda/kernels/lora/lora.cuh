// Shared parts of the LoRA kernels: the adapters of rows, and the places of their columns.
#pragma once
#include "cuda/kernels/gemm/epilogue.cuh"
#include "cuda/kernels/lora/lora.h"

namespace as::cuda {
namespace AS_DTYPE16 {

// add_lora() of 16-bit matrices, by mma.sync.
void add_lora_dtype16(const AdaptedSums& a, int rows, const Queue& queue);

#ifdef __CUDACC__

// The adapter of a row of y.
__device__ inline int adapter_of(const AdaptedSums& a, int row, int rows) {
  if (row >= rows) return -1;
  return a.adapters[a.chosen ? a.chosen[row] : row];
}

// Where a linear's output column is in a row of y.
__device__ inline int place_of(const AdaptedSums& a, int column) {
  if (!a.paired_gates) return column;
  const int of_kind = column < a.paired_gates ? column : column - a.paired_gates;
  return of_kind / 8 * 16 + of_kind % 8 + (column < a.paired_gates ? 0 : 8);
}

#endif

}  // namespace AS_DTYPE16
}  // namespace as::cuda
