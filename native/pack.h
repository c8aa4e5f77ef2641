// Lays rows of a stored matrix out in panels (see Packed), converting to the matrix' type.
//
// A panel is [column][row], so packing transposes. Storing single values, a row at a time, takes six cycles each; here
// blocks of 8 rows x 8 columns are converted in registers and stored as 8 vectors, which keeps up with memory.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "bf16.h"

namespace as {

// The types in which a checkpoint stores values. finite(x) and value(x) have no branches, so that loops over them vectorize.
struct F32 {
  using Storage = float;
  using Bits = uint32_t;
  static float value(float x) { return x; }
  static bool finite(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return (bits & 0x7f800000) != 0x7f800000;
  }
};
struct F16 {
  using Storage = uint16_t;
  using Bits = uint16_t;
  static float value(uint16_t h) {
    const uint32_t exponent = (h >> 10) & 31, fraction = h & 1023;
    const float subnormal = (float)(int32_t)fraction * 0x1p-24f;
    uint32_t small;
    std::memcpy(&small, &subnormal, 4);
    const uint32_t normal = ((exponent == 31 ? 255u : exponent + 112) << 23) | (fraction << 13);
    const uint32_t bits = (exponent == 0 ? small : normal) | ((uint32_t)(h & 0x8000) << 16);
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
  }
  static bool finite(uint16_t x) { return (x & 0x7c00) != 0x7c00; }
};
struct BF16 {
  using Storage = uint16_t;
  using Bits = uint16_t;
  static float value(uint16_t x) { return bf16_to_float(x); }
  static bool finite(uint16_t x) { return (x & 0x7f80) != 0x7f80; }
};

namespace pack {

constexpr int kTile = 8;

template <typename Source, typename T>
T convert(typename Source::Storage x) {
  if constexpr (std::is_same_v<T, float>) return Source::value(x);
  else if constexpr (std::is_same_v<Source, BF16>) return x;  // the bits as they are, NaN's payload included
  else return float_to_bf16(Source::value(x));
}

// Eight rows of eight values become eight columns, `stride` elements apart.
inline void transpose(const uint16_t (&t)[kTile][kTile], uint16_t* target, long stride) {
  typedef uint16_t Vector __attribute__((vector_size(16)));
  Vector a[kTile], b[kTile];
  std::memcpy(a, t, sizeof a);
  auto interleave = [](const Vector* x, Vector* y) {  // three times: log2 of the tile
    for (int i = 0; i < kTile / 2; i++) {
      y[2 * i] = __builtin_shuffle(x[i], x[i + kTile / 2], Vector{0, 8, 1, 9, 2, 10, 3, 11});
      y[2 * i + 1] = __builtin_shuffle(x[i], x[i + kTile / 2], Vector{4, 12, 5, 13, 6, 14, 7, 15});
    }
  };
  interleave(a, b);
  interleave(b, a);
  interleave(a, b);
  for (int i = 0; i < kTile; i++) std::memcpy(target + i * stride, &b[i], sizeof b[i]);
}

inline void transpose(const float (&t)[kTile][kTile], float* target, long stride) {
  typedef float Vector __attribute__((vector_size(16)));
  typedef int32_t Index __attribute__((vector_size(16)));
  constexpr int kHalf = kTile / 2;
  for (int i = 0; i < kTile; i += kHalf)
    for (int j = 0; j < kTile; j += kHalf) {
      Vector a[kHalf], b[kHalf];
      for (int k = 0; k < kHalf; k++) std::memcpy(&a[k], &t[i + k][j], sizeof a[k]);
      for (int k = 0; k < 2; k++) {
        b[2 * k] = __builtin_shuffle(a[k], a[k + 2], Index{0, 4, 1, 5});
        b[2 * k + 1] = __builtin_shuffle(a[k], a[k + 2], Index{2, 6, 3, 7});
      }
      for (int k = 0; k < 2; k++) {
        a[2 * k] = __builtin_shuffle(b[k], b[k + 2], Index{0, 4, 1, 5});
        a[2 * k + 1] = __builtin_shuffle(b[k], b[k + 2], Index{2, 6, 3, 7});
      }
      for (int k = 0; k < kHalf; k++) std::memcpy(target + (j + k) * stride + i, &a[k], sizeof a[k]);
    }
}

// How many of 8 x 8 values are NaN or infinite. There are hardly ever any, so they are counted only if so.
template <typename Source>
long not_finite(const typename Source::Storage* source, long stride) {
  typename Source::Bits any[kTile] = {};
  for (int i = 0; i < kTile; i++)
    for (int j = 0; j < kTile; j++) any[j] |= Source::finite(source[i * stride + j]) ? 0 : 1;
  int found = 0;
  for (int j = 0; j < kTile; j++) found |= any[j];
  long count = 0;
  if (found)
    for (int i = 0; i < kTile; i++)
      for (int j = 0; j < kTile; j++) count += !Source::finite(source[i * stride + j]);
  return count;
}

// Rows [first, last) of one panel; `lane` is where the first value of row `first` goes. Returns how many are not finite.
template <typename Source, typename T>
long rows_of_panel(const typename Source::Storage* source, long stride, long columns, long rows, int panel, T* lane) {
  constexpr long kBlock = 32;  // columns at a time: the lines being read and written stay in the first-level cache
  long bad = 0;
  for (long c0 = 0; c0 < columns; c0 += kBlock) {
    const long c1 = std::min(columns, c0 + kBlock), whole = c0 + (c1 - c0) / kTile * kTile;
    long r = 0;
    for (; r + kTile <= rows; r += kTile) {
      for (long c = c0; c < whole; c += kTile) {
        const typename Source::Storage* corner = source + r * stride + c;
        T t[kTile][kTile];
        for (int i = 0; i < kTile; i++)
          for (int j = 0; j < kTile; j++) t[i][j] = convert<Source, T>(corner[i * stride + j]);
        bad += not_finite<Source>(corner, stride);
        transpose(t, lane + c * panel + r, panel);
      }
    }
    for (long i = 0; i < rows; i++) {
      const typename Source::Storage* row = source + i * stride;
      for (long c = i < r ? whole : c0; c < c1; c++) {
        bad += !Source::finite(row[c]);
        lane[c * panel + i] = convert<Source, T>(row[c]);
      }
    }
  }
  return bad;
}

}  // namespace pack

// Rows [r0, r1) of the packed matrix `target` from source, whose first row is row `row_offset` and whose rows are `stride`
// elements apart. Returns how many values are NaN or infinite.
template <typename Source, typename T>
long pack_rows(const typename Source::Storage* source, long stride, long columns, long row_offset, long r0, long r1, int panel, T* target) {
  long bad = 0;
  for (long p0 = r0; p0 < r1;) {
    const long p1 = std::min(r1, (p0 / panel + 1) * panel);
    bad += pack::rows_of_panel<Source, T>(source + (p0 - row_offset) * stride, stride, columns, p1 - p0, panel,
                                          target + (p0 / panel) * panel * columns + p0 % panel);
    p0 = p1;
  }
  return bad;
}

}  // namespace as
