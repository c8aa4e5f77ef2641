// Which ops one launch takes (chain.h), and which kernel.
#include <algorithm>
#include <stdexcept>

#include "cuda/kernels/chain_formats.h"

namespace as {
namespace cuda {
namespace {

constexpr int kMostRows = 32;

bool is_product(const ChainOp& op) { return op.kind == ChainOp::Kind::product; }

// Whether blocks of threads have room for the pieces of all of its tiles.
bool fits(const Matrix& w, int rows) {
  const size_t sums = (size_t)blocks_of(w.n) * kBlock * std::max(8, 2 * rows);
  return w.experts == 1 && sums * Pieces(w.k, w.most_pieces).count <= kScratchPieces &&
         (size_t)blocks_of(w.n) + kScratchFlags <= kScratchCounts;
}

bool takes(const ChainOp& op, const Matrix& first, int rows) {
  switch (op.kind) {
    case ChainOp::Kind::product:
      return op.product.w.kind == Kind::bf16 && first.kind == Kind::bf16 && fits(op.product.w, rows);
    case ChainOp::Kind::norm:
      return true;
    default:
      return false;
  }
}

}  // namespace

int chained(const ChainOp* ops, int count, int rows, const Queue& queue) {
  if (queue.capability != 90 || !queue.scratch.barriers || rows < 1 || rows > kMostRows || !count) return 0;
  if (!is_product(ops[0])) return 0;
  int all = 0;
  while (all < std::min(count, kMostChained) && takes(ops[all], ops[0].product.w, rows)) all++;
  return all < 2 ? 0 : all;
}

void run_chain(const ChainOp* ops, int count, int rows, const Queue& queue) {
  if (chained(ops, count, rows, queue) < count) throw std::logic_error("CUDA: these ops are no chain");
  chain_bf16(ops, count, rows, queue);
}

}  // namespace cuda
}  // namespace as
