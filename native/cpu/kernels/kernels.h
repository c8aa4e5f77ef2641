// The table of kernels. Kernels are compiled once for each instruction set and chosen at import (isa.cpp).
//
// Invariance: every value that a kernel writes follows a fixed recipe of its inputs. It does not depend on the number
// of rows, threads or tiles.
#pragma once
#include <cstddef>
#include <cstdint>

#include "common/source_type.h"
#include "cpu/kernels/format.h"
#include "cpu/kernels/span_layout.h"

namespace as {

constexpr int kTileRows = 16;

// Attention of a tile of rows (query heads that share one KV head) over one block of context.
struct AttentionTile {
  int rows;                   // <= kTileRows
  const float* q[kTileRows];  // each [head_dim]
  int context[kTileRows];     // row sees the sequence's tokens [first, context)
  int first[kTileRows];
  float scale;
  float soft_cap;  // of scores; 0: none
  bool sloped;     // scores decrease with distance, by these slopes
  float slopes[kTileRows];
  const SpanLayout* layout;
  const char* converted;  // queries, as convert_queries() wrote them
  // The block: tokens [begin, begin + tokens) of the sequence that at least one row sees.
  int begin, tokens;
  const void* const* spans;  // of the block, this layer and KV head
  const void* const* next;   // to prefetch: the following block's, or again the block's
  bool cold;                 // prefetch, because the block was not just read for another tile
  float* maximum;            // [rows]
  float* sum;                // [rows]
  float* out;                // [rows][padded_dim], not normalized
};
constexpr int kBlockTokens = 128;  // context per partial result of attention, for any span size

// Blocks of a context of that length.
inline int context_blocks(int length) { return (length + kBlockTokens - 1) / kBlockTokens; }

// Bytes of a tile's converted queries: 16 bits a value, and two floats a row.
inline size_t query_bytes(const SpanLayout& s) { return (size_t)kTileRows * (s.query_dim() * 2 + 2 * sizeof(float)); }

// Rows of a checkpoint's matrix. The destination, of k columns, takes their columns [column, column + k). Groups of
// `group` are counted over all `columns`, so the quantized values do not depend on the rank's slice.
struct SourceRows {
  const void* data;  // of row `row_offset` of the destination
  SourceType type;
  int64_t stride, row_offset, column, columns, group;
  int64_t step = 1;  // from one value of a row to the next; kernels require 1, Weights does not
};

struct LogitKernels;

enum class Activation { gelu, gelu_tanh, silu, tanh, relu, quick_gelu };

struct Kernels {
  const char* name;
  const Kernels* exact;  // with activations (silu and others) that have the same bits on every device (silu.h)
  Rules rules;
  // y[m, n] = x w^T (+ bias) for panels [p0, p1), with row stride ldy. Activations are converted if converted_layout()
  // says so.
  void (*matmul)(const Packed& w, const Activations& a, const float* bias, float* y, int ldy, int m, int p0, int p1);
  // silu(gate) * up for panels [p0, p1) of gate. The first half of w's rows gives gate and the second half up; each
  // half has whole panels. The same bits as matmul, silu_mul and, if rounded, convert_row.
  void (*matmul_gated)(const Packed& w, const Activations& a, const float* bias, const GatedOutput& out, int m, int p0,
                       int p1);
  ConvertedLayout (*converted_layout)(const Packed& w);
  void (*convert_row)(const Packed& w, const float* x, char* out);
  // Quantizes rows [r0, r1) of w. Threads must not share a panel. Returns the number of NaN and infinite values in the
  // groups that w contains parts of (those groups become NaN).
  int64_t (*quantize)(const Packed& w, const SourceRows& source, int64_t r0, int64_t r1);
  void (*read_row)(const Packed& w, int64_t row, float* y);  // y [k]: one row, dequantized
  void (*rms_norm)(const float* x, const float* w, float* y, int n, float eps);
  float (*square_sum)(const float* x, int n);
  void (*layer_norm)(const float* x, const float* w, const float* bias, float* y, int n, float eps);
  void (*multiply)(float* x, const float* w, float factor, size_t n);  // x *= factor * w
  void (*silu_mul)(const float* gate, const float* up, float* y, int n);
  void (*gelu_tanh_mul)(const float* gate, const float* up, float* y, int n);
  void (*gelu_mul)(const float* gate, const float* up, float* y, int n);
  void (*activate)(Activation function, float* x, size_t n);
  void (*clamped_silu_mul)(const float* gate, const float* up, float* y, int n, float alpha, float limit);
  void (*sigmoid_mul)(const float* gate, const float* x, float* y, int n);  // y = x * sigmoid(gate)
  void (*scale)(float* x, float factor, size_t n);
  void (*soft_cap)(float* x, float factor, float cap, size_t n);  // x = cap * tanh(factor * x / cap)
  void (*add)(float* x, const float* y, size_t n);
  // Sums of `count` partials in order: out[i] = ((p0[i] + p1[i]) + p2[i]) + ...
  void (*sum_partials)(const float* const* partials, int count, float* out, size_t n);
  // Weighted sums of `count` rows in order, from zero; zeros for 0 rows. out may be one of the rows.
  void (*weighted_sum)(const float* const* rows, const float* weights, int count, float* out, size_t n);
  float (*dot)(const float* a, const float* b, int n);
  // of_a[i] = dot(rows + i * ld, a), of_b[i] = dot(rows + i * ld, b)
  void (*dots)(const float* rows, size_t ld, int count, const float* a, const float* b, int n, float* of_a,
               float* of_b);
  // y[r] += x[r][0] m[0] + x[r][1] m[1] + ..., in this order, for rows of n values and r < rows. A value does not
  // depend on the number of rows.
  void (*add_products)(const float* x, size_t ldx, int rows, const float* m, size_t ldm, int count, float* y,
                       size_t ldy, int n);
  // decays = rate * log(1 + e^(a + bias)), rate <= 0, and factors = e^decays.
  void (*channel_decays)(const float* a, const float* bias, double rate, int n, float* decays, float* factors);
  // The same with decays = bound * sigmoid(-rate * (a + bias)), bound <= 0.
  void (*bounded_decays)(const float* a, const float* bias, double rate, double bound, int n, float* decays,
                         float* factors);
  // rows[j] = keys[j] * (factors[count - 1] * factors[count - 2] * ... * factors[j + 1]), for rows of n values and j <
  // count, with the products in this order; whole: of all factors.
  void (*decay_rows)(const float* keys, const float* factors, int count, int n, float* rows, float* whole);
  // y = x * e^(later - earlier), whose exponent is at most 0; earlier: null for zeros.
  void (*decay)(const float* x, const double* later, const double* earlier, float* y, int n);
  // factors[i] = e^(later - earlier[i]), whose exponent is at most 0, with the bits of exact::exp.
  void (*decay_factors)(double later, const double* earlier, int count, float* factors);
  // y = bias + rows[0] weights[0] + rows[1] weights[1] + ..., in this order, then SiLU if activated. bias: may be null.
  void (*causal_conv)(const float* const* rows, const float* const* weights, int taps, const float* bias, float* y,
                      int n, bool activated);
  // Softmax over rows in each channel: out[i] = the sum of values[r][i] times the softmax of gates[r][i] + bias[r][i]
  // over r. Sums are in the order of the rows.
  void (*softmax_pool)(const float* const* values, const float* const* gates, const float* const* bias, int rows,
                       float* out, int n);
  // Converts the tile's queries to the kernel's format, query_bytes() at `out`, for all blocks.
  void (*convert_queries)(const AttentionTile& tile, char* out);
  // Packs `tokens` rows of a latent cache (packed_layout) for attend(). spans, next: those of the rows, and of the rows
  // to prefetch meanwhile, with span_size tokens each. Whole groups of keys are read, and attend() may read the rows.
  void (*pack_latent)(const SpanLayout& packed, const void* const* spans, const void* const* next, int span_size,
                      int tokens, char* out);
  void (*attend)(const AttentionTile* tiles,
                 int count);  // of `count` tiles of one block: a tile's softmax overlaps with other tiles' products
  // Scores of an indexer's row for a block: out[t] = the sum over heads of weight * max(0, query key), in this order.
  // The tiles, of layout index_layout() and scale 1, are the row's heads, kTileRows each but the last. Whole groups of
  // keys are read and written.
  void (*index_scores)(const AttentionTile* tiles, int count, const float* weights, float* out);
  void (*end_attention)();  // called by AttentionScope
  // Merges the next block's partial results (for each row a maximum, a sum and [padded_dim]) into the running ones.
  void (*merge)(int rows, float* maximum, float* sum, float* out, const float* block_maximum, const float* block_sum,
                const float* block_out, int padded_dim);
  // Rotates pairs (x[i], x[i + half]) by angles with the given cosines and sines (each [half]).
  void (*rope)(float* x, const float* cosine, const float* sine, int half);
  void (*rope_interleaved)(float* x, const float* cosine, const float* sine, int half);  // pairs (x[2 i], x[2 i + 1])
  const LogitKernels& (*logits)();  // passes over logits for the sampler
  // The roofline (roofline.cpp).
  float (*read_memory)(const float* p, size_t n);
  double (*multiply_add)(int64_t rounds, float* keep);
  double (*integer_multiply_add)(int64_t rounds, float* keep);
  double (*multiply_tiles)(int64_t rounds, bool integers);  // null without AMX
};

// The kernels in use.
const Kernels& kernels();

// Surrounds a thread's calls of attend(): ends attention after an exception, too.
class AttentionScope {
 public:
  explicit AttentionScope(const Kernels& kernels) : kernels_(kernels) {}
  ~AttentionScope() { kernels_.end_attention(); }
  AttentionScope(const AttentionScope&) = delete;
  AttentionScope& operator=(const AttentionScope&) = delete;

 private:
  const Kernels& kernels_;
};

}  // namespace as
