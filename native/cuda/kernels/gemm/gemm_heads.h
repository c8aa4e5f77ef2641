// GEMMs of each head with a matrix of its own.
#pragma once
#include "cuda/kernels/common/types.h"

namespace as::cuda {

// y [rows, heads * n]: each head of x times its matrix w[head] [n, k], of float32 or 16 bits. x: the first head of the
// first row; rows are `width` apart. Each sum is one chain along K.
struct HeadGemm {
  Matrix w;  // a stack
  const float* x = nullptr;
  int width = 0;
  Rows y;
};
void gemm_heads(const HeadGemm& p, int rows, const Queue& queue);

}  // namespace as::cuda
