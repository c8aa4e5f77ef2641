// silu(gate) * up of a matrix [2n, k] that contains both, without writing the 2n float32 columns to memory.
//
// For a block of rows, the sums of a panel of gate and of the matching panel of up go to two small buffers. silu_mul
// combines these. The result is rounded at once if the following GEMM reads bfloat16.
#include <algorithm>
#include <cstring>

#include "cpu/kernels/kernels.h"
#include "cpu/kernels/silu.h"
#include "cpu/kernels/tables.h"
#include "cpu/kernels/tile.h"

namespace as {
namespace AS_ISA {

template <bool kExact>
void matmul_gated(const Packed& w, const Activations& a, const float* bias, const GatedOutput& out, int m, int p0,
                  int p1) {
#if defined(AS_ISA_AMX)
  if (!kExact && matmul_gated_tiles(w, a, bias, out, m, p0, p1)) return;  // matmul() uses tiles, too
#endif
  alignas(64) thread_local float sums[2][MB * NR];
  const int half = w.panels() / 2;
  for (int m0 = 0, most = block_rows(m); m0 < m; m0 += most) {
    const int rows = std::min(most, m - m0);
    const Activations part{a.x + (size_t)m0 * a.ldx, a.ldx, a.converted + m0 * a.stride, a.stride};
    for (int p = p0; p < p1; p++) {
      for (int i = 0; i < 2; i++) {
        Packed panel = w;
        panel.data += (p + i * half) * w.panel_bytes, panel.n = NR;
        matmul(panel, part, bias ? bias + (p + i * half) * NR : nullptr, sums[i], NR, rows, 0, 1);
      }
      silu_mul<kExact>(sums[0], sums[1], sums[0], rows * NR);
      for (int r = 0; r < rows; r++) {
        const float* values = sums[0] + r * NR;
#if defined(AS_ISA_AVX512_BF16)
        if (out.rounded) {
          const __m512bh both = _mm512_cvtne2ps_pbh(vload(values + W), vload(values));
          std::memcpy(out.rounded + (m0 + r) * out.rounded_stride + p * NR * 2, &both, sizeof both);
          continue;
        }
#endif
        std::memcpy(out.y + (size_t)(m0 + r) * out.ldy + p * NR, values, NR * sizeof(float));
      }
    }
  }
}

template void matmul_gated<false>(const Packed&, const Activations&, const float*, const GatedOutput&, int, int, int);
template void matmul_gated<true>(const Packed&, const Activations&, const float*, const GatedOutput&, int, int, int);

}  // namespace AS_ISA
}  // namespace as
