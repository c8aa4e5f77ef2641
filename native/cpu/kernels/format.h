// The formats of a weight matrix and their layout in memory.
//
// A matrix [n, k] is divided into panels of `panel` rows (output features); the last one is padded with zero rows.
// Kernels read a panel from front to back. Each vector lane is an output feature.
//   float32, bfloat16   [k][panel]
//   bfloat16 in pairs   [k / 2][panel][2], k padded to 32, as tile products read it (Packed::pairs)
//   int8, w8a8          [k / 4][panel][4] bytes q: a 32-bit lane holds four k, as integer dot products read them
//   int4, w4a8          [k / 8][panel] 32-bit lanes of eight k: byte b holds q of k = b in its lower half and of k =
//                       4 + b in its upper half
//   e2m1a16             the same with inverted codes, whose integers are twice the weights (integer_codes.h)
//   e4m3                [k][panel] bytes, floats of 8 bits
//   nf4, e2m1           [k / 2][panel] bytes, with the even k in the lower half
// A quantized panel is a sequence of groups along k. Each group starts with a head of scales [panel] and offsets
// [panel], and is padded to whole lanes. InstantQuant's scales and offsets are bfloat16. A weight is scale * (q -
// middle) + offset with middle = 2^(bits - 1). This equals scale * (q - zero point), but neither term exceeds the
// group's largest weight. For matrices quantized by other tools, ScaleLayout (program/scale_layout.h) describes the
// head, so weights are recovered exactly. A panel begins with the nested scales of all its super-groups.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "program/scale_layout.h"

// Forces inlining: the linker could merge out-of-line copies that are compiled for different instruction sets.
#define AS_INLINE __attribute__((always_inline)) inline

namespace as {

enum class Format : int { f32, bf16, int8, int4, w8a8, w4a8, e2m1a16, e4m3, nf4, e2m1 };

AS_INLINE bool is_quantized(Format f) { return f >= Format::int8; }
AS_INLINE bool is_small_float(Format f) { return f >= Format::e4m3; }  // multiplied as floats
AS_INLINE bool is_coded(Format f) { return f >= Format::e2m1a16; }     // values of a table, not integers
AS_INLINE int bits_of(Format f) {
  switch (f) {
    case Format::f32:
      return 32;
    case Format::bf16:
      return 16;
    case Format::int8:
    case Format::w8a8:
    case Format::e4m3:
      return 8;
    default:
      return 4;
  }
}

// What an instruction set's kernels require of the layout.
struct Rules {
  int panel;        // rows of a panel
  bool bf16_pairs;  // bfloat16 in pairs of k; in the cache, of d and of tokens (span_layout.h)
};

struct Packed {
  char* data;
  int n, k, panel;
  Format format;
  int group;   // k of a group (the last may be shorter); all of k in formats without groups
  bool pairs;  // bfloat16 laid out in pairs of k
  int planes;  // int8 values of an activation: 1 at 8 bits (w8a8, w4a8), 2 at 16 (int8, int4, e2m1a16), 0: it is a
               // float
  size_t panel_bytes;
  ScaleLayout scaling = {};
  bool plain_scales = true;    // bfloat16 scales and offsets
  bool lone_scales = false;    // scales of symmetric integers without offsets: the most common third-party layout
  int bias = 0;                // of 8-bit integers: added to the quantized value so that its center is 128
  size_t head_bytes = 0;       // of a group
  size_t first_group = 0;      // bytes of a panel before its first group: the super-groups' scales
  int inputs = 0;              // values of a row of activations: k without `order`
  const int* order = nullptr;  // the activation that each k reads, -1 for a zero; null: its own

