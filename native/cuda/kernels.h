// The kernels, as the host starts them. All are queued on a stream; pointers are of the device's memory. Values of a
// row depend on that row alone, whatever else is in a launch.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "cuda/tiles.h"

namespace as {
namespace cuda {

// Rows of values: float32 [rows, width], or bfloat16 in tiles (tiles.h) for the products that read them.
struct Rows {
  float* values = nullptr;
  uint16_t* tiles = nullptr;
  int width = 0;
};

// A matrix [n, k]: bfloat16 in tiles, or float32 row by row.
struct Matrix {
  int n = 0, k = 0;
  const float* values = nullptr;
  const uint16_t* tiles = nullptr;
};

// Where blocks of threads of one launch leave sums for each other: kScratchFloats each, and flags, zero between
// launches.
constexpr int kScratchBlocks = 144;
constexpr size_t kScratchFloats = 192 * 256;
struct Scratch {
  float* sums = nullptr;
  int* flags = nullptr;
};

// Where launches go: a stream of a chip of this capability (90 is 9.0).
struct Queue {
  cudaStream_t stream = nullptr;
  int capability = 0;
  Scratch scratch;
};

// What comes next and can be read beforehand, into the second-level cache: kernels that leave memory idle ask for it.
struct Ahead {
  const void* data = nullptr;
  size_t bytes = 0;
};

enum class Source { f32, f16, bf16 };

// Puts rows [count, matrix.k] of `source`, `stride` values apart, into rows [first, first + count) of a matrix; adds
// how many values are NaN or infinite to *bad.
void pack_rows(const void* rows, Source source, int64_t stride, int count, const Matrix& matrix, int first,
               unsigned long long* bad, const Queue& queue);
// out [k] float32: a row as the matrix has it.
void read_row(const Matrix& matrix, int row, float* out, const Queue& queue);

// ---- rows
void embed(const Matrix& table, const int* tokens, int rows, int vocab_begin, float scale, const Rows& out,
           const Queue& queue);
// weight: of a norm; 1 is added to it with unit_offset.
struct Norm {
  const float* weight = nullptr;
  float eps = 0;
  bool unit_offset = false;
};
void rms_norm(const float* x, const Norm& norm, int rows, const Rows& out, const Ahead& ahead, const Queue& queue);
void add(float* x, const float* y, size_t count, const Queue& queue);
void scale(float* x, float factor, size_t count, const Queue& queue);
// in [rows, 2 width]
void silu_mul(const float* in, int rows, const Rows& out, const Queue& queue);
void select_rows(const float* in, const int* chosen, int rows, const Rows& out, const Queue& queue);
// Float rows into tiles.
void to_tiles(const float* in, int rows, const Rows& out, const Queue& queue);

// ---- products
// y = x w^T + bias, or that added to what y has. gated: silu of the first half of the sums times the second, w being
// what pair_rows() made.
struct Product {
  Matrix w;
  const float* bias = nullptr;
  bool adds = false, gated = false;
  Rows x, y;
};
// Puts rows of gates and of what they gate side by side: in each 16 rows of `to` 8 of the first half of `from`, and the
// 8 of the second that belong to them. Both in tiles; `to` has paired_rows(from.n).
constexpr int paired_rows(int n) { return (n / 2 + 7) / 8 * 16; }
void pair_rows(const Matrix& from, const Matrix& to, const Queue& queue);
void linear_f32(const Product& p, int rows, const Queue& queue);
// The bits are the same by every kernel: mma.sync, or wgmma (chips of capability 9.0 alone) with pieces side by side
// for some rows or in a stream of weights, or one after the other for many.
enum class By { any, mma, split, stream, wide };
void linear_bf16(const Product& p, int rows, const Queue& queue, By by = By::any);

// ---- attention
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
void head_norm(float* x, int width, const Heads& heads, const Norm& norm, int rows, const Queue& queue);
void rope(float* x, int width, const Heads& heads, const RotaryTable& table, bool interleaved, int rows,
          const Queue& queue);

// The cache of a layer: spans, in each its KV heads, of each keys and then values [span_size, padded_dim].
struct LayerCache {
  char* data = nullptr;
  bool bf16 = false;
  int span_size = 0, kv_heads = 0, head_dim = 0, padded_dim = 0;

  AS_BOTH size_t head_bytes() const { return 2 * (size_t)span_size * padded_dim * (bf16 ? 2 : 4); }
  AS_BOTH size_t span_bytes() const { return head_bytes() * kv_heads; }
};

// Rows of one sequence, which attend together: of `count` adjacent rows of the step from `row` on, at positions from
// `start` on, with the spans tables[table...]. Taken as pairs (row, query head of a KV head's group), the ones from
// `first` on.
struct AttentionTile {
  int row, count, start, table, first;
};

struct Attention {
  LayerCache cache;
  int group = 1;  // query heads of a KV head
  float scale = 1, soft_cap = 0;
  int window = 0;
  const float* qkv = nullptr;  // [rows, width]: queries, keys, values
  int width = 0;
  Rows out;
  const int* tables = nullptr;  // of spans
  float* partials = nullptr;    // of runs of tiles that are split
  int most_runs = 0;            // of any sequence
};
constexpr int kRunTokens = 256;  // context is attended to in runs of so many tokens, and these merged in order
constexpr int kFewPairs = 16;    // pairs of a tile whose runs are shared out
constexpr int kManyPairs = 64;   // pairs of other tiles
constexpr int kLargestHead = 256;
size_t partial_floats(int head_dim);  // of one run of one tile and KV head

// How queries and keys are rotated: all heads of them.
struct Turn {
  RotaryTable table;
  bool interleaved = false;
};
// Keys and values of rows enter the cache; where: each row's span * span_size + place in it, -1 for none. turn: null,
// or what happens to keys on their way there, and to queries where they are.
void store_cache(const Attention& a, const int* where, const Turn* turn, int rows, const Queue& queue);
// tiles: of at most kFewPairs (few), or kManyPairs. splits: by how many blocks the runs of one of few are shared: 1 if
// no tile has several.
void attend(const Attention& a, const AttentionTile* tiles, int count, bool few, int splits, const Queue& queue);
// Both at once, of a step whose tiles are all few. False, and nothing is done, where there is no kernel for this cache.
bool store_and_attend(const Attention& a, const Turn* turn, const AttentionTile* tiles, int count, int splits,
                      const Ahead& ahead, const Queue& queue);

// ---- sampling
// Of each row, of each of kBestParts parts of the vocabulary: the greatest logit, its id (of equal ones the first; -1:
// all are -infinite), and how many logits are NaN or +infinite.
constexpr int kBestParts = 16;
struct Best {
  float logit;
  int token, not_finite;
};
void best_tokens(const float* logits, int width, int rows, Best* best, const Queue& queue);

}  // namespace cuda
}  // namespace as
