// Rewrites a program into one with fused ops: what is between them need not pass through memory, or wait for all
// threads.
//
//   add, rms_norm       add+rms_norm      row by row
//   linear, silu_mul    linear+silu_mul   n columns instead of 2n leave the caches
//
// Every value is made by the same operations in the same order as by the ops one by one.
#pragma once
#include <functional>
#include <vector>

#include "program/program.h"

namespace as {

// An op to be run: one of a program's, or `count` from number `first` on together.
struct FusedOp {
  OpNode op;
  int first, count;
};

// gates: whether the backend computes a linear together with the silu_mul that follows it.
std::vector<FusedOp> fuse(const Program& program, const std::function<bool(const OpNode&)>& gates);

// The linear that alone reads what ops[writer] writes to `tensor`, or null.
const OpNode* only_reader(const std::vector<FusedOp>& ops, size_t writer, int tensor);

}  // namespace as
