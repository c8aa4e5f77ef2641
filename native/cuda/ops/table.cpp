// The CUDA backend's ops, by op.
#include <map>

#include "cuda/ops/ops.h"

namespace as {
namespace cuda {
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

}  // namespace cuda
}  // namespace as
