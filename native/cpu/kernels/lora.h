// Products with the two matrices of an adapter (cpu/adapters.h), for each instruction set: each has few rows or few
// columns, and is for few rows of a step, so that reading it is most of the work. Tables of their own: padding to a
// panel, as other matrices have it, would double what is read.
#pragma once
#include "cpu/kernels/format.h"

namespace as {

struct LoraKernels {
  int lanes;  // of a vector
  // Rows of a panel of A and of B, both laid out as [k][panel].
  int a_panel() const { return lanes; }
  int b_panel() const { return 2 * lanes; }
  // u [rows, whole panels of a] = scale * (a x), each of the rows x[i] of a.k values.
  void (*shrink)(const Packed& a, const float* const* x, int rows, float scale, float* u, int ldu);
  // y[i] += b u: columns of the panels [p0, p1) of the rows y[i], of b.n values.
  void (*expand)(const Packed& b, const float* u, int ldu, float* const* y, int rows, int p0, int p1);
};

// Those of the kernels in use.
const LoraKernels& lora_kernels();

}  // namespace as
