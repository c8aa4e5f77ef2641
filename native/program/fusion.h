// Fusion: which ops of a program are computed together. Values between them then need not pass through memory, and
// threads need not wait for each other.
//
// clang-format off
//   head_norm, rope, span_attention   heads are normed and rotated when they enter the cache or become queries
//   rms_norm, linear                  norms write rows in the GEMM's format; every thread norms a single row by itself
//   linear, silu_mul                  n columns instead of 2n leave the caches
//   linear, add                       each thread adds the columns that it computed
//   all_reduce, add, rms_norm         ranks and threads continue with whole rows
//   lora, lora                        the adapters' matrices of one linear share its rows
// clang-format on
//
// Fused and unfused ops do the same operations in the same order, so the bits are equal.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "program/program.h"

namespace as {

// Ops of a program, by index, that run as one.
struct FusedOp {
  std::vector<int> parts;
  std::string name;  // the parts' names, joined by +
};

// alone: there is one rank, so all_reduce does nothing. adapters: rows may have adapters; otherwise ops of adapters are
// left out, which allows more fusion. gates: whether the backend can fuse this linear with the silu_mul that follows
// it.
std::vector<FusedOp> fuse(const Program& program, bool alone, bool adapters,
                          const std::function<bool(const OpNode&)>& gates);
// Every op by itself.
std::vector<FusedOp> one_by_one(const Program& program, bool adapters);

// The linear that is the only reader of `tensor`, which ops[op] writes, or null. After an expert_linear, an
// expert_linear counts too.
const OpNode* only_linear(const Program& program, const std::vector<FusedOp>& ops, size_t op, int tensor);

// Tensors that exist only inside one fused op, such as gate and up of a gated linear.
std::vector<bool> never_written(const Program& program, const std::vector<FusedOp>& ops);

// Whether the next reader of `tensor`, after ops[op] has written it, is a sum over ranks that adds to it. If so, each
// rank needs only its own rows of the tensor.
bool feeds_sum(const Program& program, const std::vector<FusedOp>& ops, size_t op, int tensor);

Cost cost_of(const Program& program, const FusedOp& op, const StepSize& size);

}  // namespace as
