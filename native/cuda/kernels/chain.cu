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

// Products of one chain are alike in this.
struct Format {
  Kind kind = Kind::f32;  // none
  int bits = 0;
  bool fine = false;  // scales change within a block

  explicit Format(const Matrix& w) : kind(w.kind), bits(w.codes.bits) {
    fine = kind == Kind::codes && w.codes.groups > 1 && w.codes.group < kBlock;
  }
  bool operator==(const Format& other) const { return kind == other.kind && bits == other.bits && fine == other.fine; }
  RowBytes row_bytes() const {
    return kind == Kind::float8 ? RowBytes::floats : kind == Kind::integers ? RowBytes::integers : RowBytes::none;
  }
};

// Whether blocks of threads have room for the pieces of all tiles.
bool fits(const Matrix& w, int rows) {
  const size_t sums = (size_t)(blocks_of(w.n) + kScratchFlags) * kBlock * kMostRows;
  return w.experts == 1 && rows <= kMostRows && sums * Pieces(w.k, w.most_pieces).count <= kScratchPieces &&
         (size_t)blocks_of(w.n) + kScratchFlags <= kScratchCounts;
}

// What the products of a chain are that begins with these ops; of none float32.
Format format_of(const ChainOp* ops, int count) {
  for (int i = 0; i < count; i++)
    if (ops[i].kind == ChainOp::Kind::product) return Format(ops[i].product.w);
  return Format({});
}

}  // namespace

int chained(const ChainOp* ops, int count, int rows, const Queue& queue) {
  static const bool tried = std::getenv("ALLSPARK_TRY_CHAINS");
  if (!tried || queue.capability != 90 || !queue.scratch.barriers || rows < 1 || rows > kMostRows) return 0;
  const Format format = format_of(ops, count);
  if (format.kind == Kind::f32) return 0;
  const auto takes = [&](const ChainOp& op) {
    if (op.kind != ChainOp::Kind::product) return has_row_op(op, format.row_bytes());
    const Product& p = op.product;
    return Format(p.w) == format && fits(p.w, rows) && (p.w.takes_bytes() || p.x.tiles);
  };
  int all = 0;
  while (all < std::min(count, kMostChained) && takes(ops[all])) all++;
  return all < 2 ? 0 : all;
}

void run_chain(const ChainOp* ops, int count, int rows, const Queue& queue) {
  if (chained(ops, count, rows, queue) < count) throw std::logic_error("CUDA: these ops are no chain");
  const Format format = format_of(ops, count);
  if (format.kind == Kind::bf16) chain_bf16(ops, count, rows, queue);
  else if (format.kind == Kind::float8) chain_float8(ops, count, rows, queue);
  else if (format.kind == Kind::integers) chain_integer(ops, count, rows, format.bits, queue);
  else chain_quantized(ops, count, rows, format.bits, format.fine, queue);
}

}  // namespace cuda
}  // namespace as
