// InstantQuant: rows of a stored matrix into a quantized format (format.h), and back one by one.
//
// For each group of a row: scale = (max - min) / (2^bits - 1), q = (x - min) / scale to nearest, with min and scale moved
// outwards to what bfloat16 can hold: offset (the value of the middle q) is rounded, and scale is made just so much larger that
// min and max still have a q. So bfloat16 costs range, at most 2^-7 of it, and not the exactness of the grid.
// Only operations that every instruction set rounds alike, so q, scales and offsets are the same on all of them.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels.h"
#include "simd.h"
#include "tables.h"

namespace as {
namespace AS_ISA {
namespace {

constexpr int kRows = 8;    // rows quantized together, so that their bytes can be transposed in registers
constexpr int kChunk = 64;  // k of a piece; a multiple of every unit and vector

struct SourceF32 {
  using Storage = float;
  static vf load(const float* p) { return vload(p); }
};
struct SourceF16 {
  using Storage = uint16_t;
  static vf load(const uint16_t* p) { return vload_f16(p); }
};
struct SourceBF16 {
  using Storage = uint16_t;
  static vf load(const uint16_t* p) { return vload_bf16(p); }
};

// Calls f(vector, how many of its lanes count) for x [n]; lanes past the end repeat the last value.
template <typename S, typename F>
AS_INLINE void for_vectors(const typename S::Storage* x, int n, F&& f) {
  int i = 0;
  for (; i + W <= n; i += W) f(S::load(x + i), i);
  if (i < n) {
    typename S::Storage rest[W];
    for (int j = 0; j < W; j++) rest[j] = x[std::min(i + j, n - 1)];
    f(S::load(rest), i);
  }
}

// How a group's values become q: (x / 2 - half_offset) * factor + middle. Halves, because max - min may be past the largest float.
struct Range {
  float half_offset, factor;
  uint16_t scale, offset;  // bfloat16
};

uint32_t bits_of_float(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
float float_of_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

constexpr uint16_t kNan = 0x7fc0;

template <typename S>
Range range_of(const typename S::Storage* x, int n, int bits, long& bad) {
  const float infinity = std::numeric_limits<float>::infinity();
  vf low = vset(infinity), high = vset(-infinity), poison = vzero();
  for_vectors<S>(x, n, [&](vf v, int) __attribute__((always_inline)) {
    low = vmin(low, v), high = vmax(high, v);
    poison = vfma(v, vzero(), poison);
  });
  if (std::isnan(vsum(poison))) {
    for_vectors<S>(x, n, [&](vf v, int i) {
      float lanes[W];
      vstore(lanes, v);
      for (int j = 0; j < W && i + j < n; j++) bad += !std::isfinite(lanes[j]);
    });
    return {0, 0, 0, kNan};
  }
  const float levels = (float)((1 << bits) - 1), middle = (float)(1 << (bits - 1));
  const float half_min = -vhmax(vsub(vzero(), low)) * 0.5f, half_max = vhmax(high) * 0.5f;
  const float half_middle = half_min + middle * ((half_max - half_min) / levels);
  constexpr uint32_t kMost = 0x7eff0000, kSign = 0x80000000;  // the largest whose double is finite
  const uint32_t exact = bits_of_float(half_middle), rounded = (exact + 0x7fff + (exact >> 16 & 1)) & 0xffff0000;
  const float half_offset = float_of_bits((rounded & kSign) | std::min(rounded & ~kSign, kMost));
  const float half_scale = float_of_bits((bits_of_float(std::max((half_offset - half_min) / middle, (half_max - half_offset) / (levels - middle))) + 0xffff) & 0xffff0000);
  const uint16_t offset = (uint16_t)(bits_of_float(2 * half_offset) >> 16);
  // A range that is as good as none: the group is its middle. (Its inverse would not be a number.)
  if (half_scale < 0x1p-120f) return {0, 0, 0, offset};
  return {half_offset, 1.0f / half_scale, (uint16_t)(bits_of_float(2 * half_scale) >> 16), offset};
}

// q of x [n] into out [kChunk], zeros behind.
template <typename S>
AS_INLINE void quantize_chunk(const typename S::Storage* x, int n, const Range& range, float levels, uint8_t* out) {
  alignas(64) float q[kChunk];
  const vf half = vset(0.5f), offset = vset(range.half_offset), factor = vset(range.factor), most = vset(levels), middle = vset(0.5f * (levels + 1));
  for_vectors<S>(x, n, [&](vf v, int i) __attribute__((always_inline)) {
    const vf scaled = vadd(vround(vmul(vsub(vmul(v, half), offset), factor)), middle);
    vstore(q + i, vmax(vzero(), vmin(most, scaled)));
  });
  if (n == kChunk) {
    for (int i = 0; i < kChunk; i++) out[i] = (uint8_t)(int32_t)q[i];
  } else {
    std::memset(out, 0, kChunk);
    for (int i = 0; i < n; i++) out[i] = (uint8_t)(int32_t)q[i];
  }
}

typedef uint8_t Byte16 __attribute__((vector_size(16)));
typedef uint64_t Long2 __attribute__((vector_size(16)));

AS_INLINE Byte16 mix(Byte16 a, Byte16 b, Byte16 order) {
#if defined(__clang__)
  Byte16 out;
  for (int i = 0; i < 16; i++) out[i] = order[i] < 16 ? a[order[i]] : b[order[i] - 16];
  return out;
#else
  return __builtin_shuffle(a, b, order);
#endif
}

// Eight rows of eight bytes, `stride` apart, become eight columns.
AS_INLINE void transpose_bytes(const uint8_t* in, long stride, char* out, long out_stride) {
  const Byte16 lower = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
  const Byte16 upper = {8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  Byte16 a[4], b[4];
  for (int i = 0; i < 4; i++) {
    uint64_t first, second;
    std::memcpy(&first, in + i * stride, 8);
    std::memcpy(&second, in + (i + 4) * stride, 8);
    a[i] = mix((Byte16)Long2{first, 0}, (Byte16)Long2{second, 0}, lower);
  }
  b[0] = mix(a[0], a[2], lower), b[1] = mix(a[0], a[2], upper), b[2] = mix(a[1], a[3], lower), b[3] = mix(a[1], a[3], upper);
  const Byte16 c[4] = {mix(b[0], b[2], lower), mix(b[0], b[2], upper), mix(b[1], b[3], lower), mix(b[1], b[3], upper)};
  for (int i = 0; i < 8; i++) {
    const uint64_t column = ((Long2)c[i / 2])[i % 2];
    std::memcpy(out + i * out_stride, &column, 8);
  }
}

// Lays q of `rows` rows and n k, from k0 of a group on, at lane `lane` of the group's weights.
AS_INLINE void place(const Packed& w, const uint8_t (*q)[kChunk], int rows, int n, int k0, int lane, char* weights) {
  const long panel = w.panel;
  if (w.unit() == 1) {
    uint8_t centred[kRows][kChunk];
    for (int r = 0; r < kRows; r++)
      for (int i = 0; i < kChunk; i++) centred[r][i] = q[r][i] ^ 0x80;
    char* out = weights + k0 * panel + lane;
    int i = 0;
    if (rows == kRows)
      for (; i + 8 <= n; i += 8) transpose_bytes(centred[0] + i, kChunk, out + i * panel, panel);
    for (; i < n; i++)
      for (int r = 0; r < rows; r++) out[i * panel + r] = (char)centred[r][i];
    return;
  }
  const int unit = w.unit();
  const uint32_t centre = w.planes ? 0 : 0x88888888u;
  char* out = weights + ((long)(k0 / unit) * panel + lane) * 4;
  for (int i = 0; i < n; i += unit, out += panel * 4)
    for (int r = 0; r < rows; r++) {
      uint32_t first, second = 0;
      std::memcpy(&first, q[r] + i, 4);
      if (unit == 8) std::memcpy(&second, q[r] + i + 4, 4);
      const uint32_t lanes = (first | second << 4) ^ centre;
      std::memcpy(out + r * 4, &lanes, 4);
    }
}

template <typename S>
long quantize_from(const Packed& w, const typename S::Storage* source, long stride, long row_offset, long r0, long r1) {
  const int bits = bits_of(w.format);
  const float levels = (float)((1 << bits) - 1);
  long bad = 0;
  for (long row = r0; row < r1;) {
    const int panel = (int)(row / w.panel), lane = (int)(row % w.panel);
    const int rows = (int)std::min<long>({r1 - row, (long)kRows, (long)(w.panel - lane)});
    const auto* x = source + (row - row_offset) * stride;
    for (int g = 0, first = 0; g < w.groups(); first += w.group_k(g), g++) {
      const int length = w.group_k(g);
      Range ranges[kRows];
      for (int r = 0; r < rows; r++) {
        ranges[r] = range_of<S>(x + r * stride + first, length, bits, bad);
        w.scales(panel, g)[lane + r] = ranges[r].scale;
        w.offsets(panel, g)[lane + r] = ranges[r].offset;
      }
      for (int k0 = 0; k0 < length; k0 += kChunk) {
        const int n = std::min(kChunk, length - k0);
        alignas(64) uint8_t q[kRows][kChunk];
        for (int r = 0; r < rows; r++) quantize_chunk<S>(x + r * stride + first + k0, n, ranges[r], levels, q[r]);
        place(w, q, rows, n, k0, lane, w.weights(panel, g));
      }
    }
    row += rows;
  }
  return bad;
}

}  // namespace

long quantize(const Packed& w, const void* source, SourceType type, long stride, long row_offset, long r0, long r1) {
  if (type == SourceType::f32) return quantize_from<SourceF32>(w, static_cast<const float*>(source), stride, row_offset, r0, r1);
  if (type == SourceType::f16) return quantize_from<SourceF16>(w, static_cast<const uint16_t*>(source), stride, row_offset, r0, r1);
  return quantize_from<SourceBF16>(w, static_cast<const uint16_t*>(source), stride, row_offset, r0, r1);
}

void read_row(const Packed& w, long row, float* y) {
  const int panel = (int)(row / w.panel), lane = (int)(row % w.panel);
  if (!is_quantized(w.format)) {
    const char* data = w.data + panel * w.panel_bytes;
    for (int i = 0; i < w.k; i++) {
      if (w.format == Format::f32) {
        std::memcpy(y + i, data + ((size_t)i * w.panel + lane) * 4, 4);
      } else {
        uint16_t upper;
        const size_t at = w.pairs ? ((size_t)(i / 2) * w.panel + lane) * 2 + i % 2 : (size_t)i * w.panel + lane;
        std::memcpy(&upper, data + at * 2, 2);
        const uint32_t value = (uint32_t)upper << 16;
        std::memcpy(y + i, &value, 4);
      }
    }
    return;
  }
  for (int g = 0; g < w.groups(); g++) {
    const float scale = float_of_bits((uint32_t)w.scales(panel, g)[lane] << 16), offset = float_of_bits((uint32_t)w.offsets(panel, g)[lane] << 16);
    const uint8_t* weights = reinterpret_cast<const uint8_t*>(w.weights(panel, g));
    for (int i = 0; i < w.group_k(g); i++) {
      int q;
      if (w.unit() == 1) {
        q = (int8_t)weights[(size_t)i * w.panel + lane];
      } else if (w.unit() == 4) {
        q = weights[((size_t)(i / 4) * w.panel + lane) * 4 + i % 4] - 128;
      } else {
        const int pair = weights[((size_t)(i / 8) * w.panel + lane) * 4 + i % 4], half = i % 8 < 4 ? pair & 15 : pair >> 4;
        q = w.planes ? half - 8 : (half ^ 8) - 8;
      }
      *y++ = scale * (float)q + offset;
    }
  }
}

}  // namespace AS_ISA
}  // namespace as
