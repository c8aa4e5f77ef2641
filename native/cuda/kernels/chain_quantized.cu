// Chains of products of quantized weights with activations in bfloat16.
#include "cuda/kernels/chain.cuh"

namespace as {
namespace cuda {
namespace {

template <int kBits, bool kFine>
void start(const ChainOp* ops, int count, int rows, const Queue& queue) {
  using Format = Rounded<kBits, kFine>;
  if (rows <= 8) start_chain<ChainShape<Format, 8, 4>>(ops, count, rows, queue);
  else if (rows <= 16) start_chain<ChainShape<Format, 16, 4>>(ops, count, rows, queue);
  else start_chain<ChainShape<Format, 32, 4>>(ops, count, rows, queue);
}

}  // namespace

void chain_quantized(const ChainOp* ops, int count, int rows, int bits, bool fine, const Queue& queue) {
  if (bits == 4) fine ? start<4, true>(ops, count, rows, queue) : start<4, false>(ops, count, rows, queue);
  else fine ? start<8, true>(ops, count, rows, queue) : start<8, false>(ops, count, rows, queue);
}

}  // namespace cuda
}  // namespace as
