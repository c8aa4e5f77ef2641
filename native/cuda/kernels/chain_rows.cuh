// What a chain of ops (cuda/chain.h) does to rows between products, by the warps that multiply: a row by a block of
// threads, to the bit as kernels for that alone do it.
#pragma once
#include <type_traits>

#include "cuda/chain.h"
#include "cuda/kernels/row_ops.cuh"

namespace as {
namespace cuda {

// What products of a chain take: rows in bfloat16, or of 8 bits.
enum class RowBytes { none, integers, floats };
constexpr int kMostChainRanks = 4;
constexpr int kMostChainBlocks = 512;  // of K, of rows of integers

// Whether an op on rows is one that chains have.
inline bool has_row_op(const ChainOp& op, RowBytes bytes) {
  if (op.kind == ChainOp::Kind::norm) return true;
  if (op.kind == ChainOp::Kind::sum) return op.sum.bf16 && op.sum.peers.world <= kMostChainRanks;
  const Product& p = op.product;
  return op.kind == ChainOp::Kind::bytes && bytes != RowBytes::none &&
         p.w.codes.floats == (bytes == RowBytes::floats) &&
         (bytes == RowBytes::floats || (blocks_of(p.w.k) <= kMostChainBlocks && !p.x.tiles));
}

// In shared memory.
template <RowBytes kBytes>
struct ChainRowsShared {
  RowShared row;
  int sums[kBytes == RowBytes::integers ? kMostChainBlocks : 1];
};

// Brings weights of an op's norm into the second-level cache, by all threads of a block.
__device__ inline void prefetch_norm(const ChainOp& op) {
  const bool sums = op.kind == ChainOp::Kind::sum;
  const float* weight = sums ? op.sum.norm.weight : op.norm.weight;
  const int width = sums ? op.sum.y.width : op.kind == ChainOp::Kind::norm ? op.y.width : op.product.w.k;
  constexpr int kLine = 32;  // values
  if (weight)
    for (int i = threadIdx.x * kLine; i < width; i += blockDim.x * kLine)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(weight + i));
}

// Does an op of rows to those that a block of threads has, from its own number on every `blocks`-th, once all blocks
// have done the op before it. t: kThreads; segments: of the product that an op's bytes are for.
template <int kThreads, RowBytes kBytes>
__device__ inline void do_rows(const RowThreads& t, ChainRowsShared<kBytes>& shared, const ChainOp& op,
                               const Segments& segments, int rows, int own, int blocks) {
  constexpr int kPlays = plays_of(kThreads);
  const auto each = [&](auto work) {
    for (int row = own; row < rows; row += blocks) work(row);
  };
  if (op.kind == ChainOp::Kind::norm) {
    NormWeights<kPlays> weights;
    weights.read(t, op.norm, op.y.width);
    each([&](int row) { norm_row<kPlays, 1>(t, shared.row, op.x, op.norm, weights, op.y, row); });
  } else if (op.kind == ChainOp::Kind::sum) {
    const RankSum& s = op.sum;
    if (const int r = t.thread; r < s.peers.world && r != s.peers.rank) {
      const uint32_t call = call_of(s);
      if (own == 0) tell_rank(s.peers, r, call);
      await_rank(s.peers, r, call);
    }
    t.sync();
    NormWeights<kPlays> weights;
    if (s.norm.weight) weights.read(t, s.norm, s.y.width);
    each([&](int row) { sum_row<true, kMostChainRanks, false, kPlays>(t, shared.row, s, weights, row); });
  } else if constexpr (kBytes != RowBytes::none) {
    constexpr bool kFloats = kBytes == RowBytes::floats;
    const Product& p = op.product;
    const Rows in = op.norm.weight ? Rows{const_cast<float*>(op.x), nullptr, p.w.k} : p.x;
    const auto work = [&](auto norms, auto tiles, auto keeps) {
      constexpr bool kNorms = decltype(norms)::value, kTiles = decltype(tiles)::value;
      constexpr int kKept = decltype(keeps)::value;
      PieceWeights<kNorms, kKept> weights;
      weights.read(t, op.norm, p.w.k);
      each([&](int row) {
        bytes_row<kFloats, kNorms, kTiles, kKept>(t, shared.row, shared.sums, in, blocks_of(rows) * kBlock, segments,
                                                  p.bytes, op.norm, weights, row);
      });
    };
    // What threads keep in registers of wide rows: 20,480 columns in tiles; what is beyond is read again.
    using Narrow = std::integral_constant<int, 2>;
    using Wide = std::integral_constant<int, (20480 / kRowPiece + kThreads - 1) / kThreads>;
    if (op.norm.weight) work(std::true_type(), std::false_type(), std::integral_constant<int, kPlays>());
    else if (!p.x.tiles) work(std::false_type(), std::false_type(), Narrow());
    else if constexpr (kFloats) work(std::false_type(), std::true_type(), Wide());
  }
}

}  // namespace cuda
}  // namespace as
