// Recipes, for any number of rows. A x: two chains of fused multiply-adds, over even and odd k in ascending order, then
// their sum times the scale. B u: one chain over k from zero, then added to y. One row has enough chains to hide the
// latency of memory. Several rows have enough to hide that of multiply-adds.
#include "cpu/kernels/lora.h"

#include "cpu/kernels/tile.h"
#include "cpu/simd.h"

namespace as {
namespace AS_ISA {
namespace {

#if defined(AS_ISA_AVX2)
constexpr int kRows = 4;  // of two chains or two vectors each: 8 of 16 registers
#else
constexpr int kRows = 8;
#endif

template <int R, typename T>
void shrink_rows(const T* w, int k, const float* const* x, float scale, float* u, int ldu) {
  vf acc[R][2];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = vzero();
  int i = 0;
  for (; i + 2 <= k; i += 2) {
    prefetch_far(reinterpret_cast<const char*>(w + (size_t)i * W) + 4096);
    const vf even = vload_as<T>(w + (size_t)i * W), odd = vload_as<T>(w + (size_t)(i + 1) * W);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      acc[r][0] = vfma(vset(x[r][i]), even, acc[r][0]);
      acc[r][1] = vfma(vset(x[r][i + 1]), odd, acc[r][1]);
    }
  }
  if (i < k) {
    const vf last = vload_as<T>(w + (size_t)i * W);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) acc[r][0] = vfma(vset(x[r][i]), last, acc[r][0]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) vstore(u + (size_t)r * ldu, vmul(vadd(acc[r][0], acc[r][1]), vset(scale)));
}

template <int R, typename T>
void expand_rows(const T* w, int k, const float* u, int ldu, float* const* y, int column, int columns) {
  vf acc[R][2];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = vzero();
  for (int i = 0; i < k; i++) {
    const vf first = vload_as<T>(w + (size_t)i * 2 * W), second = vload_as<T>(w + (size_t)i * 2 * W + W);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const vf value = vset(u[(size_t)r * ldu + i]);
      acc[r][0] = vfma(value, first, acc[r][0]);
      acc[r][1] = vfma(value, second, acc[r][1]);
    }
  }
  vf sums[R * 2];
  spill(acc, sums);
  for (int r = 0; r < R; r++) {
    float* out = y[r] + column;
    if (columns == 2 * W) {
      for (int v = 0; v < 2; v++) vstore(out + v * W, vadd(vload(out + v * W), sums[r * 2 + v]));
      continue;
    }
    float edge[2 * W];
    for (int v = 0; v < 2; v++) vstore(edge + v * W, sums[r * 2 + v]);
    for (int j = 0; j < columns; j++) out[j] += edge[j];
  }
}

template <typename T>
void shrink_typed(const Packed& a, const float* const* x, int rows, float scale, float* u, int ldu) {
  for (int p = 0; p < a.panels(); p++)
    for (int r = 0; r < rows; r += kRows)
      with_constant<kRows>(std::min(kRows, rows - r), [&](auto count) {
        shrink_rows<decltype(count)::value>(reinterpret_cast<const T*>(a.data + p * a.panel_bytes), a.k, x + r, scale,
                                            u + (size_t)r * ldu + p * W, ldu);
      });
}

template <typename T>
void expand_typed(const Packed& b, const float* u, int ldu, float* const* y, int rows, int p0, int p1) {
  constexpr size_t kAhead = 4096;
  for (int p = p0; p < p1; p++) {
    const char* panel = b.data + p * b.panel_bytes;
    for (size_t line = 0; line < b.panel_bytes; line += 64) prefetch_far(panel + kAhead + line);
    for (int r = 0; r < rows; r += kRows)
      with_constant<kRows>(std::min(kRows, rows - r), [&](auto count) {
        expand_rows<decltype(count)::value>(reinterpret_cast<const T*>(panel), b.k, u + (size_t)r * ldu, ldu, y + r,
                                            p * b.panel, std::min(b.panel, b.n - p * b.panel));
      });
  }
}

void shrink(const Packed& a, const float* const* x, int rows, float scale, float* u, int ldu) {
  if (a.format == Format::f32) shrink_typed<float>(a, x, rows, scale, u, ldu);
  else shrink_typed<uint16_t>(a, x, rows, scale, u, ldu);
}

void expand(const Packed& b, const float* u, int ldu, float* const* y, int rows, int p0, int p1) {
  if (b.format == Format::f32) expand_typed<float>(b, u, ldu, y, rows, p0, p1);
  else expand_typed<uint16_t>(b, u, ldu, y, rows, p0, p1);
}

}  // namespace

const LoraKernels& lora_kernels() {
  static const LoraKernels table = [] {
    LoraKernels k{};
    k.lanes = W, k.shrink = shrink, k.expand = expand;
    return k;
  }();
  return table;
}

}  // namespace AS_ISA
}  // namespace as
