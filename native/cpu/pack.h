// Packs rows of a stored matrix into panels (see Packed) and converts them to the matrix' type.
//
// A panel is [column][row], so packing transposes. Moving a value alone takes five cycles, so squares of 8 x 8 are
// converted and transposed in registers. Uses the compiler's vector extensions: baseline code, the same on every ISA.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/words.h"

namespace as {
namespace pack {

typedef uint16_t Half8 __attribute__((vector_size(16)));
typedef int32_t Int4 __attribute__((vector_size(16)));
typedef float Float4 __attribute__((vector_size(16)));
struct Word8 {
  Word4 low, high;
};  // vectors wider than the baseline ISA's are slow

constexpr int kSquare = 8;

inline Half8 interleave_low(Half8 a, Half8 b) { return shuffle<0, 8, 1, 9, 2, 10, 3, 11>(a, b); }
inline Half8 interleave_high(Half8 a, Half8 b) { return shuffle<4, 12, 5, 13, 6, 14, 7, 15>(a, b); }
using as::interleave_high;
using as::interleave_low;

inline Word8 unsigned_words(Half8 x) { return {(Word4)interleave_low(x, Half8{}), (Word4)interleave_high(x, Half8{})}; }

}  // namespace pack

// The types in which checkpoints store values. Lanes: eight values as bits. Values with all bits of kExponent set are
// NaN or infinite; special() tests vectors for them. widen() converts to the bits of float32.
struct F32 {
  using Storage = float;
  using Lanes = pack::Word8;
  static constexpr uint32_t kExponent = 0x7f800000;
  static pack::Half8 special(const Lanes& x) {
    return (pack::Half8)(((x.low & kExponent) == kExponent) | ((x.high & kExponent) == kExponent));
  }
  static pack::Word8 widen(const Lanes& x) { return x; }
};
struct F16 {
  using Storage = uint16_t;
  using Lanes = pack::Half8;
  static constexpr uint16_t kExponent = 0x7c00;
  static pack::Half8 special(const Lanes& x) { return (pack::Half8)((x & kExponent) == kExponent); }
  static Word4 widen(Word4 bits) {
    const Word4 exponent = (bits >> 10) & 31, fraction = bits & 1023;
    const Word4 subnormal = (Word4)(__builtin_convertvector((pack::Int4)fraction, pack::Float4) * 0x1p-24f);
    const Word4 is_subnormal = (Word4)(exponent == 0), is_special = (Word4)(exponent == 31);
    const Word4 normal = ((exponent + 112 + (is_special & 112)) << 23) | (fraction << 13);
    return (is_subnormal & subnormal) | (~is_subnormal & normal) | ((bits & 0x8000) << 16);
  }
  static pack::Word8 widen(const Lanes& x) {
    const pack::Word8 bits = pack::unsigned_words(x);
    return {widen(bits.low), widen(bits.high)};
  }
};
struct BF16 {
  using Storage = uint16_t;
  using Lanes = pack::Half8;
  static constexpr uint16_t kExponent = 0x7f80;
  static pack::Half8 special(const Lanes& x) { return (pack::Half8)((x & kExponent) == kExponent); }
  static pack::Word8 widen(const Lanes& x) {
    const pack::Word8 bits = pack::unsigned_words(x);
    return {bits.low << 16, bits.high << 16};
  }
};

namespace pack {

inline Word4 rounded_to_bf16(Word4 bits) {  // to nearest even; NaN stays NaN
  const Word4 is_nan = (Word4)((Int4)(bits & 0x7fffffff) > 0x7f800000);
  const Word4 nan = (bits >> 16) | 0x40, number = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return (is_nan & nan) | (~is_nan & number);
}

// Eight values of a row, converted to the matrix' type. bfloat16 is copied bit for bit, including NaN payloads.
template <typename Source>
void convert(const typename Source::Lanes& x, Word8& y) {
  y = Source::widen(x);
}
template <typename Source>
void convert(const typename Source::Lanes& x, Half8& y) {
  if constexpr (std::is_same_v<Source, BF16>) {
    y = x;
  } else {
    const Word8 bits = Source::widen(x);
    const Half8 low = (Half8)rounded_to_bf16(bits.low), high = (Half8)rounded_to_bf16(bits.high);
    y = shuffle<0, 2, 4, 6, 8, 10, 12, 14>(low, high);
  }
}

// Transposes eight rows of eight values into eight columns, `stride` elements apart.
inline void transpose(Half8 (&a)[kSquare], uint16_t* target, int64_t stride) {
  Half8 b[kSquare];
  auto interleave = [](const Half8* x, Half8* y) {  // three times: log2 of the square
    for (int i = 0; i < kSquare / 2; i++) {
      y[2 * i] = interleave_low(x[i], x[i + kSquare / 2]);
      y[2 * i + 1] = interleave_high(x[i], x[i + kSquare / 2]);
    }
  };
  interleave(a, b);
  interleave(b, a);
  interleave(a, b);
  for (int i = 0; i < kSquare; i++) std::memcpy(target + i * stride, &b[i], sizeof b[i]);
}

inline void transpose(const Word8 (&t)[kSquare], float* target, int64_t stride) {
  const int64_t bytes = stride * (int64_t)sizeof(float);
  for (int i = 0; i < kSquare; i += 4) {
    transpose_words(t[i].low, t[i + 1].low, t[i + 2].low, t[i + 3].low, target + i, bytes);
    transpose_words(t[i].high, t[i + 1].high, t[i + 2].high, t[i + 3].high, target + 4 * stride + i, bytes);
  }
}

// Packs 8 x 8 values. If any of them is NaN or infinite, some element of `special` becomes non-zero.
template <typename Source, typename T>
inline void square(const typename Source::Storage* source, int64_t stride, T* target, int64_t target_stride,
                   Half8& special) {
  std::conditional_t<std::is_same_v<T, float>, Word8, Half8> rows[kSquare];
  for (int i = 0; i < kSquare; i++) {
    typename Source::Lanes x;
    std::memcpy(&x, source + i * stride, sizeof x);
    special |= Source::special(x);
    convert<Source>(x, rows[i]);
  }
  transpose(rows, target, target_stride);
}

// The same for a square at an edge, where only `rows` x `columns` values exist.
template <typename Source, typename T>
void edge(const typename Source::Storage* source, int64_t stride, T* target, int64_t target_stride, int64_t rows,
          int64_t columns, Half8& special) {
  typename Source::Storage in[kSquare * kSquare] = {};
  T out[kSquare * kSquare];
  for (int64_t i = 0; i < rows; i++) std::memcpy(in + i * kSquare, source + i * stride, columns * sizeof *in);
  square<Source, T>(in, kSquare, out, kSquare, special);
  for (int64_t j = 0; j < columns; j++) std::memcpy(target + j * target_stride, out + j * kSquare, rows * sizeof *out);
}

template <typename Source>
int64_t count_special(const typename Source::Storage* source, int64_t stride, int64_t columns, int64_t rows) {
  int64_t count = 0;
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < columns; c++) {
      std::remove_const_t<decltype(Source::kExponent)> bits;
      std::memcpy(&bits, source + r * stride + c, sizeof bits);
      count += (bits & Source::kExponent) == Source::kExponent;
    }
  return count;
}

// Packs a square, or the part of it that exists, in pairs of columns: [column / 2][panel][2].
template <typename Source>
void pairs(const typename Source::Storage* source, int64_t stride, uint16_t* target, int panel, int64_t rows,
           int64_t columns, Half8& special) {
  alignas(16) uint16_t out[kSquare * kSquare] = {};
  if (rows == kSquare && columns == kSquare) square<Source, uint16_t>(source, stride, out, kSquare, special);
  else edge<Source, uint16_t>(source, stride, out, kSquare, rows, columns, special);
  for (int64_t j = 0; j < columns; j += 2) {
    Half8 even, odd;
    std::memcpy(&even, out + j * kSquare, sizeof even);
    std::memcpy(&odd, out + (j + 1) * kSquare, sizeof odd);
    const Half8 both[2] = {interleave_low(even, odd), interleave_high(even, odd)};
    std::memcpy(target + j * panel, both, rows * 2 * sizeof(uint16_t));
  }
}

// Packs `rows` rows of one panel. `lane`: where the first row's first value goes. Returns the number of NaN and
// infinite.
template <typename Source, typename T>
int64_t rows_of_panel(const typename Source::Storage* source, int64_t stride, int64_t columns, int64_t rows, int panel,
                      T* lane, bool in_pairs) {
  Half8 special{};
  for (int64_t c = 0; c < columns; c += kSquare)  // down the panel, so that memory is written in order
    for (int64_t r = 0; r < rows; r += kSquare) {
      const int64_t height = std::min<int64_t>(kSquare, rows - r), width = std::min<int64_t>(kSquare, columns - c);
      const auto* from = source + r * stride + c;
      if constexpr (std::is_same_v<T, uint16_t>)
        if (in_pairs) {
          pairs<Source>(from, stride, lane + c * panel + 2 * r, panel, height, width, special);
          continue;
        }
      T* to = lane + c * panel + r;
      if (height == kSquare && width == kSquare) square<Source, T>(from, stride, to, panel, special);
      else edge<Source, T>(from, stride, to, panel, height, width, special);
    }
  uint64_t found[2];
  std::memcpy(found, &special, sizeof found);
  return found[0] | found[1] ? count_special<Source>(source, stride, columns, rows) : 0;  // rarely any
}

}  // namespace pack

// Packs rows [r0, r1) of the matrix `target` from a source whose first row is row `row_offset` and whose rows are
// `stride` elements apart. in_pairs: bfloat16 as in Packed::pairs. Returns the number of NaN and infinite values.
template <typename Source, typename T>
int64_t pack_rows(const typename Source::Storage* source, int64_t stride, int64_t columns, int64_t row_offset,
                  int64_t r0, int64_t r1, int panel, T* target, bool in_pairs = false) {
  const int64_t padded = in_pairs ? (columns + 31) / 32 * 32 : columns;
  int64_t bad = 0;
  for (int64_t p0 = r0; p0 < r1;) {
    const int64_t p1 = std::min(r1, (p0 / panel + 1) * panel);
    bad += pack::rows_of_panel<Source, T>(source + (p0 - row_offset) * stride, stride, columns, p1 - p0, panel,
                                          target + (p0 / panel) * panel * padded + p0 % panel * (in_pairs ? 2 : 1),
                                          in_pairs);
    p0 = p1;
  }
  return bad;
}

}  // namespace as
