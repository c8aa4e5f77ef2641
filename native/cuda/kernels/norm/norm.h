// Ops on rows: embedding, norms, activation functions, rotary embedding.
#pragma once
#include "cuda/kernels/common/types.h"
#include "cuda/kernels/sampling/argmax.h"

namespace as::cuda {

// Dequantizes one row of a matrix to out [k] float32.
void read_row(const Matrix& matrix, int row, float* out, const Queue& queue);

// The tokens of a step's rows. sampled: the argmax of each output of the previous step; tokens refer to it by
// sampled_after() (batch.h). numbers: null, or of each row that the plan gives its number, otherwise -1; such a row has
// given_id instead of its token.
struct TokenRows {
  const int* tokens = nullptr;
  const Argmax* sampled = nullptr;
  const int* numbers = nullptr;
  int given_id = 0;
};
void embed(const Matrix& table, const TokenRows& tokens, int rows, int vocab_begin, float scale, const Rows& out,
           const Queue& queue);
// unit_offset: 1 is added to the weight.
struct Norm {
  const float* weight = nullptr;
  float eps = 0;
  bool unit_offset = false;
};
// Limits of rows that a GEMM normalizes itself in shared memory: columns of 16-bit rows, columns of 8-bit rows, and
// bytes after the row that may be read.
constexpr int kNormedColumns = 4096, kNormedBytes = 8192, kBehindRow = 8 * 16;
void rms_norm(const float* x, const Norm& norm, int rows, const Rows& out, const Queue& queue);
void add(float* x, const float* y, size_t count, const Queue& queue);
// x [rows, width] times the first columns of y [rows, y_width].
void multiply(float* x, int width, const float* y, int y_width, int rows, const Queue& queue);
// weight: null, or one more factor in the device's memory.
void scale(float* x, float factor, const float* weight, size_t count, const Queue& queue);

// in [rows, 2 width]
void silu_mul(const float* in, const Gating& gating, int rows, const Rows& out, const Queue& queue);
// The tanh approximation of GELU; in [rows, 2 width]
void gelu_tanh_mul(const float* in, int rows, const Rows& out, const Queue& queue);
// cap * tanh(x / cap)
void soft_cap(float* x, float cap, size_t count, const Queue& queue);
// RMS norm over all query heads and over all key heads of x = [queries | keys | values]. qk_square_sums() gives sums
// [rows, 2] of the squares of this rank's queries and keys; qk_norm() applies the sums over all ranks, of q_width and
// k_width values, and the weights.
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
// Row i of `out` is row chosen[i] of `in`, of the same width (its float32 values, or tiles if it has none).
void select_rows(const Rows& in, const int* chosen, int rows, const Rows& out, const Queue& queue);
// keep_rows() (hidden_rows.h) of float32 rows, and select_rows() of the same rows, in one kernel.
void keep_and_select(const float* in, const int* places, int rows, float* kept, const int* chosen, int outputs,
                     const Rows& out, const Queue& queue);
// Converts float32 rows to tiles.
void to_tiles(const float* in, int rows, const Rows& out, const Queue& queue);
// Writes the columns of `in` (float32, or tiles) to tiles in another order: column i of `out` is column order[i].
void gather_columns(const Rows& in, const int* order, int rows, const Rows& out, const Queue& queue);

struct RotaryTable {
  const float *inverse = nullptr, *longer = nullptr;  // [dim / 2]; longer: null, or used beyond original_max
  int dim = 0;
  bool dynamic = false, powers = false;
  float attention_factor = 1;
  double base = 0, factor = 1, original_max = 0;
  float *cosine = nullptr, *sine = nullptr;  // [rows, dim / 2]
};
// prompts: the prompt length of each row's sequence. The table depends on it, or on the row's position if that is
// larger.
void rotary_table(const RotaryTable& table, const int* positions, const int* prompts, int rows, const Queue& queue);

// `count` adjacent heads, in columns [offset, offset + count * head_dim).
struct Heads {
  int offset = 0, count = 0, head_dim = 0;
};
struct HeadNorm {
  Heads heads;
  Norm norm;
};
// RMS norm of each head of two groups of heads, such as queries and keys. A group may be empty (count 0).
void head_norm(float* x, int width, const HeadNorm& first, const HeadNorm& second, int rows, const Queue& queue);
// The same of one group, and then rope() in interleaved pairs, from feature `skip` on, an even number.
void head_norm_and_rope(float* x, int width, const HeadNorm& norm, int skip, const RotaryTable& table, int rows,
                        const Queue& queue);
// inverse: rotates back.
void rope(float* x, int width, const Heads& heads, const RotaryTable& table, bool interleaved, bool inverse, int rows,
          const Queue& queue);

// silu_mul() of columns in the order of pair_rows(). bias: null, or added first, in the order before pairing.
void silu_mul_pairs(const float* in, const float* bias, int rows, const Rows& out, const Queue& queue);

}  // namespace as::cuda
