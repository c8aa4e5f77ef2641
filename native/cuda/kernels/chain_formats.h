// Chains (cuda/chain.h) by what their products' weights are.
#pragma once
#include "cuda/chain.h"

namespace as {
namespace cuda {

void chain_bf16(const ChainOp* ops, int count, int rows, const Queue& queue);
void chain_float8(const ChainOp* ops, int count, int rows, const Queue& queue);
void chain_integer(const ChainOp* ops, int count, int rows, int bits, const Queue& queue);
// fine: scales change within a block.
void chain_quantized(const ChainOp* ops, int count, int rows, int bits, bool fine, const Queue& queue);

}  // namespace cuda
}  // namespace as
