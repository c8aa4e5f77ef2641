// y = x w^T + bias with packed weights (format.h: Packed).
//
// Recipe of every output, whatever the number of rows: one chain of fused multiply-adds over k in ascending order, from
// zero, then + bias. Cutting K into blocks only spills the chain to memory between blocks, which rounds nothing.
//
// With one row a panel gives NV chains: NV * W / 4 weights a cycle, still 2 to 4 times what memory delivers to a core.
#include <algorithm>
#include "kernels.h"
#include "simd.h"
#include "tables.h"
#include "tile.h"

namespace as {
namespace AS_ISA {
namespace {

// c [R, NR] (row stride ldc) = (load ? c : 0) + x [R, k] w [k, NR]
template <int R, typename T>
inline void micro(const T* w, int k, const float* x, int ldx, float* c, int ldc, bool load) {
  vf acc[R][NV];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < NV; v++) acc[r][v] = load ? vload(c + (size_t)r * ldc + v * W) : vzero();
  for (int i = 0; i < k; i++) {
    vf b[NV];
    for (int v = 0; v < NV; v++) b[v] = vload_as<T>(w + (size_t)i * NR + v * W);
    for (size_t line = 0; line < NR * sizeof(T); line += 64) __builtin_prefetch(reinterpret_cast<const char*>(w + (size_t)i * NR) + 2048 + line);
    for (int r = 0; r < R; r++) {
      const vf a = vset(x[(size_t)r * ldx + i]);
      for (int v = 0; v < NV; v++) acc[r][v] = vfma(a, b[v], acc[r][v]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < NV; v++) vstore(c + (size_t)r * ldc + v * W, acc[r][v]);
}

template <typename T, int R>
inline void dispatch(int rows, const T* w, int k, const float* x, int ldx, float* c, int ldc, bool load) {
  if (rows == R) return micro<R, T>(w, k, x, ldx, c, ldc, load);
  if constexpr (R > 1) dispatch<T, R - 1>(rows, w, k, x, ldx, c, ldc, load);
}

// One panel against rows [0, m), K in one piece or in blocks.
template <typename T>
void panel_rows(const T* w, int k, const float* x, int ldx, const float* bias, float* y, int ldy, int m, int columns) {
  alignas(64) float converted[KC * NR];
  alignas(64) float edge[MR * NR];
  const int kc = m <= MR ? k : KC;
  for (int k0 = 0; k0 < k; k0 += kc) {
    const int kn = std::min(kc, k - k0);
    const T* wk = w + (size_t)k0 * NR;
    const bool last = k0 + kn == k;
    const bool convert = sizeof(T) == 2 && m > 2 * MR;  // pays when several tiles share it
    if (convert)
      for (int i = 0; i < kn * NR; i += W) vstore(converted + i, vload_as<T>(wk + i));
    for (int r0 = 0; r0 < m; r0 += MR) {
      const int rows = std::min(MR, m - r0);
      float* out = y + (size_t)r0 * ldy;
      float* c = columns == NR ? out : edge;
      const int ldc = columns == NR ? ldy : NR;
      if (columns < NR && k0 > 0)
        for (int r = 0; r < rows; r++) std::copy_n(out + (size_t)r * ldy, columns, edge + r * NR);
      const float* xr = x + (size_t)r0 * ldx + k0;
      if (convert) dispatch<float, MR>(rows, converted, kn, xr, ldx, c, ldc, k0 > 0);
      else dispatch<T, MR>(rows, wk, kn, xr, ldx, c, ldc, k0 > 0);
      for (int r = 0; r < rows; r++) {
        float* row = out + (size_t)r * ldy;
        if (columns < NR) std::copy_n(edge + r * NR, columns, row);
        if (last && bias)
          for (int j = 0; j < columns; j++) row[j] += bias[j];
      }
    }
  }
}

template <typename T>
void matmul_typed(const Packed& w, const float* x, int ldx, const float* bias, float* y, int ldy, int m, int p0, int p1) {
  for (int m0 = 0; m0 < m; m0 += MB) {
    const int rows = std::min(MB, m - m0);
    for (int p = p0; p < p1; p++) {
      const int column = p * NR;
      panel_rows<T>(reinterpret_cast<const T*>(w.data + p * w.panel_bytes), w.k, x + (size_t)m0 * ldx, ldx,
                    bias ? bias + column : nullptr, y + (size_t)m0 * ldy + column, ldy, rows, std::min(NR, w.n - column));
    }
  }
}

}  // namespace

const int panel_rows_count = NR;

void matmul(const Packed& w, const Activations& a, const float* bias, float* y, int ldy, int m, int p0, int p1) {
#if defined(AS_ISA_AMX)
  if (matmul_tiles(w, a, bias, y, ldy, m, p0, p1)) return;
#endif
  if (w.format == Format::f32) matmul_typed<float>(w, a.x, a.ldx, bias, y, ldy, m, p0, p1);
  else if (w.format == Format::bf16) matmul_typed<uint16_t>(w, a.x, a.ldx, bias, y, ldy, m, p0, p1);
  else if (has_integer_activations(w.format)) matmul_integer(w, a, bias, y, ldy, m, p0, p1);
  else matmul_weight_only(w, a, bias, y, ldy, m, p0, p1);
}

}  // namespace AS_ISA
}  // namespace as
