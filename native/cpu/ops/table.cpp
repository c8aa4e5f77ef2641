// The table of the CPU's ops, by the sequence of ops that each runs.
#include <map>

#include "cpu/ops/ops.h"

namespace as {
namespace {

std::map<std::vector<Op>, Bind>& registered() {
  static std::map<std::vector<Op>, Bind> ops;
  return ops;
}

}  // namespace

RegisterCpuOp::RegisterCpuOp(const std::vector<std::vector<Op>>& sequences, Bind bind) {
  for (const std::vector<Op>& kinds : sequences) registered()[kinds] = bind;
}

Bind cpu_op(std::vector<Op> kinds) {
  if (kinds.back() == Op::span_attention) kinds = {Op::span_attention};
  const auto found = registered().find(kinds);
  return found == registered().end() ? nullptr : found->second;
}

}  // namespace as
