// Adapters of low rank.
#pragma once
#include "cuda/kernels/common/types.h"

namespace as::cuda {

// Of a target, which is some of a linear's columns, an adapter's matrices. Of float32: a [rank, in features] and b
// [columns, rank] transposed, in rows of lora_stride() values. Of 16 bits, for mma.sync: a in such rows, and b as
// it is; both have whole blocks of ranks, filled up with zeros. rank 0: the adapter has none.
struct LoraPair {
  const char *a = nullptr, *b = nullptr;
  int rank = 0;
  float scale = 0;
};
constexpr int kRankBlock = 16;
AS_BOTH constexpr int lora_stride(int columns) { return (columns + 7) / 8 * 8; }
AS_BOTH constexpr int whole_ranks(int rank) { return (rank + kRankBlock - 1) / kRankBlock * kRankBlock; }
// Sums over K of matrices of 16 bits are made in so many parts, by different CTAs.
constexpr int kMaxLoraKParts = 8;
AS_BOTH constexpr int lora_k_parts(int k, bool is_dtype16) {
  const int parts = is_dtype16 ? (k + 1023) / 1024 : 1;
  return parts < kMaxLoraKParts ? parts : kMaxLoraKParts;
}
// Columns [offset, offset + columns) of what a linear makes; target: which of the adapter's they are.
struct AdaptedColumns {
  int target = 0, offset = 0, columns = 0;
};
constexpr int kMostTargets = 4;  // of one launch
// y += scale * b (a x) for rows that have an adapter; others are not touched. With matrices of 16 bits what follows may
// be computed with it, of all rows, while y stays as it is: `gated`, if y is gates and what they gate, a multiple of
// eight of each, which are the columns of two targets in this order: silu of the gates times the others, each with
// `bias`. `added`, if all of y is one target's: that is added to what is there.
struct AdaptedSums {
  const LoraPair* pairs = nullptr;  // [adapters, targets]
  int targets = 0;
  const int *adapters = nullptr, *chosen = nullptr;  // of each row of the step, -1: none; chosen: null, or y's rows
  bool is_dtype16 = false;                           // matrices are of 16 bits
  DType16 type = DType16::bf16;
  Rows x;
  float* y = nullptr;
  int width = 0,
      paired_gates = 0;    // of y; paired_gates: not 0 where its columns lie as pair_rows() has them, of so many gates
  float* inner = nullptr;  // [rows, count, lora_k_parts(), whole_ranks(max_rank)]: parts of a x
  int max_rank = 0, count = 0;
  AdaptedColumns columns[kMostTargets];
  int adapter_count = 0;  // that there may be
  Rows gated;
  const float* bias = nullptr;
  float* added = nullptr;
};
void add_lora(const AdaptedSums& a, int rows, const Queue& queue);

}  // namespace as::cuda
