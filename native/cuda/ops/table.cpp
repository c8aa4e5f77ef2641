// The CUDA backend's table of ops, and what their files share.
#include <map>

#include "cuda/ops/fusion.h"

namespace as::cuda {
namespace {

std::map<Op, CudaOp>& registered() {
  static std::map<Op, CudaOp> ops;
  return ops;
}

}  // namespace

RegisterCudaOp::RegisterCudaOp(Op op, Bind bind, OutputForm output) { registered()[op] = {bind, output}; }

const CudaOp& cuda_op(const OpNode& op) {
  const auto found = registered().find(op.kind());
  if (found == registered().end()) refuse(std::string("op ") + op.spec->name);
  return found->second;
}

Binding::Binding(Workspace& workspace, Weights& weights, const Ranks* ranks, std::set<int>& paired, bool adapted,
                 const Queue& queue)
    : workspace(workspace),
      weights(weights),
      ranks(ranks),
      paired(paired),
      queue(queue),
      ops(ops_of(workspace.program, adapted)) {}

void Binding::check_in_place(const OpNode& op) const {
  if (out(op).values() != in(op).values()) refuse(std::string("op ") + op.spec->name + " into another tensor");
}

Norm norm_of(const OpNode& op, const float* weight) {
  return {weight, (float)op.number("eps"), op.flag("unit_offset")};
}

Gating gating_of(const OpNode& op) {
  if (op.is(Op::limited_silu_mul)) return {1, (float)op.number("limit"), 0};
  if (!op.is(Op::clamped_silu_mul)) return {};
  return {(float)op.number("alpha"), (float)op.number("limit"), 1};
}

Heads heads_of(const OpNode& op) { return {op.integer("offset"), op.integer("heads"), op.integer("head_dim")}; }

}  // namespace as::cuda