  AS_INLINE int panels() const { return (n + panel - 1) / panel; }
  AS_INLINE int groups() const { return (k + group - 1) / group; }
  AS_INLINE int group_k(int g) const { return std::min(group, k - g * group); }  // k of group g
  // Head and weights of group g of panel p.
  AS_INLINE char* head(int p, int g) const {
    return data + p * panel_bytes + first_group + (size_t)g * group_bytes(group);
  }
  AS_INLINE char* weights(int p, int g) const { return head(p, g) + head_bytes; }
  AS_INLINE size_t group_bytes(int length) const { return head_bytes + weight_bytes(length); }
  // For heads with plain scales.
  AS_INLINE uint16_t* scales(int p, int g) const { return reinterpret_cast<uint16_t*>(head(p, g)); }
  AS_INLINE uint16_t* offsets(int p, int g) const { return scales(p, g) + panel; }
  // Bytes of a row's scale, and of its offset or zero point, in a head.
  AS_INLINE int scale_bytes() const { return scaling.super_group ? 1 : scaling.scales == ScaleType::float32 ? 4 : 2; }
  AS_INLINE int zero_bytes() const {
    return scaling.zeros == ZeroType::offsets ? scale_bytes() : scaling.zeros == ZeroType::points ? 1 : 0;
  }
  // Nested scales of group g of panel p: [panel] scales and, if there are offsets, [panel] offsets.
  AS_INLINE uint16_t* super_scales(int p, int g) const {
    return reinterpret_cast<uint16_t*>(data + p * panel_bytes + g * group / scaling.super_group * super_bytes());
  }
  AS_INLINE size_t super_bytes() const { return 2 * sizeof(uint16_t) * panel; }
  AS_INLINE int super_groups() const {
    return scaling.super_group ? (k + scaling.super_group - 1) / scaling.super_group : 0;
  }
  // Flips the bits of 4-bit codes where they are stored inverted.
  AS_INLINE uint8_t inverted() const { return format == Format::e2m1a16 ? 15 : 0; }
  AS_INLINE int middle() const { return 1 << (bits_of(format) - 1); }
  // The quantized value that stands for 0, without zero points.
  AS_INLINE int center() const { return scaling.center < 0 ? middle() : scaling.center; }
  // k is padded to a multiple of this.
  AS_INLINE int unit() const {
    if (pairs) return 32;
    if (!planes) return is_small_float(format) && bits_of(format) == 4 ? 2 : 1;
    return bits_of(format) == 4 ? 8 : 4;
  }
  AS_INLINE size_t weight_bytes(int length) const {
    return (size_t)(length + unit() - 1) / unit() * unit() * panel * bits_of(format) / 8;
  }
};

// group_size 0: one group a row. inputs: values of a row of activations, if they are gathered.
AS_INLINE Packed layout(int n, int k, const Rules& rules, Format format, int group_size,
                        const ScaleLayout& scaling = {}, int inputs = 0) {
  const bool quantized = is_quantized(format);
  Packed m{nullptr,
           n,
           k,
           rules.panel,
           format,
           group_size && quantized ? std::min(group_size, k) : k,
           rules.bf16_pairs && format == Format::bf16,
           format == Format::w8a8 || format == Format::w4a8    ? 1
           : is_quantized(format) && format <= Format::e2m1a16 ? 2
                                                               : 0,
           0};
  m.inputs = inputs ? inputs : k;
  if (quantized) {
    m.scaling = scaling, m.plain_scales = scaling.is_default();
    m.bias = m.planes && bits_of(format) == 8 ? m.middle() - m.center() : 0;
    m.lone_scales = scaling.zeros == ZeroType::none && !scaling.super_group && m.middle() == m.center() + m.bias;
    const size_t line = m.panel % 32 ? 32 : 64;  // aligns vectors of weights as if there were no head
    m.head_bytes = ((size_t)m.panel * (m.scale_bytes() + m.zero_bytes()) + line - 1) / line * line;
    m.first_group = m.super_groups() * m.super_bytes();
  }
  const int last = m.groups() - 1;
  m.panel_bytes =
      quantized ? m.first_group + last * m.group_bytes(m.group) + m.group_bytes(m.group_k(last)) : m.weight_bytes(k);
  if (quantized) m.panel_bytes = (m.panel_bytes + 63) / 64 * 64;
  return m;
}

// convert_row() converts each row of activations once a linear, for formats that need it. One row's block:
//   [planes][groups] int32 sums of a plane's values within each group, then the float32 scale and, for tiles, [groups]
//   float32 sums of both planes. The values begin at the next multiple of 64 bytes, zero-padded to whole cache lines:
//   int8 for each plane, or int16 for kernels that multiply 16 bits.
// For bfloat16 in pairs: the row rounded to bfloat16, zero-padded to a multiple of 32 values.
struct ConvertedLayout {
  size_t scale_at = 0, values_at = 0, plane_bytes = 0, bytes = 0;
  size_t float_sums_at = 0;  // 0: there are none
};
AS_INLINE ConvertedLayout converted_row_layout(const Packed& m, int value_bytes, bool float_sums) {
  auto aligned = [](size_t x) { return (x + 63) / 64 * 64; };
  if (m.pairs) return {0, 0, 0, aligned((size_t)m.k * 2)};
  if (!m.planes) return {};
  const size_t sums = (size_t)m.groups() * 4, floats_at = m.planes * sums + 4;
  const size_t values_at = aligned(floats_at + (float_sums ? sums : 0)),
               plane = aligned(((size_t)m.k + 7) / 8 * 8 * value_bytes);
  return {m.planes * sums, values_at, plane, values_at + (value_bytes == 2 ? 1 : m.planes) * plane,
          float_sums ? floats_at : 0};
}

// Rows of activations: x [m, k] with row stride ldx, and convert_row()'s blocks, `stride` bytes a row.
struct Activations {
  const float* x;
  int ldx;
  const char* converted;
  size_t stride;
};

// Where silu(gate) * up is written: y [m, n] with row stride ldy, or converted rows of a matrix in pairs of bfloat16,
// `stride` bytes each.
struct GatedOutput {
  float* y;
  int ldy;
  char* rounded;  // null: writes y
  size_t rounded_stride;
};

constexpr int kSmallestGroup = 8;  // k of a group, except the last

// The longest k whose sums of activation * (q - 128) always fit 32 bits: 2^31 / (128 * 128).
constexpr int kMaxIntegerK = 131'000;

}  // namespace as
