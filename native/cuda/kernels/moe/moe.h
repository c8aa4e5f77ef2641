// Layers of experts, as the host starts their kernels. Each row goes to some of many experts; its
// visit to one of them is an entry, and entries of an expert are adjacent. Which ones they are the device alone knows:
// kernels take what there is from lists that it makes, and are started for as many rows as a step has.
#pragma once
#include "cuda/kernels/gemm/gemm.h"

namespace as::cuda {

constexpr int kMostExperts = 1024, kMostTop = 32;  // of a router: experts; those that a row goes to

// How experts are chosen from their logits: see the op (program/op_spec.cpp).
struct Router {
  bool sigmoid = false, normalized = false;
  float scale = 1;
  int experts = 0, groups = 1, top_groups = 1;
  const float* correction = nullptr;
};

// Adjacent entries of an expert, which is counted from the rank's first.
struct alignas(16) ExpertTile {
  int expert, first, count;
};

// Where the rows of a step go.
struct Routing {
  int top = 0;              // experts of each row
  int begin = 0, end = 0;   // the experts that this rank has
  int* entry_of = nullptr;  // [rows, top], in ascending order of experts; -1: another rank computes it
  float* shares = nullptr;  // [rows, top]: their weights
  int* row_of = nullptr;    // [entries]
  ExpertTile* tiles = nullptr;
  int* tile_count = nullptr;
  int* ended = nullptr;  // blocks of the kernel that makes this; 0 between launches
};
// Memory of a routing of so many rows, and that split up; its numbers are the caller's.
size_t routing_bytes(int rows, int top, int experts);
void place_routing(char* memory, int rows, int experts, Routing& routing);

// Whether gemm_small_n() takes a matrix: of float32, not large.
bool has_small_n(const Matrix& matrix);
// As gemm_f32(), but in another order, and neither adding nor gated.
void gemm_small_n(const GemmArgs& p, int rows, const Queue& queue);
// where: of each row, negative for rows that a padded step only has in name, which go nowhere; null: all are there.
void route(const float* logits, const Router& router, const Routing& routing, const int* where, int rows, int tile_rows,
           const Queue& queue);
// The same of logits that are still to be made, by gemm_small_n().
void route(const GemmArgs& logits, const Router& router, const Routing& routing, const int* where, int rows,
           int tile_rows, const Queue& queue);
// Entries of given experts [rows, top], which are where entries will be; the second half of route().
void group_entries(const Routing& routing, int rows, int tile_rows, const Queue& queue);

// y [entries, n] = x w^T + bias with the matrix (and bias) of each entry's expert: w is a stack of those. Sums over K
// are one chain each, whatever the kernel; codes are rounded to bfloat16 first. gathers: x has rows, else entries.
// follows: the kernel before on the stream is such a product, too, of the same routing and type. entries: of the step,
// of all experts. algo: simt, mma or prefill.
struct ExpertGemmArgs {
  GemmArgs gemm;
  Routing routing;
  bool gathers = false, follows = false;
  Gating gating = {};  // where the product is gated
};
void gemm_experts(const ExpertGemmArgs& p, int entries, int tile_rows, const Queue& queue, GemmAlgo algo);

// y [rows, width] = of each row the sum of its entries times their weights, in ascending order of experts, or that
// added to what y has; and if there is a norm with a weight, rows of y normed, too.
struct Combination {
  const float* entries = nullptr;
  Routing routing;
  bool adds = false;
  Rows y;
  Norm norm;
  Rows normed;

  DType16 dtype() const { return y.tiles ? y.dtype : normed.dtype; }
};
void combine_experts(const Combination& c, int rows, const Queue& queue);

// ---- a step of one row, with the bits of what is above
// The row's logits, and the row itself, normed first: as rms_norm() and gemm_small_n().
bool norms_with_logits(const GemmArgs& logits);
void norm_and_logits(const float* x, const Norm& norm, const Rows& normed, const GemmArgs& logits, const Queue& queue);
// A row whose logits are there. where: its place, or null.
struct ChosenRow {
  Router router;
  const float* logits = nullptr;
  const int* where = nullptr;
};
// The gated product with its experts' matrices, and of the result the other one, summed up: as route(),
// gemm_experts(), and combine_experts() but for the norm. The second follows the first on the stream.
void gate_row(const ExpertGemmArgs& e, const ChosenRow& row, const Queue& queue);
void combine_row(const ExpertGemmArgs& e, const ChosenRow& row, const Combination& c, const Queue& queue);

// x [rows, width] *= sigmoid(gate [rows])
void sigmoid_mul(float* x, const float* gate, int rows, int width, const Queue& queue);

}  // namespace as::cuda
