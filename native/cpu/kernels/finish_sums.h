// The epilogue of a tile GEMM, row by row: applies scales and bias, then writes the row or its gated product. A row of
// sums has the panel's NR columns. With two planes, the low plane's row is kAmxRows rows after the high plane's.
#pragma once
#include <algorithm>
#include <cstring>

#include "cpu/kernels/amx.h"
#include "cpu/kernels/kernels.h"
#include "cpu/kernels/scales.h"
#include "cpu/kernels/silu.h"
#include "cpu/kernels/tables.h"
#include "cpu/kernels/tile.h"
#include "cpu/simd.h"

namespace as {
namespace AS_ISA {
namespace {

constexpr int kAmxRows = 16;  // rows of a tile

// A panel's part of the bias, zero-padded, or zeros.
struct Bias {
  float values[NR] = {};
  void set(const float* bias, int p, int n) {
    if (bias)
      for (int j = 0; j < NR; j++) values[j] = p * NR + j < n ? bias[p * NR + j] : 0.0f;
  }
};

struct Results {
  const Packed& w;
  float* y;
  int ldy;
  AS_INLINE void fetch(int p, int row) const {
    const float* out = y + (size_t)row * ldy + p * NR;
    for (int v = 0; v < NV; v++) prefetch_far(out + v * W);
  }
  AS_INLINE void write(int p, int row, const vf (&value)[NV]) const {
    float* out = y + (size_t)row * ldy + p * NR;
    const int columns = w.n - p * NR;
    if (columns >= NR) {
      for (int v = 0; v < NV; v++) vstore(out + v * W, value[v]);
    } else {
      float edge[NR];
      for (int v = 0; v < NV; v++) vstore(edge + v * W, value[v]);
      std::memcpy(out, edge, columns * sizeof(float));
    }
  }
};

// BFloatRow and ChannelRow turn a row's sums of one panel into results.
struct BFloatRow {
  const Packed& w;
  const float* bias;
  Bias add;
  void begin(int p) { add.set(bias, p, w.n); }
  AS_INLINE void operator()(int, const float* sums, vf (&value)[NV]) const {
    for (int v = 0; v < NV; v++)
      value[v] = bias ? vadd(vload(sums + v * W), vload(add.values + v * W)) : vload(sums + v * W);
  }
};

// A group's scales and offsets as floats, for all rows.
struct Scales {
  float values[2 * NR];
  void set(const Packed& w, int panel, int g) {
    if (!w.plain_scales) return load_scales(w, panel, g, 1, values);
    const uint16_t* scales = w.scales(panel, g);
    for (int i = 0; i < 2 * NR; i += W) vstore(values + i, vload_bf16(scales + i));
  }
};

// The total of one group for all of K, by the recipe of matmul_integer.cpp, whose exact sums allow kernels to be mixed.
// sums: of a row; the low plane's sums are one tile further. activations: the sum of the first plane's values; the
// second plane's sum follows. middle: log2 of the format's middle.
template <int Planes>
AS_INLINE void total_of(const char* sums, int middle, const char* activations, const Scales& scales, vf (&total)[NV]) {
  auto value_of = [&](int plane, int v, __m512i of_activations) {
    const __m512i sum = _mm512_loadu_si512(sums + plane * kAmxRows * NR * 4 + v * W * 4);
    return _mm512_cvtepi32_ps(_mm512_sub_epi32(sum, _mm512_slli_epi32(of_activations, middle)));
  };
  const __m512i first = iset_bytes(activations), second = Planes == 2 ? iset_bytes(activations + 4) : first;
  const vf sum = Planes == 1 ? _mm512_cvtepi32_ps(first)
                             : vfma(vset(256.0f), _mm512_cvtepi32_ps(first), _mm512_cvtepi32_ps(second));
#pragma GCC unroll 2
  for (int v = 0; v < NV; v++) {
    vf value = value_of(0, v, first);
    if (Planes == 2) value = vfma(vset(256.0f), value, value_of(1, v, second));
    total[v] = vfma(vload(scales.values + NR + v * W), sum, vfma(vload(scales.values + v * W), value, vzero()));
  }
}

AS_INLINE void scale_row(const char* row, const ConvertedLayout& at, const float* bias, vf (&total)[NV]) {
  float scale;
  std::memcpy(&scale, row + at.scale_at, 4);
  for (int v = 0; v < NV; v++) {
    total[v] = vmul(total[v], vset(scale));
    if (bias) total[v] = vadd(total[v], vload(bias + v * W));
  }
}

template <int Planes>
struct ChannelRow {
  const Packed& w;
  const float* bias;
  const Activations& a;
  const ConvertedLayout at;
  const int middle = w.format == Format::int4 || w.format == Format::w4a8 ? 3 : 7;
  Scales scales = {};
  Bias add = {};
  void begin(int p) { scales.set(w, p, 0), add.set(bias, p, w.n); }
  AS_INLINE void operator()(int row, const float* sums, vf (&value)[NV]) const {
    const char* activations = a.converted + row * a.stride;
    total_of<Planes>((const char*)sums, middle, activations, scales, value);
    scale_row(activations, at, bias ? add.values : nullptr, value);
  }
};

template <typename Row>
struct Plain {
  Row make;
  Results results;
  int p = 0;
  void begin(int panel) { make.begin(p = panel); }
  AS_INLINE void fetch(int row) const { results.fetch(p, row); }
  AS_INLINE void row(int row, const float* sums) const {
    vf value[NV];
    make(row, sums, value);
    results.write(p, row, value);
  }
};

// silu(gate) * up, in float32 or rounded to bfloat16.
AS_INLINE void fetch_gated(const GatedOutput& out, int p, int row) {
  if (out.rounded) return prefetch_far(out.rounded + row * out.rounded_stride + p * NR * 2);
  for (int v = 0; v < NV; v++) prefetch_far(out.y + (size_t)row * out.ldy + p * NR + v * W);
}
AS_INLINE void write_gated(const GatedOutput& out, int p, int row, const vf (&gate)[NV], const vf (&up)[NV]) {
  vf value[NV];
  for (int v = 0; v < NV; v++) value[v] = vsilu_mul(gate[v], up[v]);
  if (out.rounded) {
    const __m512bh both = _mm512_cvtne2ps_pbh(value[1], value[0]);
    std::memcpy(out.rounded + row * out.rounded_stride + p * NR * 2, &both, sizeof both);
  } else {
    for (int v = 0; v < NV; v++) vstore(out.y + (size_t)row * out.ldy + p * NR + v * W, value[v]);
  }
}

template <typename Row>
struct Gated {
  Row gate, up;
  const GatedOutput& out;
  int half, p = 0;
  void begin(int panel) { gate.begin(p = panel), up.begin(p + half); }
  AS_INLINE void fetch(int row) const { fetch_gated(out, p, row); }
  AS_INLINE void row(int row, const float* gate_sums, const float* up_sums) const {
    vf g[NV], u[NV];
    gate(row, gate_sums, g), up(row, up_sums, u);
    write_gated(out, p, row, g, u);
  }
};

}  // namespace
}  // namespace AS_ISA
}  // namespace as
