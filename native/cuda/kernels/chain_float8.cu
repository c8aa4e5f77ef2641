// Chains of products of floats of 8 bits.
#include "cuda/kernels/chain.cuh"

namespace as {
namespace cuda {

void chain_float8(const ChainOp* ops, int count, int rows, const Queue& queue) {
  if (rows <= 8) start_chain<ChainShape<Floats, 8, 2>>(ops, count, rows, queue);
  else if (rows <= 16) start_chain<ChainShape<Floats, 16, 2>>(ops, count, rows, queue);
  else start_chain<ChainShape<Floats, 32, 2>>(ops, count, rows, queue);
}

}  // namespace cuda
}  // namespace as
