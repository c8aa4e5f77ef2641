// Which ops of a program are computed together: what is between them need not pass through memory, or wait for all
// threads.
//
// clang-format off
//   head_norm, rope, span_attention   heads are normed and rotated as they enter the cache, or become queries
//   rms_norm, linear                  each row is normed as the linear wants its rows; a single one by every thread for
//                                     itself
//   linear, silu_mul                  n columns instead of 2n leave the caches
//   linear, add                       each thread adds the columns that it has made
//   all_reduce, add, rms_norm         ranks and threads go on with whole rows
//   lora, lora                        adapters' matrices for one linear share its rows
// clang-format on
//
// Every value is made by the same operations in the same order as by the ops one by one.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "program/program.h"

namespace as {

// Ops of a program, by number, that run as one.
struct FusedOp {
  std::vector<int> parts;
  std::string name;  // the parts' names, joined by +
};

// alone: there is one rank, so that all_reduce does nothing. adapters: whether rows may have adapters; otherwise the
// ops named lora, between a linear and what it could be fused with, are left out. gates: whether the backend computes
// this linear together with the silu_mul that follows it.
std::vector<FusedOp> fuse(const Program& program, bool alone, bool adapters,
                          const std::function<bool(const OpNode&)>& gates);
// Every op by itself.
std::vector<FusedOp> one_by_one(const Program& program, bool adapters);

// The linear that alone reads what ops[op] writes to `tensor`, or null. An expert_linear is one for another's rows.
const OpNode* only_linear(const Program& program, const std::vector<FusedOp>& ops, size_t op, int tensor);

// Tensors that no op but those of one fused op sees: gate and up of a gated linear.
std::vector<bool> never_written(const Program& program, const std::vector<FusedOp>& ops);

// Whether what ops[op] leaves in a tensor is next read by a sum over ranks that adds to it: then each rank needs but
// its own rows of it.
bool feeds_sum(const Program& program, const std::vector<FusedOp>& ops, size_t op, int tensor);

Cost cost_of(const Program& program, const FusedOp& op, const StepSize& size);

}  // namespace as
