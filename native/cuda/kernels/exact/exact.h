// The exact recipe of routed experts on GPUs (docs/decisions/hybrid.md, *Exact experts*): the bits of the CPU's kernels
// (cpu/kernels/matmul_integer.cpp), so that an expert may be computed on either.
//
// Weights are read as a rank of experts has them in its memory: panels of cpu/kernels/format.h, of any instruction set.
// A 32-bit lane of a panel has four k of a row, or eight of 4 bits, which is what a thread holds of an operand of
// mma.sync with bytes. So experts are copied to the GPU as they are, and unpacked in registers.
#pragma once
#include <climits>

#include "cpu/kernels/format.h"
#include "cuda/kernels/moe/moe.h"

namespace as::cuda {

enum class ExactFormat : int { int8, int4, w8a8, w4a8, e2m1 };
AS_BOTH constexpr int exact_planes(ExactFormat f) { return f == ExactFormat::w8a8 || f == ExactFormat::w4a8 ? 1 : 2; }
AS_BOTH constexpr int exact_bits(ExactFormat f) { return f == ExactFormat::int8 || f == ExactFormat::w8a8 ? 8 : 4; }

constexpr int kExactTile = 64;       // entries of a tile (ExpertTile) at most
constexpr int kExactStageK = 64;     // columns of a stage of the GEMM
constexpr int kExactFew = 8;         // rows of a step up to which the kernel for few rows is chosen
constexpr int kExactPairs = 4;       // rows up to which both planes of 16-bit activations are multiplied at once
constexpr int kExactLongest = 1024;  // columns of a group with 16-bit activations

// One expert's matrix [n, k], or those of all experts of a layer, without the weights' address.
struct ExactMatrix {
  ExactFormat format = ExactFormat::int8;
  int n = 0, k = 0, panel = 0;
  int group = 0, groups = 0;
  size_t bytes = 0;  // of an expert's panels
  uint32_t panel_bytes = 0, group_bytes = 0, head_bytes = 0, first_group = 0;
  // Scales, as in ScaleLayout and Packed.
  ScaleType scales = ScaleType::bfloat16;
  ZeroType zeros = ZeroType::offsets;
  bool plain = true, lone = false;
  int super_group = 0;
  float middle = 0, moved = 0;  // of the format; what a stored value is less than that which the offset belongs to
  // Columns of the rows of activations and, if they are gathered, the one that each k reads; -1: zero.
  int inputs = 0;
  const int* order = nullptr;

  // k of a step of products: no step has columns of two groups.
  AS_BOTH int step() const { return format == ExactFormat::e2m1 && group <= 16 ? 16 : 32; }
  AS_BOTH int steps_of_group() const { return (group + step() - 1) / step(); }
  AS_BOTH int steps() const {
    const int last = k - (groups - 1) * group;
    return (groups - 1) * steps_of_group() + (last + step() - 1) / step();
  }
  // The same up to a whole stage.
  AS_BOTH int whole_steps() const {
    const int each = kExactStageK / step();
    return (steps() + each - 1) / each * each;
  }
};
// Of a matrix in the CPU's memory. order: on the GPU. Throws std::invalid_argument if the matrix has no exact recipe.
ExactMatrix exact_matrix(const Packed& w, const int* order = nullptr);

// Rows of activations as integers. values: [rows][steps][planes][step], zeros behind a group's last column; the eight
// columns of a lane of e2m1 in the order 0, 4, 1, 5, 2, 6, 3, 7. sums: [rows][groups], of each group's integers, if the
// matrix has offsets.
struct ExactRows {
  int8_t* values = nullptr;
  float *scales = nullptr, *sums = nullptr;
};
size_t exact_rows_bytes(const ExactMatrix& w, int rows);
ExactRows exact_rows(char* memory, const ExactMatrix& w, int rows);
// x: [rows, w.inputs].
void quantize_exact(const ExactMatrix& w, const float* x, int rows, const ExactRows& out, const Queue& queue);

// What comes of the two halves of a row of products, gate and up; as in the recipe.
enum class ExactGate : int { none, silu, gelu_tanh, gelu, clamped_silu };

struct ExactGemm {
  ExactMatrix w;
  const char* const* experts = nullptr;  // [routing.end - routing.begin] on the GPU, or null
  const char* adjacent = nullptr;  // where experts [first, end) are, one after the other, but for those in `experts`
  int first = 0, end = INT_MAX;    // experts that are computed, if they are in either
  const float* bias = nullptr;     // [experts, n], or null
  ExactRows x;
  Routing routing;
  bool gathers = false;  // x has rows, otherwise entries
  int rows = INT_MAX;    // of the step: no expert has more entries
  ExactGate gate = ExactGate::none;
  float alpha = 0, limit = 0;  // of clamped_silu
  float* y = nullptr;          // [entries, n], or [entries, n / 2] of gate and up
};
// Products of all entries with their experts' matrices, by tiles of routing, which has at most kExactTile entries a
// tile. entries: of all experts in the step, at most.
void gemm_exact(const ExactGemm& p, int entries, const Queue& queue);

}  // namespace as::cuda
