#include "cpu/kernels/tables.h"

#define AS_NAME_(x) #x
#define AS_NAME(x) AS_NAME_(x)

namespace as {
namespace AS_ISA {

#if defined(AS_ISA_AVX512_BF16)
constexpr bool kPairs = true;
#else
constexpr bool kPairs = false;
#endif
#if defined(AS_ISA_AMX)
constexpr auto kMultiplyTiles = multiply_tile_registers;
#else
constexpr double (*kMultiplyTiles)(int64_t, bool) = nullptr;
#endif

namespace {

template <bool kExact>
void set_gates(Kernels& k) {
  k.matmul_gated = matmul_gated<kExact>;
  k.silu_mul = silu_mul<kExact>;
  k.gelu_tanh_mul = gelu_tanh_mul<kExact>;
  k.gelu_mul = gelu_mul<kExact>;
  k.activate = activate<kExact>;
  k.clamped_silu_mul = clamped_silu_mul<kExact>;
}

}  // namespace

const Kernels& kernels() {
  static const Kernels table = [] {
    Kernels k{};
    k.name = AS_NAME(AS_ISA);
    k.rules = {panel_rows_count, kPairs};
    k.matmul = matmul;
    k.converted_layout = converted_layout;
    k.convert_row = convert_row;
    k.quantize = quantize;
    k.read_row = read_row;
    k.rms_norm = rms_norm;
    k.square_sum = square_sum;
    k.layer_norm = layer_norm;
    k.multiply = multiply;
    set_gates<false>(k);
    k.sigmoid_mul = sigmoid_mul;
    k.scale = scale;
    k.soft_cap = soft_cap;
    k.add = add;
    k.sum_partials = sum_partials;
    k.weighted_sum = weighted_sum;
    k.dot = dot;
    k.dots = dots;
    k.add_products = add_products;
    k.channel_decays = channel_decays;
    k.bounded_decays = bounded_decays;
    k.decay_rows = decay_rows;
    k.decay = decay;
    k.decay_factors = decay_factors;
    k.causal_conv = causal_conv;
    k.softmax_pool = softmax_pool;
    k.convert_queries = convert_queries;
    k.pack_latent = pack_latent;
    k.attend = attend;
    k.index_scores = index_scores;
    k.end_attention = end_attention;
    k.merge = merge;
    k.rope = rope;
    k.rope_interleaved = rope_interleaved;
    k.logits = logit_kernels;
    k.read_memory = read_memory;
    k.multiply_add = multiply_add;
    k.integer_multiply_add = integer_multiply_add;
    k.multiply_tiles = kMultiplyTiles;
    static Kernels exact = k;
    set_gates<true>(exact);
    k.exact = exact.exact = &exact;
    return k;
  }();
  return table;
}

}  // namespace AS_ISA
}  // namespace as
