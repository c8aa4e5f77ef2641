// Which ops one launch takes (chain.h), and which kernel.
#include <algorithm>
#include <cstdlib>
#include <stdexcept>

#include "cuda/kernels/chain_formats.h"
#include "cuda/kernels/chain_rows.cuh"

namespace as {
namespace cuda {
namespace {

constexpr int kMostRows = 32;

// Of products of one chain; none: there is no kernel.
enum class Format { none, bf16, float8 };
Format format_of(const Matrix& w) {
  if (w.kind == Kind::bf16) return Format::bf16;
  if (w.kind == Kind::float8) return Format::float8;
  return Format::none;
}
RowBytes row_bytes_of(Format format) { return format == Format::float8 ? RowBytes::floats : RowBytes::none; }

// Whether blocks of threads have room for the pieces of all tiles.
bool fits(const Matrix& w, int rows) {
  const size_t sums = (size_t)(blocks_of(w.n) + kScratchFlags) * kBlock * kMostRows;
  return w.experts == 1 && rows <= kMostRows && sums * Pieces(w.k, w.most_pieces).count <= kScratchPieces &&
         (size_t)blocks_of(w.n) + kScratchFlags <= kScratchCounts;
}

// What the products of a chain are that begins with these ops.
Format format_of(const ChainOp* ops, int count) {
  for (int i = 0; i < count; i++)
    if (ops[i].kind == ChainOp::Kind::product) return format_of(ops[i].product.w);
  return Format::none;
}

}  // namespace

int chained(const ChainOp* ops, int count, int rows, const Queue& queue) {
  static const bool tried = std::getenv("ALLSPARK_TRY_CHAINS");
  if (!tried || queue.capability != 90 || !queue.scratch.barriers || rows < 1 || rows > kMostRows) return 0;
  const Format format = format_of(ops, count);
  if (format == Format::none) return 0;
  const auto takes = [&](const ChainOp& op) {
    if (op.kind != ChainOp::Kind::product) return has_row_op(op, row_bytes_of(format));
    return format_of(op.product.w) == format && fits(op.product.w, rows) &&
           (format != Format::bf16 || op.product.x.tiles);
  };
  int all = 0;
  while (all < std::min(count, kMostChained) && takes(ops[all])) all++;
  return all < 2 ? 0 : all;
}

void run_chain(const ChainOp* ops, int count, int rows, const Queue& queue) {
  if (chained(ops, count, rows, queue) < count) throw std::logic_error("CUDA: these ops are no chain");
  if (format_of(ops, count) == Format::bf16) chain_bf16(ops, count, rows, queue);
  else chain_float8(ops, count, rows, queue);
}

}  // namespace cuda
}  // namespace as
