#include "cuda/ops/fusion.h"
#include "cuda/ops/ops.h"

namespace as {
namespace cuda {

Binding::Binding(Workspace& workspace, Weights& weights, const Ranks* ranks, std::set<int>& paired, bool adapted)
    : workspace(workspace),
      weights(weights),
      ranks(ranks),
      paired(paired),
      queue(workspace.device.queue()),
      ops(ops_of(workspace.program, adapted)) {}

void Binding::check_in_place(const OpNode& op) const {
  if (out(op).values() != in(op).values()) refuse(std::string("op ") + op.spec->name + " into another tensor");
}

Norm norm_of(const OpNode& op, const float* weight) {
  return {weight, (float)op.number("eps"), op.flag("unit_offset")};
}

Gating gating_of(const OpNode& op) {
  if (!op.is(Op::clamped_silu_mul)) return {};
  return {(float)op.number("alpha"), (float)op.number("limit"), 1};
}

Heads heads_of(const OpNode& op) { return {op.integer("offset"), op.integer("heads"), op.integer("head_dim")}; }

}  // namespace cuda
}  // namespace as
