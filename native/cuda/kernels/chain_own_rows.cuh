// Few rows that every block of threads makes for itself, in its shared memory, from what the op before the last left:
// an op on rows between two products then takes one wait for all of them instead of two, and nothing of it is written
// and copied back. The bits are those of the op by itself.
#pragma once
#include <type_traits>

#include "cuda/kernels/chain_rows.cuh"

namespace as {
namespace cuda {

constexpr int kMostOwnRows = 8, kMostOwnColumns = 4096;
constexpr int kOwnWarps = 8;  // that make them

// Whether a norm's rows, or rows of floats of 8 bits, may be made so.
inline bool may_own(const ChainOp& op, int rows) {
  if (rows > kMostOwnRows) return false;
  if (op.kind == ChainOp::Kind::norm) return op.y.width <= kMostOwnColumns;
  return op.kind == ChainOp::Kind::bytes && op.product.w.codes.floats && op.product.w.k <= kMostOwnColumns;
}

// Brings weights of an op's norm into the first-level cache, by the threads that will make rows.
__device__ inline void touch_norm(const ChainOp& op) {
  const int width = op.kind == ChainOp::Kind::norm ? op.y.width : op.product.w.k;
  constexpr int kSector = 8;  // values
  [[maybe_unused]] float value;
  if (op.norm.weight)
    for (int i = threadIdx.x * kSector; i < width; i += 32 * kOwnWarps * kSector)
      asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(value) : "l"(op.norm.weight + i));
}

// Row `row` normed, as products in bfloat16 read it: blocks of K of 8 rows x 128 bytes, one after the other. Written to
// global memory, too, by the block of threads of that number.
template <int kWarps>
__device__ inline void own_norm_row(const RowThreads& t, RowShared& shared, const ChainOp& op, int row, char* to) {
  constexpr int kPlays = kRowWarps / kWarps, kTogether = 2;
  const int width = op.y.width, all = blocks_of(width) * kBlock;
  const float* in = op.x + (size_t)row * width;
  float kept[kPlays][kRowEight], squares[kPlays] = {};
#pragma unroll
  for (int play = 0; play < kPlays; play++) read_columns<true>(in, t.column(kRowEight, 0, play), width, kept[play]);
#pragma unroll
  for (int play = 0; play < kPlays; play++) add_squares(kept[play], squares[play]);
  const float factor = norm_factor(row_sum(squares, t, shared), op.norm, width);
#pragma unroll
  for (int first = 0; first < kPlays; first += kTogether) {
    float weights[kTogether][kRowEight];
#pragma unroll
    for (int i = 0; i < kTogether; i++)
      read_columns<false>(op.norm.weight, t.column(kRowEight, 0, first + i), width, weights[i]);
#pragma unroll
    for (int i = 0; i < kTogether; i++) {
      const int column = t.column(kRowEight, 0, first + i);
      float(&x)[kRowEight] = kept[first + i];
      scale_eight(x, factor, op.norm, weights[i]);
      if ((int)blockIdx.x == row) put_eight(op.y, row, column, width, x);
      if (column < all)  // zeros behind the last column
        *reinterpret_cast<uint4*>(to + column / kBlock * (kMostOwnRows * kRowBytes) +
                                  piece_offset(row, column % kBlock / 8)) =
            make_uint4(two_bf16(x[0], x[1]), two_bf16(x[2], x[3]), two_bf16(x[4], x[5]), two_bf16(x[6], x[7]));
    }
  }
}

// The same in floats of 8 bits: blocks of K of 8 rows x 64 bytes; the row's scale goes where the product looks for it,
// of all blocks of threads the same.
template <bool kNorms, bool kTiles, int kWarps>
__device__ inline void own_bytes_row(const RowThreads& t, RowShared& shared, const ChainOp& op, int row, char* to) {
  constexpr int kKept = kMostOwnColumns / kRowPiece / (32 * kWarps), kTogether = kKept < 2 ? kKept : 2;
  const int k = op.product.w.k, pieces = blocks_of(k) * (kBlock / kRowPiece);
  const Rows in = kNorms ? Rows{const_cast<float*>(op.x), nullptr, k} : op.product.x;
  const auto piece_of = [&](int i) { return i * t.count + t.thread; };
  Piece<kTiles> kept[kKept];
#pragma unroll
  for (int i = 0; i < kKept; i++) kept[i].read(in, row, piece_of(i) * kRowPiece);
  if constexpr (kNorms) {
    float squares[kKept] = {};
#pragma unroll
    for (int i = 0; i < kKept; i++) add_squares(kept[i], squares[i]);
    const float factor = norm_factor(row_sum(squares, t, shared), op.norm, k);
#pragma unroll
    for (int first = 0; first < kKept; first += kTogether) {
      float weights[kTogether][kRowPiece];
#pragma unroll
      for (int i = 0; i < kTogether; i++)
        read_columns<false>(op.norm.weight, piece_of(first + i) * kRowPiece, k, weights[i]);
#pragma unroll
      for (int i = 0; i < kTogether; i++) scale_piece(kept[first + i], factor, op.norm, weights[i]);
    }
  }
  float top = 0;
#pragma unroll
  for (int i = 0; i < kKept; i++) look_at(kept[i], top);
  const ByteScale found = byte_scale<true>(row_max(top, t, shared));
  if (t.thread == 0) op.product.bytes.scales[row] = found.scale;
#pragma unroll
  for (int i = 0; i < kKept; i++)
    if (const int piece = piece_of(i); piece < pieces) {
      int none = 0;
      *reinterpret_cast<uint4*>(to + piece / 4 * (kMostOwnRows * kByteRow) + byte_piece(row, piece % 4)) =
          bytes_of<true>(kept[i], found.inverse, none);
    }
}

// Makes all rows of an op that may_own(), by kOwnWarps warps, whose threads are the first of the block; each row by
// some of them, which have barriers from first_barrier on.
template <RowBytes kBytes>
__device__ inline void make_own_rows(RowShared (&shared)[kOwnWarps], int first_barrier, const ChainOp& op, int rows,
                                     char* to) {
  const auto each = [&](auto warps) {
    constexpr int kWarps = decltype(warps)::value;
    const int team = threadIdx.x / (32 * kWarps);
    const RowThreads t{(int)threadIdx.x % (32 * kWarps), 32 * kWarps, first_barrier + team};
    for (int row = team; row < rows; row += kOwnWarps / kWarps) {
      if constexpr (kBytes == RowBytes::floats) {
        if (op.norm.weight) own_bytes_row<true, false, kWarps>(t, shared[team], op, row, to);
        else if (op.product.x.tiles) own_bytes_row<false, true, kWarps>(t, shared[team], op, row, to);
        else own_bytes_row<false, false, kWarps>(t, shared[team], op, row, to);
      } else {
        own_norm_row<kWarps>(t, shared[team], op, row, to);
      }
    }
  };
  // More threads of a row would have fewer values in registers, and fewer rows at once.
  if (rows <= 2) each(std::integral_constant<int, 4>());
  else each(std::integral_constant<int, 2>());
}

}  // namespace cuda
}  // namespace as
