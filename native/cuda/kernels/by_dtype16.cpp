// Ops of which there is one for each type of 16 bits: what they are given says which it is. Those that have nothing of
// 16 bits go to bfloat16's, which are there for all formats.
#include "cuda/kernels/by_dtype16.h"

namespace as::cuda {

#define AS_CALL(dtype, op, ...) return (dtype) == DType16::f16 ? f16::op(__VA_ARGS__) : bf16::op(__VA_ARGS__)

void pack_rows(const void* rows, SourceType source, int64_t stride, int count, const Matrix& matrix, int first,
               unsigned long long* bad, const Queue& queue) {
  AS_CALL(matrix.dtype, pack_rows, rows, source, stride, count, matrix, first, bad, queue);
}
void read_row(const Matrix& matrix, int row, float* out, const Queue& queue) {
  AS_CALL(matrix.dtype, read_row, matrix, row, out, queue);
}
void fill_noise(void* data, size_t bytes, DType16 dtype, float size, uint64_t seed, const Queue& queue) {
  AS_CALL(dtype, fill_noise, data, bytes, dtype, size, seed, queue);
}
void pair_rows(const Matrix& from, const Matrix& to, const Queue& queue) { bf16::pair_rows(from, to, queue); }

void embed(const Matrix& table, const TokenRows& tokens, int rows, int vocab_begin, float scale, const Rows& out,
           const Queue& queue) {
  AS_CALL(table.dtype, embed, table, tokens, rows, vocab_begin, scale, out, queue);
}
void rms_norm(const float* x, const Norm& norm, int rows, const Rows& out, const Queue& queue) {
  AS_CALL(out.dtype, rms_norm, x, norm, rows, out, queue);
}
void silu_mul(const float* in, const Gating& gating, int rows, const Rows& out, const Queue& queue) {
  AS_CALL(out.dtype, silu_mul, in, gating, rows, out, queue);
}
void gelu_tanh_mul(const float* in, int rows, const Rows& out, const Queue& queue) {
  AS_CALL(out.dtype, gelu_tanh_mul, in, rows, out, queue);
}
void select_rows(const Rows& in, const int* chosen, int rows, const Rows& out, const Queue& queue) {
  AS_CALL(out.dtype, select_rows, in, chosen, rows, out, queue);
}
void keep_and_select(const float* in, const int* places, int rows, float* kept, const int* chosen, int outputs,
                     const Rows& out, const Queue& queue) {
  AS_CALL(out.dtype, keep_and_select, in, places, rows, kept, chosen, outputs, out, queue);
}
void to_tiles(const float* in, int rows, const Rows& out, const Queue& queue) {
  AS_CALL(out.dtype, to_tiles, in, rows, out, queue);
}
void gather_columns(const Rows& in, const int* order, int rows, const Rows& out, const Queue& queue) {
  AS_CALL(out.dtype, gather_columns, in, order, rows, out, queue);
}

void copy_given(const GivenRows& given, bool own, bool only, int rows, const Rows& out, const Queue& queue) {
  AS_CALL(out.dtype, copy_given, given, own, only, rows, out, queue);
}
void merge_rows(const float* in, int width, int count, Merge how, int rows, const Rows& out, const Queue& queue) {
  AS_CALL(out.dtype, merge_rows, in, width, count, how, rows, out, queue);
}
void layer_norm(const float* x, const LayerNorm& norm, int rows, const Rows& out, const Queue& queue) {
  AS_CALL(out.dtype, layer_norm, x, norm, rows, out, queue);
}
void activate(const float* x, Activation function, int rows, const Rows& out, const Queue& queue) {
  AS_CALL(out.dtype, activate, x, function, rows, out, queue);
}
void gelu_mul(const float* in, int rows, const Rows& out, const Queue& queue) {
  AS_CALL(out.dtype, gelu_mul, in, rows, out, queue);
}
void merge_and_norm(const float* x, const StreamWeights& by, float* weights, const Norm& norm, int rows,
                    const Rows& out, const Queue& queue) {
  AS_CALL(out.dtype, merge_and_norm, x, by, weights, norm, rows, out, queue);
}

int prefill_clusters(DType16 dtype) { AS_CALL(dtype, prefill_clusters, dtype); }
void gemm_dtype16(const GemmArgs& p, int rows, const Queue& queue, GemmAlgo algo) {
  AS_CALL(p.w.dtype, gemm_dtype16, p, rows, queue, algo);
}

void add_expert_lora(const ExpertSums& e, int entries, const Queue& queue) {
  AS_CALL(e.sums.type, add_expert_lora, e, entries, queue);
}
void gate_entries(const GatedEntries& g, int entries, const Queue& queue) {
  AS_CALL(g.out.dtype, gate_entries, g, entries, queue);
}
void add_lora(const AdaptedSums& a, int rows, const Queue& queue) { AS_CALL(a.type, add_lora, a, rows, queue); }
void silu_mul_pairs(const float* in, const float* bias, int rows, const Rows& out, const Queue& queue) {
  AS_CALL(out.dtype, silu_mul_pairs, in, bias, rows, out, queue);
}

void store_cache(const Attention& a, const int* where, const Rope* rope, bool queries, int rows, const Queue& queue) {
  AS_CALL(a.cache.dtype, store_cache, a, where, rope, queries, rows, queue);
}
void attend_decode(const Attention& a, AttentionAlgo algo, const AttentionTile* tiles, int count, int sharers,
                   const Queue& queue) {
  AS_CALL(a.cache.dtype, attend_decode, a, algo, tiles, count, sharers, queue);
}
void attend_prefill(const Attention& a, AttentionAlgo algo, const AttentionTile* tiles, int count, const Rope* rope,
                    const Queue& queue) {
  AS_CALL(a.cache.dtype, attend_prefill, a, algo, tiles, count, rope, queue);
}
bool attend_prefill_ropes(const Attention& a, AttentionAlgo algo, const Rope& rope) {
  AS_CALL(a.cache.dtype, attend_prefill_ropes, a, algo, rope);
}
void store_and_attend(const Attention& a, const Rope* rope, const AttentionTile* tiles, int count, int sharers,
                      const Queue& queue) {
  AS_CALL(a.cache.dtype, store_and_attend, a, rope, tiles, count, sharers, queue);
}
void store_latent(const Attention& a, const int* where, int rows, const Queue& queue) {
  AS_CALL(a.cache.dtype, store_latent, a, where, rows, queue);
}
void attend_latent_decode(const Attention& a, AttentionAlgo algo, const AttentionTile* tiles, int count, int sharers,
                          const Queue& queue) {
  AS_CALL(a.cache.dtype, attend_latent_decode, a, algo, tiles, count, sharers, queue);
}
void attend_latent_prefill(const Attention& a, AttentionAlgo algo, const AttentionTile* tiles, int count,
                           const Queue& queue) {
  AS_CALL(a.cache.dtype, attend_latent_prefill, a, algo, tiles, count, queue);
}
void attend_latent_selected(const Attention& a, AttentionAlgo algo, const AttentionTile* tiles, int count,
                            const Queue& queue) {
  AS_CALL(a.cache.dtype, attend_latent_selected, a, algo, tiles, count, queue);
}
void score_positions(const Indexer& p, int first, int rows, bool prompts, const Queue& queue) {
  AS_CALL(p.keys.dtype, score_positions, p, first, rows, prompts, queue);
}
void compress(const Compressor& p, int rows, const Queue& queue) {
  AS_CALL(p.entries.cache.dtype, compress, p, rows, queue);
}

void sum_ranks(const RankSum& sum, int rows, const Queue& queue) { AS_CALL(sum.dtype, sum_ranks, sum, rows, queue); }

void gemm_heads(const HeadGemm& p, int rows, const Queue& queue) { AS_CALL(p.y.dtype, gemm_heads, p, rows, queue); }

void gemm_experts(const ExpertGemmArgs& p, int entries, int tile_rows, const Queue& queue, GemmAlgo algo) {
  AS_CALL(p.gemm.w.dtype, gemm_experts, p, entries, tile_rows, queue, algo);
}
void combine_experts(const Combination& c, int rows, const Queue& queue) {
  AS_CALL(c.dtype(), combine_experts, c, rows, queue);
}
void add_shared_expert(const SharedSum& sum, int rows, const Queue& queue) {
  AS_CALL(sum.dtype(), add_shared_expert, sum, rows, queue);
}
bool norms_with_logits(const GemmArgs& logits) { return bf16::norms_with_logits(logits); }
void norm_and_logits(const float* x, const Norm& norm, const Rows& normed, const GemmArgs& logits, const Queue& queue) {
  AS_CALL(normed.dtype, norm_and_logits, x, norm, normed, logits, queue);
}
void gate_row(const ExpertGemmArgs& e, const ChosenRow& row, const Queue& queue) {
  AS_CALL(e.gemm.w.dtype, gate_row, e, row, queue);
}
void combine_row(const ExpertGemmArgs& e, const ChosenRow& row, const Combination& c, const Queue& queue) {
  AS_CALL(e.gemm.w.dtype, combine_row, e, row, c, queue);
}
void gemm_chosen_experts(const ExpertGemmArgs& e, const ChosenRow& row, const Queue& queue) {
  AS_CALL(e.gemm.w.dtype, gemm_chosen_experts, e, row, queue);
}

void gated_rms_norm(float* x, const float* gate, const GatedNorm& norm, const Rows& out, int rows, const Queue& queue) {
  AS_CALL(out.dtype, gated_rms_norm, x, gate, norm, out, rows, queue);
}
void relu_square(const float* x, const Rows& out, int rows, const Queue& queue) {
  AS_CALL(out.dtype, relu_square, x, out, rows, queue);
}
void sigmoid_gate(const float* x, const float* gate, const Rows& out, int rows, const Queue& queue) {
  AS_CALL(out.dtype, sigmoid_gate, x, gate, out, rows, queue);
}

}  // namespace as::cuda
