// Sums over ranks.
#pragma once
#include <vector>

#include "cuda/ops/ops.h"

namespace as::cuda {

// Whether the partial sums that ops[all_reduce] adds have 16 bits; otherwise they are float32.
bool sums_in_dtype16(const std::vector<OpNode>& ops, const Weights& weights, size_t all_reduce);
// Bytes of a rank's partial sum for the program's largest all_reduce, in steps of up to max_rows rows.
size_t largest_partial(const Program& program, const Weights& weights, int max_rows, int max_outputs);

// Adds a sum without rows at the beginning of a form that has an odd number of sums: see Binding::calls.
void bind_first_call(Binding& b);

}  // namespace as::cuda
