// y = x w^T + bias on AMX tiles: bfloat16 weights and activations, and 8-bit integers (w8a8, w4a8), per channel or in groups.
//
// Both formats look alike in bytes. A step is 64 bytes of a row of activations (32 bfloat16 or 64 int8) against 16 x 128 bytes
// of a panel: two tiles of 16 features, each lane of which holds the 2 or 4 k that one product takes together.
//
// Recipe, whatever the number of rows: steps in ascending order, each one tile product; a row's result does not depend on the
// other rows of its tile. One row takes tiles too, with bfloat16: no other instruction sums in the same order. Cutting K
// only spills the fp32 (int32) accumulators, which rounds nothing.
//
// A 2 x 2 block of accumulators takes 4 products (64 cycles) for 4 loaded tiles (64 lines): one of the two operands must
// come from the first-level cache. So a chunk of a panel stays there while the rows of a block pass, and that block's
// activations stay in the second level.
#include "tables.h"

#if defined(AS_ISA_AMX)
#include <algorithm>
#include <cstring>

#include "amx.h"
#include "simd.h"
#include "tile.h"

namespace as {
namespace AS_ISA {
namespace {

constexpr int kStepBytes = 64;              // of a row of activations
constexpr int kPanelStepBytes = 16 * NR * 4;  // of a panel
constexpr int kTile = 16, kPair = 2 * kTile;  // rows of a tile, of a block of accumulators
constexpr int kRows = 256, kSteps = 32;       // 256 rows x 2 KB of activations: half a megabyte of the second level
constexpr int kChunk = 8;                   // steps: 16 KB of a panel
constexpr int kPrefetch = 4096;             // bytes ahead, where weights come from memory
static_assert(NR == 2 * kTile);

struct BFloat {
  static constexpr int kStep = 32;  // k of a step
  template <int C, int A, int B> static AS_INLINE void dot() { tile_dot_bf16<C, A, B>(); }
};
struct Bytes {
  static constexpr int kStep = 64;
  template <int C, int A, int B> static AS_INLINE void dot() { tile_dot_s8u8<C, A, B>(); }
};

// Tiles 0 to 3 are the accumulators of rows [0, 16) and [16, 32), 4 and 5 those rows' activations, 6 and 7 weights.
class Tiles {
 public:
  ~Tiles() { tile_release(); }
  void configure(int rows) {
    if (rows == rows_) return;
    TileConfig config;
    const int first = std::min(rows, kTile), second = rows - first;
    const int counts[8] = {first, first, second, second, first, second, kTile, kTile};
    for (int t = 0; t < 8; t++) config.rows[t] = (uint8_t)counts[t], config.row_bytes[t] = counts[t] ? 64 : 0;
    tile_configure(config);
    rows_ = rows;
  }

