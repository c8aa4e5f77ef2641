// Linears, and what other ops do with them.
#pragma once
#include "cuda/kernel_choice.h"
#include "cuda/ops/ops.h"

namespace as::cuda {

// The kernel that was chosen.
void launch_gemm(const GemmArgs& p, int rows, GemmChoice choice, const Queue& queue);
// norms: whether ops[i - 1], a norm, is computed here, too.
int bind_linear(Binding& b, size_t i, bool norms);
// logits: whether ops[i - 1], the linear that makes them, is computed here, too.
int bind_router(Binding& b, size_t i, bool logits);

}  // namespace as::cuda
