// Chains of products of integers.
#include "cuda/kernels/chain.cuh"

namespace as {
namespace cuda {
namespace {

template <int kBits>
void start(const ChainOp* ops, int count, int rows, const Queue& queue) {
  if (rows <= 8) start_chain<ChainShape<Integers<kBits>, 8, 4>>(ops, count, rows, queue);
  else if (rows <= 16) start_chain<ChainShape<Integers<kBits>, 16, 4>>(ops, count, rows, queue);
  else start_chain<ChainShape<Integers<kBits>, 32, 4>>(ops, count, rows, queue);
}

}  // namespace

void chain_integer(const ChainOp* ops, int count, int rows, int bits, const Queue& queue) {
  if (bits == 4) start<4>(ops, count, rows, queue);
  else start<8>(ops, count, rows, queue);
}

}  // namespace cuda
}  // namespace as
