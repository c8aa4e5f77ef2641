// Mixture-of-experts layers. An entry is a (row, chosen expert) pair; the entries of an expert are adjacent. Only the
// GPU knows the entries: kernels read lists that route() writes, and are launched for the number of rows of the step.
#pragma once
#include "cuda/kernels/gemm/gemm.h"

namespace as::cuda {

constexpr int kMaxExperts = 1024, kMaxTop = 32;  // experts of a router, and experts chosen for a row

// The experts of each token, which take the place of a choice: experts [tokens, chosen for a row], as floats. A token
// beyond the table has the last row's. chosen: null, or the step's row of each row that is routed.
struct TokenExperts {
  const float* experts = nullptr;
  int tokens = 0;
  TokenRows rows;
  const int* chosen = nullptr;
};

enum class Scores { softmax, sigmoid, sqrt_softplus };

// How experts are chosen from logits; see the op in program/op_table.h.
struct Router {
  Scores scores = Scores::softmax;
  bool normalized = false;
  bool best_of_group = false;  // a group counts as much as its best expert, not as its two best
  float scale = 1;
  int experts = 0, groups = 1, top_groups = 1;
  const float *correction = nullptr, *expert_scales = nullptr;  // [experts], or null
  TokenExperts by_token;                                        // experts null: scores choose
};

// Adjacent entries of an expert; `expert` counts from the rank's first one.
struct alignas(16) ExpertTile {
  int expert, first, count;
};

// The entries of a step.
struct Routing {
  int top = 0;              // experts chosen for each row
  int begin = 0, end = 0;   // this rank's experts
  int* entry_of = nullptr;  // [rows, top], by ascending expert; -1: another rank computes it
  float* shares = nullptr;  // [rows, top]: their weights
  int* row_of = nullptr;    // [entries]
  ExpertTile* tiles = nullptr;
  int* tile_count = nullptr;
  int* ended = nullptr;   // finished CTAs of route(); 0 between launches
  int* counts = nullptr;  // of many entries: each expert's in each slice of them
};
// Bytes of a Routing's arrays, and their placement in memory; the caller sets top, begin and end.
size_t routing_bytes(int rows, int top, int experts);
void place_routing(char* memory, int rows, int experts, Routing& routing);

// Whether gemm_small_n() supports a matrix: float32 and not large.
bool has_small_n(const Matrix& matrix);
// Like gemm_f32(), but with another order of sums; p.adds and p.gated are not supported.
void gemm_small_n(const GemmArgs& p, int rows, const Queue& queue);
// where: null, or negative for the padding rows of a step, which get no experts.
void route(const float* logits, const Router& router, const Routing& routing, const int* where, int rows, int tile_rows,
           const Queue& queue);
// The same, computing the logits by gemm_small_n() first.
void route(const GemmArgs& logits, const Router& router, const Routing& routing, const int* where, int rows,
           int tile_rows, const Queue& queue);
// The second half of route(): groups entries by expert. entry_of [rows, top] holds the experts and receives the
// entries.
void group_entries(const Routing& routing, int rows, int tile_rows, const Queue& queue);

// y [entries, n] = x w^T + bias with the matrix and bias of each entry's expert; w is a stack of matrices. Each sum
// over K is one chain in every kernel (of 8-bit weights in groups, one for each group); quantized values are rounded to
// bfloat16 first, unless activations have 8 bits. gathers: x has rows, otherwise entries. follows: the previous kernel
// of the stream but for quantize_activations() is also such a GEMM, with the same routing and type. x_rows: rows of
// gemm.bytes, of all there. entries: of all experts in the step. algo: simt, mma or prefill.
struct ExpertGemmArgs {
  GemmArgs gemm;
  Routing routing;
  bool gathers = false, follows = false;
  int x_rows = 0;
  Gating gating = {};  // if gemm.gated
};
void gemm_experts(const ExpertGemmArgs& p, int entries, int tile_rows, const Queue& queue, GemmAlgo algo);
// The same with 8-bit weights and activations gemm.bytes, on Hopper; w.max_split_k: 1.
void gemm_experts_8bit(const ExpertGemmArgs& p, int entries, int tile_rows, const Queue& queue);

// A sum that y [rows, width] becomes; adds: y += that. If the norm has a weight, `normed` receives the normalized rows
// of y.
struct NormedSum {
  bool adds = false;
  Rows y;
  Norm norm;
  Rows normed;

  DType16 dtype() const { return y.tiles ? y.dtype : normed.dtype; }
};
// For each row the weighted sum of its entries, by ascending expert. entries: float32 or 16-bit tiles.
struct Combination : NormedSum {
  Rows entries;
  Routing routing;

  DType16 dtype() const { return entries.tiles ? entries.dtype : NormedSum::dtype(); }
};
void combine_experts(const Combination& c, int rows, const Queue& queue);

// routed + shared sigmoid(gate's product, as gemm_small_n() computes it). If there are entries, their sum, as
// combine_experts() computes it, is what `routed` would be.
struct SharedSum : Combination {
  GemmArgs gate;  // of one column, which is not written
  // Whether the gate's rows are those of a router, and gemm_experts() of 16-bit or quantized weights, or gate_row() and
  // combine_row(), follow that on the stream. These let the next kernel begin only once they have waited for the
  // router, so the rows are complete before this kernel can begin: it computes gates before the previous one has ended.
  bool gates_early = false;
  const float *shared = nullptr, *routed = nullptr;
};
void add_shared_expert(const SharedSum& sum, int rows, const Queue& queue);

// ---- a step of one row, with the same bits
// rms_norm() of the row and its logits by gemm_small_n(), in one kernel.
bool norms_with_logits(const GemmArgs& logits);
void norm_and_logits(const float* x, const Norm& norm, const Rows& normed, const GemmArgs& logits, const Queue& queue);
// A row with its logits. where: as in route().
struct ChosenRow {
  Router router;
  const float* logits = nullptr;
  const int* where = nullptr;
};
// gate_row(): route() and the gated GEMM of the chosen experts. combine_row(): the down GEMM and combine_experts()
// without its norm; it must follow gate_row() on the stream. It does not write e.gemm.y, but rounds to 16 bits what
// would be stored so.
void gate_row(const ExpertGemmArgs& e, const ChosenRow& row, const Queue& queue);
void combine_row(const ExpertGemmArgs& e, const ChosenRow& row, const Combination& c, const Queue& queue);
// The first half of it in MXFP4, on Hopper: the gated GEMM of the chosen experts, which also writes the lists that
// gemm_experts() and combine_experts() read behind it.
void gemm_chosen_experts(const ExpertGemmArgs& e, const ChosenRow& row, const Queue& queue);

// x [rows, width] *= sigmoid(gate [rows])
void sigmoid_mul(float* x, const float* gate, int rows, int width, const Queue& queue);

}  // namespace as::cuda
