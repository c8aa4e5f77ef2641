// Sums over ranks.
#pragma once
#include <vector>

#include "cuda/ops/ops.h"

namespace as::cuda {

// Whether the ranks' parts of the sum that ops[all_reduce] makes are of 16 bits, else float32.
bool sums_in_dtype16(const std::vector<OpNode>& ops, const Weights& weights, size_t all_reduce);
// Bytes of a rank's part of the program's largest sum over ranks, in steps of so many rows.
size_t largest_partial(const Program& program, const Weights& weights, int max_rows);

// Begins a form with a sum of no rows if it has an odd number of sums: see Binding::calls.
void bind_first_call(Binding& b);

}  // namespace as::cuda
