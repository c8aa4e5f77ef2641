// y = x w^T + bias with packed weights (format.h: Packed).
//
// Recipe of every output, for any number of rows: one chain of fused multiply-adds over k in ascending order from zero,
// then + bias. Dividing K into blocks only spills the chain between blocks, without rounding. With AVX-512 BF16,
// bfloat16 weights are multiplied with activations rounded to bfloat16, a pair of k in each step of the chain.
//
// With one row, a panel gives NV chains: NV * W / 4 weights a cycle, 2 to 4 times a core's memory bandwidth.
#include <algorithm>
#include "cpu/kernels/kernels.h"
#include "cpu/kernels/tables.h"
#include "cpu/kernels/tile.h"
#include "cpu/simd.h"

namespace as {
namespace AS_ISA {
namespace {

// A format's weights and activations. A step of the chain takes kStep k; T holds one output feature's weights of a step
// and X a row's activations.
template <typename Weight>
struct Floats {
  using T = Weight;
  using X = float;
  static constexpr int kStep = 1;
  static constexpr bool kConvert = sizeof(T) == 2;  // converting once pays off with several tiles
  static vf load(const T* p) { return vload_as<T>(p); }
  static vf broadcast(const X* x) { return vset(*x); }
  static vf multiply(vf acc, vf a, vf b) { return vfma(a, b, acc); }
  static const X* activations(const Activations& a, int row) { return a.x + (size_t)row * a.ldx; }
  static size_t stride(const Activations& a) { return a.ldx; }
};

#if defined(AS_ISA_AVX512_BF16)
struct Pairs {
  using T = uint32_t;
  using X = uint32_t;
  static constexpr int kStep = 2;
  static constexpr bool kConvert = false;
  static vi load(const T* p) { return iload(p); }
  static vi broadcast(const X* x) { return iset((int)*x); }
  static vf multiply(vf acc, vi a, vi b) { return vdot_bf16(acc, b, a); }
  static const X* activations(const Activations& a, int row) {
    return reinterpret_cast<const X*>(a.converted + row * a.stride);
  }
  static size_t stride(const Activations& a) { return a.stride / sizeof(X); }
};
#endif

// c [R, NR] (row stride ldc) = (load ? c : 0) + x [R, steps] w [steps, NR]
template <int R, typename F, int Ahead = kStreamAhead>
inline void micro(const typename F::T* w, int steps, const typename F::X* x, size_t ldx, float* c, int ldc, bool load) {
  vf acc[R][NV];  // constant indices only: see spill() in tile.h
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) acc[r][v] = load ? vload(c + (size_t)r * ldc + v * W) : vzero();
  for (int i = 0; i < steps; i++) {
    decltype(F::load(w)) b[NV];
    for (int v = 0; v < NV; v++) b[v] = F::load(w + (size_t)i * NR + v * W);
    for (size_t line = 0; line < NR * sizeof(*w); line += 64)
      prefetch_weights<R, Ahead>(reinterpret_cast<const char*>(w + (size_t)i * NR) + line);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      const auto a = F::broadcast(x + r * ldx + i);
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) acc[r][v] = F::multiply(acc[r][v], a, b[v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) vstore(c + (size_t)r * ldc + v * W, acc[r][v]);
}

template <typename F, int R>
inline void dispatch(int rows, const typename F::T* w, int steps, const typename F::X* x, size_t ldx, float* c, int ldc,
                     bool load) {
  if (rows == R) return micro<R, F>(w, steps, x, ldx, c, ldc, load);
  if constexpr (R > 1) dispatch<F, R - 1>(rows, w, steps, x, ldx, c, ldc, load);
}

// One panel against rows [0, m), with K whole or in blocks.
template <typename F>
void panel_rows(const typename F::T* w, int k, const typename F::X* x, size_t ldx, const float* bias, float* y, int ldy,
                int m, int columns) {
  alignas(64) float converted[F::kConvert ? KC * NR : 1];
  alignas(64) float edge[MR * NR];
  const int all = (k + F::kStep - 1) / F::kStep, most = m <= MR ? all : KC;
  for (int first = 0; first < all; first += most) {
    const int steps = std::min(most, all - first);
    const typename F::T* block = w + (size_t)first * NR;
    const bool last = first + steps == all;
    const bool convert = F::kConvert && m > 2 * MR;  // pays off when several tiles share it
    if constexpr (F::kConvert)
      if (convert)
        for (int i = 0; i < steps * NR; i += W) vstore(converted + i, F::load(block + i));
    for (int r0 = 0; r0 < m; r0 += MR) {
      const int rows = std::min(MR, m - r0);
      float* out = y + (size_t)r0 * ldy;
      float* c = columns == NR ? out : edge;
      const int ldc = columns == NR ? ldy : NR;
      if (columns < NR && first > 0)
        for (int r = 0; r < rows; r++) std::copy_n(out + (size_t)r * ldy, columns, edge + r * NR);
      const typename F::X* xr = x + r0 * ldx + first;
      if constexpr (F::kConvert)
        if (convert) {
          fetch_part(block + (size_t)steps * NR, sizeof(*w) * KC * NR, r0 / MR, (m + MR - 1) / MR);
          dispatch<Floats<float>, MR>(rows, converted, steps, xr, ldx, c, ldc, first > 0);
        }
      if (!convert) dispatch<F, MR>(rows, block, steps, xr, ldx, c, ldc, first > 0);
      for (int r = 0; r < rows; r++) {
        float* row = out + (size_t)r * ldy;
        if (columns < NR) std::copy_n(edge + r * NR, columns, row);
        if (last && bias)
          for (int j = 0; j < columns; j++) row[j] += bias[j];
      }
    }
  }
}

// One row against S panels, `apart` panels from one to the next, in turn (tile.h: kStreams).
template <typename F, int S>
void stream_panels(const Packed& w, const typename F::X* x, const float* bias, float* y, int panel, int apart) {
  constexpr int kTurn = 32 / sizeof(typename F::T);  // steps
  alignas(64) float sums[S][NR];
  const auto* first = reinterpret_cast<const typename F::T*>(w.data + panel * w.panel_bytes);
  const size_t stream = apart * w.panel_bytes / sizeof(typename F::T);
  for (int i = 0, all = (w.k + F::kStep - 1) / F::kStep; i < all; i += kTurn, first += (size_t)kTurn * NR)
    for (int s = 0; s < S; s++)
      micro<1, F, kStreamsAhead>(first + s * stream, std::min(kTurn, all - i), x + i, 0, sums[s], NR, i > 0);
  for (int s = 0; s < S; s++) {
    const int column = (panel + s * apart) * NR;
    for (int j = 0, columns = std::min(NR, w.n - column); j < columns; j++)
      y[column + j] = bias ? sums[s][j] + bias[column + j] : sums[s][j];
  }
}

template <typename F>
void matmul_typed(const Packed& w, const Activations& a, const float* bias, float* y, int ldy, int m, int p0, int p1) {
  if constexpr (kStreams > 1)
    if (m == 1 && uses_streams())
      return for_streams(p0, p1, [&](auto streams, int panel, int apart) {
        stream_panels<F, decltype(streams)::value>(w, F::activations(a, 0), bias, y, panel, apart);
      });
  for (int m0 = 0, most = block_rows(m); m0 < m; m0 += most) {
    const int rows = std::min(most, m - m0);
    for (int p = p0; p < p1; p++) {
      const int column = p * NR;
      panel_rows<F>(reinterpret_cast<const typename F::T*>(w.data + p * w.panel_bytes), w.k, F::activations(a, m0),
                    F::stride(a), bias ? bias + column : nullptr, y + (size_t)m0 * ldy + column, ldy, rows,
                    std::min(NR, w.n - column));
    }
  }
}

}  // namespace

const int panel_rows_count = NR;

void matmul(const Packed& w, const Activations& a, const float* bias, float* y, int ldy, int m, int p0, int p1) {
#if defined(AS_ISA_AMX)
  if (matmul_tiles(w, a, bias, y, ldy, m, p0, p1)) return;
#endif
  if (w.format == Format::f32) matmul_typed<Floats<float>>(w, a, bias, y, ldy, m, p0, p1);
#if defined(AS_ISA_AVX512_BF16)
  else if (w.format == Format::bf16) matmul_typed<Pairs>(w, a, bias, y, ldy, m, p0, p1);
#else
  else if (w.format == Format::bf16) matmul_typed<Floats<uint16_t>>(w, a, bias, y, ldy, m, p0, p1);
#endif
  else if (is_small_float(w.format)) matmul_small_floats(w, a, bias, y, ldy, m, p0, p1);
  else matmul_integer(w, a, bias, y, ldy, m, p0, p1);
}

}  // namespace AS_ISA
}  // namespace as
