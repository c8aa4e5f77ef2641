// Linears, and how other ops use them.
#pragma once
#include "cuda/kernel_choice.h"
#include "cuda/ops/ops.h"

namespace as::cuda {

// Launches the kernel that was chosen.
void launch_gemm(const GemmArgs& p, int rows, GemmChoice choice, const Queue& queue);
// norms: also computes ops[i - 1], which is a norm.
int bind_linear(Binding& b, size_t i, bool norms);
// The linear of a shared expert's gate, and what adds the gated expert to the routed ones and to the residual stream.
// Returns 0, without a launch, if other ops follow the linear.
int bind_shared_sum(Binding& b, size_t i);
// logits: also computes ops[i - 1], the linear that makes them.
int bind_router(Binding& b, size_t i, bool logits);

}  // namespace as::cuda
