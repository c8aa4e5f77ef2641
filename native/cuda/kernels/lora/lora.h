// LoRA adapters.
#pragma once
#include "cuda/kernels/moe/moe.h"

namespace as::cuda {

// An adapter's matrices for a target, which is a range of a linear's output columns. float32: a [rank, in features] and
// b [columns, rank], both transposed, in rows of lora_stride() values. 16 bits, for mma.sync: a in such rows, b not
// transposed; ranks are padded with zeros to whole blocks. rank 0: the adapter does not change this target.
struct LoraPair {
  const char *a = nullptr, *b = nullptr;
  int rank = 0;
  float scale = 0;
};
constexpr int kRankBlock = 16;
AS_BOTH constexpr int lora_stride(int columns) { return (columns + 7) / 8 * 8; }
AS_BOTH constexpr int whole_ranks(int rank) { return (rank + kRankBlock - 1) / kRankBlock * kRankBlock; }
// Split-K parts of a x for 16-bit matrices, computed by different CTAs.
constexpr int kMaxLoraKParts = 8;
AS_BOTH constexpr int lora_k_parts(int k, bool is_dtype16) {
  const int parts = is_dtype16 ? (k + 1023) / 1024 : 1;
  return parts < kMaxLoraKParts ? parts : kMaxLoraKParts;
}
// Output columns [offset, offset + columns) of a linear, and the adapter's target they belong to.
struct AdaptedColumns {
  int target = 0, offset = 0, columns = 0;
};
constexpr int kMaxTargets = 4;  // targets of one launch
// y += scale * b (a x) for rows that have an adapter; other rows do not change. With 16-bit matrices the next op can be
// fused; it is then computed for all rows, and y does not change. `gated`: y consists of gate and up columns, the
// columns of two targets in this order, each a multiple of eight; the result is silu(gate) * up, with `bias` added to
// both first. `added`: y is one target's; the sum is added to `added`.
struct AdaptedSums {
  const LoraPair* pairs = nullptr;  // [adapters, targets]
  int targets = 0;
  const int *adapters = nullptr,
            *chosen = nullptr;  // adapters: for each row of the step, -1: none; chosen: null, or the rows of y
  bool is_dtype16 = false;      // whether matrices have 16 bits
  DType16 type = DType16::bf16;
  Rows x;
  float* y = nullptr;
  int width = 0,
      paired_gates = 0;    // width of y; paired_gates: gate columns if columns are in pair_rows()' order, else 0
  float* inner = nullptr;  // [rows, count, lora_k_parts(), whole_ranks(max_rank)]: parts of a x
  int max_rank = 0, count = 0;
  AdaptedColumns columns[kMaxTargets];
  int adapter_count = 0;  // adapters that can be loaded
  Rows gated;
  const float* bias = nullptr;
  float* added = nullptr;
};
void add_lora(const AdaptedSums& a, int rows, const Queue& queue);

// The same for the entries of a step, for the one target columns[0] that expert 0 has; the next expert has the next
// target. Nothing is fused. inner: [entries, whole_ranks(max_rank)]. gathers: x has rows, otherwise entries. tiles: y
// if it is stored in 16 bits, to which sums are rounded; sums.y is null then.
struct ExpertSums {
  AdaptedSums sums;
  uint16_t* tiles = nullptr;
  Routing routing;
  bool gathers = false;
};
void add_expert_lora(const ExpertSums& e, int entries, const Queue& queue);

// Gating of entries whose gate and up columns are in pair_rows()' order, with the bits of gated GEMMs of experts. bias:
// null, or each expert's, added first.
struct GatedEntries {
  const float* pairs = nullptr;
  int pairs_width = 0;
  const float* bias = nullptr;
  Routing routing;
  Gating gating;
  Rows out;
};
void gate_entries(const GatedEntries& g, int entries, const Queue& queue);

}  // namespace as::cuda
