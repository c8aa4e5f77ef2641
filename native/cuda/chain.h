// Ops that follow each other in a step of few rows, in one launch: products of one kind of weights, and what is done to
// rows between them. One launch after the other, a processor's shared memory is the block's that still computes, and
// the weights of the next product are on their way only when it has ended; here they stream on while rows are made.
// The bits are those of the launches one by one.
#pragma once
#include "cuda/kernels.h"

namespace as {
namespace cuda {

struct ChainOp {
  // norm: y = x normed. bytes: product.x becomes product.bytes, normed first where norm has a weight (x is of floats
  // then). sum: over ranks.
  enum class Kind { product, norm, bytes, sum } kind = Kind::product;
  Product product = {};
  const float* x = nullptr;
  Norm norm = {};
  Rows y = {};
  RankSum sum = {};
};
constexpr int kMostChained = 12;

// An op by launches of its own; of no rows, ranks meet nevertheless.
void run_op(const ChainOp& op, int rows, const Queue& queue);
// How many of the ops from the first on are for one launch of so many rows; less than two: none.
int chained(const ChainOp* ops, int count, int rows, const Queue& queue);
// As many as that said, all of which read what those before have made.
void run_chain(const ChainOp* ops, int count, int rows, const Queue& queue);

}  // namespace cuda
}  // namespace as
