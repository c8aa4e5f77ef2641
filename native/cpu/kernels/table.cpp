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

const Kernels& kernels() {
  static const Kernels table = {AS_NAME(AS_ISA),
                                {panel_rows_count, kPairs},
                                matmul,
                                matmul_gated,
                                prepared,
                                prepare,
                                quantize,
                                read_row,
                                rms_norm,
                                square_sum,
                                multiply,
                                silu_mul,
                                gelu_tanh_mul,
                                clamped_silu_mul,
                                scale,
                                soft_cap,
                                add,
                                sum_partials,
                                weighted_sum,
                                prepare_queries,
                                attend,
                                end_attention,
                                merge,
                                rope,
                                rope_interleaved,
                                logit_kernels,
                                read_memory,
                                multiply_add,
                                integer_multiply_add,
                                kMultiplyTiles};
  return table;
}

}  // namespace AS_ISA
}  // namespace as
