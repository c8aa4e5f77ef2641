// Declarations of the kernels that table.cpp puts into this ISA's table.
#pragma once
#include "cpu/kernels/kernels.h"

namespace as {
namespace AS_ISA {

extern const int panel_rows_count;
void matmul(const Packed& w, const Activations& a, const float* bias, float* y, int ldy, int m, int p0, int p1);
void matmul_integer(const Packed& w, const Activations& a, const float* bias, float* y, int ldy, int m, int p0, int p1);
void matmul_small_floats(const Packed& w, const Activations& a, const float* bias, float* y, int ldy, int m, int p0,
                         int p1);
// kExact: of silu (silu.h).
template <bool kExact>
void matmul_gated(const Packed& w, const Activations& a, const float* bias, const GatedOutput& out, int m, int p0,
                  int p1);
ConvertedLayout converted_layout(const Packed& w);
#if defined(AS_ISA_AMX)
// Return false if tiles are not supported or not faster for the format, group size and number of rows.
bool matmul_tiles(const Packed& w, const Activations& a, const float* bias, float* y, int ldy, int m, int p0, int p1);
bool matmul_gated_tiles(const Packed& w, const Activations& a, const float* bias, const GatedOutput& out, int m, int p0,
                        int p1);
bool matmul_tile_groups(const Packed& w, const Activations& a, const float* bias, float* y, int ldy, int m, int p0,
                        int p1);
bool matmul_gated_tile_groups(const Packed& w, const Activations& a, const float* bias, const GatedOutput& out, int m,
                              int p0, int p1);
double multiply_tile_registers(int64_t rounds, bool integers);
#endif
void convert_row(const Packed& w, const float* x, char* out);
int64_t quantize(const Packed& w, const SourceRows& source, int64_t r0, int64_t r1);
void read_row(const Packed& w, int64_t row, float* y);
void rms_norm(const float* x, const float* w, float* y, int n, float eps);
float square_sum(const float* x, int n);
void layer_norm(const float* x, const float* w, const float* bias, float* y, int n, float eps);
void multiply(float* x, const float* w, float factor, size_t n);
template <bool kExact>
void silu_mul(const float* gate, const float* up, float* y, int n);
template <bool kExact>
void gelu_tanh_mul(const float* gate, const float* up, float* y, int n);
template <bool kExact>
void gelu_mul(const float* gate, const float* up, float* y, int n);
template <bool kExact>
void activate(Activation function, float* x, size_t n);
template <bool kExact>
void clamped_silu_mul(const float* gate, const float* up, float* y, int n, float alpha, float limit);
void sigmoid_mul(const float* gate, const float* x, float* y, int n);
void scale(float* x, float factor, size_t n);
void soft_cap(float* x, float factor, float cap, size_t n);
void add(float* x, const float* y, size_t n);
void sum_partials(const float* const* partials, int count, float* out, size_t n);
void weighted_sum(const float* const* rows, const float* weights, int count, float* out, size_t n);
float dot(const float* a, const float* b, int n);
void dots(const float* rows, size_t ld, int count, const float* a, const float* b, int n, float* of_a, float* of_b);
void add_products(const float* x, size_t ldx, int rows, const float* m, size_t ldm, int count, float* y, size_t ldy,
                  int n);
void channel_decays(const float* a, const float* bias, double rate, int n, float* decays, float* factors);
void bounded_decays(const float* a, const float* bias, double rate, double bound, int n, float* decays, float* factors);
void decay_rows(const float* keys, const float* factors, int count, int n, float* rows, float* whole);
void decay(const float* x, const double* later, const double* earlier, float* y, int n);
void decay_factors(double later, const double* earlier, int count, float* factors);
void causal_conv(const float* const* rows, const float* const* weights, int taps, const float* bias, float* y, int n,
                 bool activated);
void softmax_pool(const float* const* values, const float* const* gates, const float* const* bias, int rows, float* out,
                  int n);
void rope(float* x, const float* cosine, const float* sine, int half);
void rope_interleaved(float* x, const float* cosine, const float* sine, int half);
void convert_queries(const AttentionTile& tile, char* out);
void pack_latent(const SpanLayout& packed, const void* const* spans, const void* const* next, int span_size, int tokens,
                 char* out);
#if defined(AS_ISA_AMX)
// What pack_latent() writes of a block for one tile of bfloat16: where its groups of rows are, `stride` bytes apart.
struct LatentRows {
  const char* groups[kBlockTokens / kKeyGroup];
  size_t stride;
};
#endif
void attend(const AttentionTile* tiles, int count);
void index_scores(const AttentionTile* tiles, int count, const float* weights, float* out);
void end_attention();
// Applies soft cap and slopes to a row's scores with the block's first n tokens, after multiplying them by factor.
void bend_scores(const AttentionTile& a, int row, float factor, float* scores, int n);
#if defined(AS_ISA_AVX512_BF16)
void convert_queries_bf16(const AttentionTile& tile, char* out);
void attend_bf16(const AttentionTile* tiles, int count);
void scores_bf16(const AttentionTile& a, float* out);  // products with the keys, [rows][kBlockTokens]
void end_attention_bf16();
#endif
void merge(int rows, float* maximum, float* sum, float* out, const float* block_maximum, const float* block_sum,
           const float* block_out, int padded_dim);
const LogitKernels& logit_kernels();
float read_memory(const float* p, size_t n);
double multiply_add(int64_t rounds, float* keep);
double integer_multiply_add(int64_t rounds, float* keep);

}  // namespace AS_ISA
}  // namespace as
