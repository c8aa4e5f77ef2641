// Ops on rows: embedding, norms, activations, rotary embedding.
#pragma once
#include "cuda/kernels/common/types.h"
#include "cuda/kernels/sampling/argmax.h"

namespace as::cuda {

// out [k] float32: a row as the matrix has it.
void read_row(const Matrix& matrix, int row, float* out, const Queue& queue);

// drawn: of the outputs of the step before, the likeliest tokens, for which tokens have sampled_after() (batch.h).
void embed(const Matrix& table, const int* tokens, const Argmax* drawn, int rows, int vocab_begin, float scale,
           const Rows& out, const Queue& queue);
// weight: of a norm; 1 is added to it with unit_offset.
struct Norm {
  const float* weight = nullptr;
  float eps = 0;
  bool unit_offset = false;
};
// Rows that a GEMM norms itself, in shared memory: columns at most, of 16 bits and of 8; bytes behind them that may be
// read.
constexpr int kNormedColumns = 4096, kNormedBytes = 8192, kBehindRow = 8 * 16;
void rms_norm(const float* x, const Norm& norm, int rows, const Rows& out, const Queue& queue);
void add(float* x, const float* y, size_t count, const Queue& queue);
void scale(float* x, float factor, size_t count, const Queue& queue);

// in [rows, 2 width]
void silu_mul(const float* in, const Gating& gating, int rows, const Rows& out, const Queue& queue);
// gelu as tanh approximates it; in [rows, 2 width]
void gelu_tanh_mul(const float* in, int rows, const Rows& out, const Queue& queue);
// cap * tanh(x / cap)
void soft_cap(float* x, float cap, size_t count, const Queue& queue);
// Of [queries | keys | values]: sums [rows, 2] of the squares of all queries, and of k_columns from k_offset on; and
// both multiplied with weights, by such sums over all ranks, as one vector of that width each.
struct QkColumns {
  int q_columns = 0, k_offset = 0, k_columns = 0;
};
void qk_square_sums(const float* x, int width, const QkColumns& columns, int rows, float* sums, const Queue& queue);
struct QkNorm {
  const float *q_weight = nullptr, *k_weight = nullptr;
  int q_columns = 0, k_columns = 0, q_width = 0, k_width = 0;
  float eps = 0;
};
void qk_norm(float* x, int width, const QkNorm& norm, const float* sums, int rows, const Queue& queue);
void select_rows(const float* in, const int* chosen, int rows, const Rows& out, const Queue& queue);
// Float rows into tiles.
void to_tiles(const float* in, int rows, const Rows& out, const Queue& queue);

struct RotaryTable {
  const float *inverse = nullptr, *longer = nullptr;  // [half]; longer: null, or beyond original_max
  int dim = 0;
  bool dynamic = false, powers = false;
  float attention_factor = 1;
  double base = 0, factor = 1, original_max = 0;
  float *cosine = nullptr, *sine = nullptr;  // [rows, dim / 2]
};
// prompts: of each row's sequence, its prompt's length. A table goes by that, or by the row's own if it is longer.
void rotary_table(const RotaryTable& table, const int* positions, const int* prompts, int rows, const Queue& queue);

// What is done to heads that stand side by side in columns [offset, offset + heads * head_dim).
struct Heads {
  int offset = 0, count = 0, head_dim = 0;
};
struct HeadNorm {
  Heads heads;
  Norm norm;
};
// Of some heads, and of others (none: count 0), as of queries and keys.
void head_norm(float* x, int width, const HeadNorm& first, const HeadNorm& second, int rows, const Queue& queue);
void rope(float* x, int width, const Heads& heads, const RotaryTable& table, bool interleaved, int rows,
          const Queue& queue);

// silu_mul of sums whose columns lie as pair_rows() has them; bias: null, or to be added first, as it is without.
void silu_mul_pairs(const float* in, const float* bias, int rows, const Rows& out, const Queue& queue);

}  // namespace as::cuda
