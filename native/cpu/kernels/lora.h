// LoRA kernels: GEMMs with the two matrices of an adapter (cpu/adapters.h). Both matrices are narrow and serve few rows
// of a step, so reading them dominates. They have their own kernels, because padding them to the panels of other
// matrices would double the bytes read.
#pragma once
#include "cpu/kernels/format.h"

namespace as {

struct LoraKernels {
  int lanes;  // of a vector
  // Rows of a panel of A and of B, both laid out as [k][panel].
  int a_panel() const { return lanes; }
  int b_panel() const { return 2 * lanes; }
  // u [rows, whole panels of a] = scale * (a x), for rows x[i] of a.k values each.
  void (*shrink)(const Packed& a, const float* const* x, int rows, float scale, float* u, int ldu);
  // y[i] += b u, for columns of the panels [p0, p1) of rows y[i] of b.n values each.
  void (*expand)(const Packed& b, const float* u, int ldu, float* const* y, int rows, int p0, int p1);
};

// The LoRA kernels of the instruction set in use.
const LoraKernels& lora_kernels();

}  // namespace as
