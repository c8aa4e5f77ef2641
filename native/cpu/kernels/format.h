// Formats of a weight matrix and how each is laid out in memory.
//
// A matrix [n, k] is cut into panels of `panel` rows (output features), the last one padded with zero rows, so that
// reading a panel from front to back is reading memory in order and a lane of a vector is an output feature.
//   float32, bfloat16   [k][panel]
//   bfloat16 in pairs   [k / 2][panel][2], k padded to 32: as tile products want it (Packed::pairs)
//   int8, w8a8          [k / 4][panel][4] bytes q: a 32-bit lane holds four k, as integer dot products want them
//   int4, w4a8          [k / 8][panel] 32-bit lanes of eight k: byte b holds q of k = b in its lower half and of k =
//                       4 + b in its upper half
// Quantized panels are a sequence of groups along k, each led by its scales [panel] and offsets [panel] in bfloat16,
// and padded to whole lanes. A weight is recovered as scale * (q - middle) + offset, middle = 2^(bits - 1):
// InstantQuant's scale * (q - zero point), written so that both terms are no larger than the group's largest weight.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

// Compiled for every instruction set: an out-of-line copy of one could be taken for that of another.
#define AS_INLINE __attribute__((always_inline)) inline

namespace as {

enum class Format : int { f32, bf16, int8, int4, w8a8, w4a8 };

AS_INLINE bool is_quantized(Format f) { return f >= Format::int8; }
AS_INLINE int bits_of(Format f) {
  return f == Format::f32 ? 32 : f == Format::bf16 ? 16 : f == Format::int8 || f == Format::w8a8 ? 8 : 4;
}

// What an instruction set's kernels want of the layout.
struct Rules {
  int panel;        // rows of a panel
  bool bf16_pairs;  // bfloat16 in pairs of k; in the cache, of d and of tokens (span_layout.h)
};

struct Packed {
  char* data;
  int n, k, panel;
  Format format;
  int group;   // k of a group (the last one may be shorter); k itself for the others
  bool pairs;  // bfloat16 laid out in pairs of k
  int planes;  // int8 values that make an activation: 1 of 8 bits (w8a8, w4a8), 2 of 16 (int8, int4); 0: it stays a
               // float
  size_t panel_bytes;

  AS_INLINE int panels() const { return (n + panel - 1) / panel; }
  AS_INLINE int groups() const { return (k + group - 1) / group; }
  AS_INLINE int group_k(int g) const { return std::min(group, k - g * group); }  // k of group g
  // Scales, offsets and weights of group g of panel p.
  AS_INLINE char* group_data(int p, int g) const { return data + p * panel_bytes + (size_t)g * group_bytes(group); }
  AS_INLINE uint16_t* scales(int p, int g) const { return reinterpret_cast<uint16_t*>(group_data(p, g)); }
  AS_INLINE uint16_t* offsets(int p, int g) const { return scales(p, g) + panel; }
  AS_INLINE char* weights(int p, int g) const { return reinterpret_cast<char*>(scales(p, g) + 2 * panel); }
  AS_INLINE size_t group_bytes(int length) const { return 2 * sizeof(uint16_t) * panel + weight_bytes(length); }
  // How many k are padded to a whole.
  AS_INLINE int unit() const { return pairs ? 32 : !planes ? 1 : bits_of(format) == 4 ? 8 : 4; }
  AS_INLINE size_t weight_bytes(int length) const {
    return (size_t)(length + unit() - 1) / unit() * unit() * panel * bits_of(format) / 8;
  }
};

// group_size 0: one group a row.
AS_INLINE Packed layout(int n, int k, const Rules& rules, Format format, int group_size) {
  const bool quantized = is_quantized(format);
  Packed m{nullptr,
           n,
           k,
           rules.panel,
           format,
           group_size && quantized ? std::min(group_size, k) : k,
           rules.bf16_pairs && format == Format::bf16,
           format >= Format::w8a8 ? 1
           : quantized            ? 2
                                  : 0,
           0};
  const int last = m.groups() - 1;
  m.panel_bytes = quantized ? last * m.group_bytes(m.group) + m.group_bytes(m.group_k(last)) : m.weight_bytes(k);
  if (quantized) m.panel_bytes = (m.panel_bytes + 63) / 64 * 64;
  return m;
}

// What some formats need of a row of activations, computed once a linear. One row's block:
//   [planes][groups] int32 sums of a plane's values within each group, float32 scale, and from the next multiple of 64
//   bytes the values, zero-padded to whole lines: of each plane in int8, or whole ones in int16 for kernels that
//   multiply those.
// Of bfloat16 in pairs: the row rounded to bfloat16, zero-padded to 32 values.
struct PreparedLayout {
  size_t scale_at = 0, values_at = 0, plane_bytes = 0, bytes = 0;
};
AS_INLINE PreparedLayout prepared_layout(const Packed& m, int value_bytes) {
  auto aligned = [](size_t x) { return (x + 63) / 64 * 64; };
  if (m.pairs) return {0, 0, 0, aligned((size_t)m.k * 2)};
  if (!m.planes) return {};
  const size_t sums = (size_t)m.groups() * 4;
  const size_t values_at = aligned(m.planes * sums + 4), plane = aligned(((size_t)m.k + 7) / 8 * 8 * value_bytes);
  return {m.planes * sums, values_at, plane, values_at + (value_bytes == 2 ? 1 : m.planes) * plane};
}

// Rows of activations: x [m, k] with row stride ldx, and what prepare() made of them, `stride` bytes a row.
struct Activations {
  const float* x;
  int ldx;
  const char* prepared;
  size_t stride;
};

// Where silu(gate) * up goes: y [m, n] with row stride ldy, or the prepared rows of a matrix in pairs of bfloat16,
// `stride` bytes each.
struct GatedOutput {
  float* y;
  int ldy;
  char* rounded;  // null: y
  size_t rounded_stride;
};

// The longest k whose sums of activation * (q - 128) are sure to fit 32 bits: 2^31 / (128 * 128).
constexpr int kMaxIntegerK = 131'000;

}  // namespace as
