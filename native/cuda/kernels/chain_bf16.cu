// Chains of products in bfloat16.
#include "cuda/kernels/chain.cuh"

namespace as {
namespace cuda {

void chain_bf16(const ChainOp* ops, int count, int rows, const Queue& queue) {
  if (rows <= 8) start_chain<ChainShape<Plain, 8, 2>>(ops, count, rows, queue);
  else if (rows <= 16) start_chain<ChainShape<Plain, 16, 2>>(ops, count, rows, queue);
  else start_chain<ChainShape<Plain, 32, 2>>(ops, count, rows, queue);
}

}  // namespace cuda
}  // namespace as