 private:
  int rows_ = 0;
};

// c [R tiles of rows][32 columns of 4 bytes] = (load ? c : 0) + `steps` steps
template <typename F, int R, bool kStream>
void block(const char* a, long lda, const char* b, int steps, char* c, long ldc, bool load) {
  if (load) {
    tile_load<0>(c, ldc), tile_load<1>(c + 64, ldc);
    if (R == 2) tile_load<2>(c + kTile * ldc, ldc), tile_load<3>(c + kTile * ldc + 64, ldc);
  } else {
    tile_zero<0>(), tile_zero<1>();
    if (R == 2) tile_zero<2>(), tile_zero<3>();
  }
  for (int s = 0; s < steps; s++, a += kStepBytes, b += kPanelStepBytes) {
    if (kStream)
      for (int line = 0; line < kPanelStepBytes; line += 64) __builtin_prefetch(b + kPrefetch + line);
    tile_load<6>(b, NR * 4);
    tile_load<4>(a, lda);
    tile_load<7>(b + 64, NR * 4);
    F::template dot<0, 4, 6>();
    F::template dot<1, 4, 7>();
    if (R == 2) {
      tile_load<5>(a + kTile * lda, lda);
      F::template dot<2, 5, 6>();
      F::template dot<3, 5, 7>();
    }
  }
  tile_store<0>(c, ldc), tile_store<1>(c + 64, ldc);
  if (R == 2) tile_store<2>(c + kTile * ldc, ldc), tile_store<3>(c + kTile * ldc + 64, ldc);
}

template <typename F>
void rows_of_tiles(int rows, bool stream, const char* a, long lda, const char* b, int steps, char* c, long ldc, bool load) {
  if (rows > kTile) stream ? block<F, 2, true>(a, lda, b, steps, c, ldc, load) : block<F, 2, false>(a, lda, b, steps, c, ldc, load);
  else stream ? block<F, 1, true>(a, lda, b, steps, c, ldc, load) : block<F, 1, false>(a, lda, b, steps, c, ldc, load);
}

// Rows of one panel between their place in y and the accumulators' own memory: there they lie close together, while rows of
// y are pages apart and their addresses fall into few sets of the caches.
void copy_rows(const float* from, size_t from_stride, float* to, size_t to_stride, int rows, int columns) {
  for (int r = 0; r < rows; r++, from += from_stride, to += to_stride) {
    if (columns == NR) vstore(to, vload(from)), vstore(to + W, vload(from + W));
    else std::memcpy(to, from, columns * sizeof(float));
  }
}

// All of K in one chain. `weights` of a panel; finish(panel, row, rows, c) makes results of finished accumulators, in place.
template <typename F, typename Weights, typename Finish>
void multiply(const Packed& w, const Activations& a, size_t values_at, float* y, int ldy, int m, int p0, int p1, Weights&& weights,
              Finish&& finish) {
  const int steps = (w.k + F::kStep - 1) / F::kStep;
  const bool stream = m <= kPair;  // few rows: weights pass once, from memory
  const int blocks = stream ? 1 : (steps + kSteps - 1) / kSteps;
  Tiles tiles;
  alignas(64) float sums[kRows * NR];
  for (int m0 = 0; m0 < m; m0 += kRows)
    for (int i = 0; i < blocks; i++) {
      const int begin = steps * i / blocks, end = steps * (i + 1) / blocks, block_rows = std::min(kRows, m - m0);
      for (int p = p0; p < p1; p++) {
        const int columns = std::min(NR, w.n - p * NR);
        float* out = y + (size_t)m0 * ldy + p * NR;
        if (i) copy_rows(out, ldy, sums, NR, block_rows, columns);
        for (int s = begin; s < end;) {
          const int count = stream ? end - s : std::min(kChunk, end - s);
          const char* b = weights(p) + (size_t)s * kPanelStepBytes;
          const char* next = s + count < end ? b + (size_t)count * kPanelStepBytes : weights(std::min(p + 1, w.panels() - 1)) + (size_t)begin * kPanelStepBytes;
          const int share = kChunk * kPanelStepBytes / ((block_rows + kPair - 1) / kPair);  // of the next chunk, fetched meanwhile
          for (int r = 0; r < block_rows; r += kPair) {
            const int rows = std::min(kPair, block_rows - r);
            tiles.configure(rows);
            if (!stream)
              for (int line = 0; line < share; line += 64) __builtin_prefetch(next + r / kPair * share + line, 0, 2);
            float* c = sums + r * NR;
            rows_of_tiles<F>(rows, stream, a.prepared + (m0 + r) * a.stride + values_at + (size_t)s * kStepBytes, (long)a.stride, b, count,
                             (char*)c, NR * 4, s > 0);
            if (s + count == steps) finish(p, m0 + r, rows, c);
            if (s + count == end) copy_rows(c, NR, out + (size_t)r * ldy, ldy, rows, columns);
          }
          s += count;
        }
      }
    }
}

int32_t four_bytes(const void* p) {
  int32_t x;
  std::memcpy(&x, p, 4);
  return x;
}

// The panel's part of the bias, padded.
struct Bias {
  float values[NR];
  Bias(const float* bias, int p, int n) {
    for (int j = 0; j < NR; j++) values[j] = p * NR + j < n ? bias[p * NR + j] : 0.0f;
  }
};

void multiply_bf16(const Packed& w, const Activations& a, const float* bias, float* y, int ldy, int m, int p0, int p1) {
  multiply<BFloat>(w, a, 0, y, ldy, m, p0, p1, [&](int p) { return w.data + p * w.panel_bytes; },
                   [&](int p, int, int rows, float* c) {
    if (!bias) return;
    const Bias add(bias, p, w.n);
    for (int r = 0; r < rows; r++, c += NR)
      for (int v = 0; v < NV; v++) vstore(c + v * W, vadd(vload(c + v * W), vload(add.values + v * W)));
  });
}

// The recipe of matmul_integer.cpp: exact sums, so that kernels may be mixed; group by group from there on.
AS_INLINE vf add_group(const char* sums, int middle, int activations, const uint16_t* scale, int v, vf total) {
  const __m512i chain = _mm512_sub_epi32(_mm512_loadu_si512(sums + v * W * 4), _mm512_set1_epi32(middle * activations));
  return vfma(vload_bf16(scale + NR + v * W), vset((float)activations), vfma(vload_bf16(scale + v * W), _mm512_cvtepi32_ps(chain), total));
}

AS_INLINE void write_row(const char* row, const PreparedLayout& at, const vf (&total)[NV], const Bias* bias, float* out) {
  float scale;
  std::memcpy(&scale, row + at.scale_at, 4);
  for (int v = 0; v < NV; v++) {
    const vf value = vmul(total[v], vset(scale));
    vstore(out + v * W, bias ? vadd(value, vload(bias->values + v * W)) : value);
  }
}

void multiply_channels(const Packed& w, const Activations& a, const float* bias, float* y, int ldy, int m, int p0, int p1) {
  const PreparedLayout at = prepared(w);
  multiply<Bytes>(w, a, at.values_at, y, ldy, m, p0, p1, [&](int p) { return w.weights(p, 0); },
                  [&](int p, int row, int rows, float* c) {
    const uint16_t* scale = w.scales(p, 0);
    const Bias add(bias, p, bias ? w.n : 0);
    for (int r = 0; r < rows; r++, c += NR) {
      const char* activations = a.prepared + (row + r) * a.stride;
      vf total[NV];
      for (int v = 0; v < NV; v++) total[v] = add_group((char*)c, 128, four_bytes(activations), scale, v, vzero());
      write_row(activations, at, total, bias ? &add : nullptr, c);
    }
  });
}

// 4-bit weights of `steps` steps as bytes.
void widen(const char* w, int steps, char* out) {
  const __m512i mask = _mm512_set1_epi8(15);
  for (int i = 0; i < steps * 8 * NV; i++, w += 64) {  // W lanes of eight k
    const __m512i raw = _mm512_loadu_si512(w);
    char* to = out + (i / NV) * (2 * NR * 4) + (i % NV) * 64;
    _mm512_store_si512(to, _mm512_and_si512(raw, mask));
    _mm512_store_si512(to + NR * 4, _mm512_and_si512(_mm512_srli_epi16(raw, 4), mask));
  }
}

// Groups of whole steps.
void multiply_groups(const Packed& w, const Activations& a, const float* bias, float* y, int ldy, int m, int p0, int p1) {
  const PreparedLayout at = prepared(w);
  const bool nibbles = w.format == Format::w4a8;
  Tiles tiles;
  alignas(64) char sums[kPair * NR * 4];
  alignas(64) char wide[kChunk * kPanelStepBytes];
  alignas(64) float totals[kRows * NR];
  for (int m0 = 0; m0 < m; m0 += kRows)
    for (int p = p0; p < p1; p++) {
      const int columns = std::min(NR, w.n - p * NR), end = std::min(m, m0 + kRows);
      const Bias add(bias, p, bias ? w.n : 0);
      for (int g = 0, k0 = 0; g < w.groups(); k0 += w.group_k(g), g++) {
        const int steps = (w.group_k(g) + Bytes::kStep - 1) / Bytes::kStep;
        const char* weights = w.weights(p, g);
        if (nibbles) widen(weights, steps, wide), weights = wide;
        const uint16_t* scale = w.scales(p, g);
        for (int r0 = m0; r0 < end; r0 += kPair) {
          const int rows = std::min(kPair, m - r0);
          tiles.configure(rows);
          const char* first = a.prepared + r0 * a.stride;
          rows_of_tiles<Bytes>(rows, false, first + at.values_at + k0, (long)a.stride, weights, steps, sums, NR * 4, false);
          for (int r = 0; r < rows; r++) {
            const char* row = first + r * a.stride;
            float* kept = totals + (r0 - m0 + r) * NR;
            vf total[NV];
            for (int v = 0; v < NV; v++)
              total[v] = add_group(sums + r * NR * 4, nibbles ? 8 : 128, four_bytes(row + 4 * g), scale, v, g ? vload(kept + v * W) : vzero());
            if (g + 1 < w.groups()) {
              for (int v = 0; v < NV; v++) vstore(kept + v * W, total[v]);
              continue;
            }
            float* out = y + (size_t)(r0 + r) * ldy + p * NR;
            write_row(row, at, total, bias ? &add : nullptr, columns == NR ? out : kept);
            if (columns < NR) std::memcpy(out, kept, columns * sizeof(float));
          }
        }
      }
    }
}

}  // namespace

bool matmul_tiles(const Packed& w, const Activations& a, const float* bias, float* y, int ldy, int m, int p0, int p1) {
  constexpr int kFew = 8;  // fewer rows: vector products keep up with memory
  if (w.format == Format::bf16) {
    multiply_bf16(w, a, bias, y, ldy, m, p0, p1);
    return true;
  }
  if (w.planes != 1 || m < kFew) return false;
  if (w.groups() == 1 && w.format == Format::w8a8) {
    multiply_channels(w, a, bias, y, ldy, m, p0, p1);
    return true;
  }
  // One group that is no whole number of steps may be a last one only.
  if (w.groups() > 1 && w.group % Bytes::kStep) return false;
  if (w.format == Format::w4a8 && w.group > kChunk * Bytes::kStep) return false;
  multiply_groups(w, a, bias, y, ldy, m, p0, p1);
  return true;
}

// Products of tiles in registers, four accumulators: returns how many operations that were.
double multiply_tile_registers(long rounds, bool integers) {
  Tiles tiles;
  tiles.configure(kPair);
  alignas(64) char ones[kTile * kStepBytes] = {};
  tile_load<4>(ones, 64), tile_load<5>(ones, 64), tile_load<6>(ones, 64), tile_load<7>(ones, 64);
  tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
  for (long i = 0; i < rounds; i++) {
    if (integers) Bytes::dot<0, 4, 6>(), Bytes::dot<1, 4, 7>(), Bytes::dot<2, 5, 6>(), Bytes::dot<3, 5, 7>();
    else BFloat::dot<0, 4, 6>(), BFloat::dot<1, 4, 7>(), BFloat::dot<2, 5, 6>(), BFloat::dot<3, 5, 7>();
  }
  return 2.0 * 4 * kTile * kTile * (integers ? Bytes::kStep : BFloat::kStep) * rounds;
}

}  // namespace AS_ISA
}  // namespace as
#endif
