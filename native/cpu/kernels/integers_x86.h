// Integer products of matmul_integer.cpp on x86.
//
//   VNNI     vpdpbusd adds four products of u8 and s8 to 32 bits. 16-bit activations are two rows of bytes (planes).
//            On AVX2, vpdpwssd multiplies them whole, as without VNNI: the same bits in no more instructions.
//   without  vpmaddwd adds two 16-bit products, and vpaddd accumulates them. A 16-bit activation costs no more than an
//            8-bit one, so int8, int4 and w8a8 share one kernel with widened weights. (For 8 bits, vpmaddubsw of |w|
//            and sign(a, w), or of the weights' nibbles, takes as many instructions.) w4a8 uses vpmaddubsw: a pair is
//            at most 2 * 15 * 127 = 3810, so eight pairs fit 16 bits.
//
// Rates without VNNI, relative to FMAs of floats: two instructions replace 2 FMAs with 16-bit products, and 4 FMAs in
// w4a8. Additions have more ports than FMAs. So the limits are 2 and 4 where both multiply ports execute vpmaddwd, and
// 1 and 2 where only one does (Haswell, Zen 2). On Zen 4, additions use multiply ports nevertheless: a loop on
// registers alone reaches 1.62 and 3.2.
//
// With few rows, weights are widened in registers. With many rows, a block of weights is widened once for all tiles.
// AVX2's 16 registers hold 3 x 3 accumulators, 3 weights, an activation and 2 products.
#pragma once
#include <algorithm>
#include <cstring>

#include "cpu/kernels/format.h"
#include "cpu/kernels/integer_codes.h"
#include "cpu/kernels/tile.h"
#include "cpu/simd.h"

namespace as {
namespace AS_ISA {
namespace {

#if defined(AS_ISA_AVX512)
inline __mmask16 first_lanes(int n) { return (__mmask16)(n >= W ? 0xffff : (1 << n) - 1); }
// Multiplies n <= W values by factor, rounds to nearest even, and zeroes the other lanes.
inline vi rounded(const float* x, int n, vf factor) {
  return _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_maskz_loadu_ps(first_lanes(n), x), factor));
}
// Stores n <= W lanes as bytes, or as 16 bits in the order 0, 2, 1, 3 of every four, with n rounded up to a multiple of
// four.
template <typename Value>
void store_values(char* p, vi x, int n);
template <>
inline void store_values<int8_t>(char* p, vi x, int n) {
  _mm512_mask_cvtepi32_storeu_epi8(p, first_lanes(n), x);
}
template <>
inline void store_values<int16_t>(char* p, vi x, int n) {
  _mm512_mask_cvtepi32_storeu_epi16(p, first_lanes((n + 3) / 4 * 4), _mm512_shuffle_epi32(x, (_MM_PERM_ENUM)0xd8));
}
inline void add_doubles(double* sums, vi x) {
  const __m256i half[2] = {_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1)};
  for (int i = 0; i < 2; i++)
    _mm512_storeu_pd(sums + 8 * i, _mm512_add_pd(_mm512_loadu_pd(sums + 8 * i), _mm512_cvtepi32_pd(half[i])));
}
inline vf round_doubles(const double* sums, double less) {
  const __m512d minus = _mm512_set1_pd(less);
  auto half = [&](const double* p) { return _mm512_cvtpd_ps(_mm512_sub_pd(_mm512_loadu_pd(p), minus)); };
  return _mm512_insertf32x8(_mm512_castps256_ps512(half(sums)), half(sums + 8), 1);
}
#else
inline vi rounded(const float* x, int n, vf factor) {
  float some[W] = {};
  if (n < W) std::memcpy(some, x, n * sizeof(float));
  return _mm256_cvtps_epi32(vmul(vload(n < W ? some : x), factor));
}
inline __m128i to_words(vi x) { return _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)); }
template <typename Value>
void store_values(char* p, vi x, int n);
template <>
inline void store_values<int8_t>(char* p, vi x, int n) {
  const __m128i bytes = _mm_packs_epi16(to_words(x), _mm_setzero_si128());
  if (n == W) std::memcpy(p, &bytes, W);
  else std::memcpy(p, &bytes, n);
}
template <>
inline void store_values<int16_t>(char* p, vi x, int n) {
  const __m128i words = to_words(_mm256_shuffle_epi32(x, 0xd8));
  std::memcpy(p, &words, n > 4 ? 16 : 8);
}
inline void add_doubles(double* sums, vi x) {
  const __m128i half[2] = {_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)};
  for (int i = 0; i < 2; i++)
    _mm256_storeu_pd(sums + 4 * i, _mm256_add_pd(_mm256_loadu_pd(sums + 4 * i), _mm256_cvtepi32_pd(half[i])));
}
inline vf round_doubles(const double* sums, double less) {
  const __m256d minus = _mm256_set1_pd(less);
  auto half = [&](const double* p) { return _mm256_cvtpd_ps(_mm256_sub_pd(_mm256_loadu_pd(p), minus)); };
  return _mm256_set_m128(half(sums + 4), half(sums));
}
#endif

// Prefetch distances in bytes, of groups without a distance of their own.
constexpr int kAheadBytes = kStreamAhead, kAheadNibbles = 4096;

// Prefetches what is `ahead` bytes ahead, or less with more rows (prefetch_weights).
template <int Rows>
AS_INLINE void prefetch_unit(const char* w, size_t ahead) {
  for (int line = 0; line < NR * 4; line += 64) {
    if constexpr (Rows <= 2) prefetch_far(w + ahead + line);
    else prefetch_weights<Rows, 0>(w + line);
  }
}

// Forces a reload of a value at p: keeping it until its next use would take registers that accumulators need.
AS_INLINE const char* reload(const char* p) {
  asm("" : "+r"(p));
  return p;
}

#if defined(AS_ISA_VNNI)

// Keeps a value in a register until its next use.
inline vi in_register(vi x) {
  asm("" : "+v"(x));
  return x;
}

// 8-bit weights with R rows. line(r): the values of row (or plane of a row) r.
struct Bytes {
  static constexpr int kMiddle = 128, kUnit = 4, kAhead = kAheadBytes;
  static constexpr bool kWidens = false;
  using Value = int8_t;
  template <int R, typename L>
  static AS_INLINE void group(const char* w, int k, L&& line, vi (&acc)[R][NV], size_t ahead) {
    for (int i = 0; i < k; i += kUnit, w += NR * 4) {
      vi raw[NV];
      prefetch_unit<R>(w, ahead);
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) raw[v] = R <= 2 ? in_register(iload(w + v * W * 4)) : iload(w + v * W * 4);
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        const vi value = iset_bytes(line(r) + i);
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) acc[r][v] = idot8(acc[r][v], raw[v], value);
      }
    }
  }
};

#endif

#if defined(AS_ISA_VNNI) && defined(AS_ISA_AVX512)

constexpr bool kWords = false;  // 16-bit values are two rows of 8-bit ones
constexpr int rows_of_tile(int planes) { return MR / planes; }

// 4-bit weights.
template <typename Codes>
struct NibblesOf {
  static constexpr int kMiddle = Codes::kMiddle, kUnit = 8, kAhead = kAheadNibbles;
  static constexpr bool kWidens = false;
  using Value = int8_t;
  template <int R, typename L>
  static AS_INLINE void group(const char* w, int k, L&& line, vi (&acc)[R][NV], size_t ahead) {
    constexpr bool kSplit =
        R * NV < 8;  // too few chains to hide the latency: low and high nibbles get their own chains
    const vi mask = iset(0x0f0f0f0f);
    vi upper[R][NV];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) upper[r][v] = iset(0);
    for (int i = 0; i < k; i += kUnit, w += NR * 4) {
      prefetch_unit<R>(w, ahead);
      vi low[NV], high[NV];
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) {
        const vi raw = iload(w + v * W * 4);
        low[v] = Codes::of(iand(raw, mask)), high[v] = Codes::of(iand(shift_right16<4>(raw), mask));
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; r++) {
        const vi first = iset_bytes(line(r) + i), second = iset_bytes(line(r) + i + 4);
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) {
          acc[r][v] = idot8(acc[r][v], low[v], first);
          if constexpr (kSplit) upper[r][v] = idot8(upper[r][v], high[v], second);
          else acc[r][v] = idot8(acc[r][v], high[v], second);
        }
      }
    }
    if constexpr (kSplit)
#pragma GCC unroll 16
      for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) acc[r][v] = iadd(acc[r][v], upper[r][v]);
  }
};

using Nibbles = NibblesOf<PlainCodes>;
using WideBytes = Bytes;
template <typename Codes>
using WideNibbles = NibblesOf<Codes>;

#else

#define AS_WORDS
#define AS_WIDENED_BLOCKS
constexpr bool kWords = true;         // 16-bit values are multiplied whole
constexpr int kExactWords = 512;      // k whose sums of 16-bit activations * (q - 128) always fit 32 bits,
constexpr int kUncentredWords = 256;  // and of activations * q

// Rows of a tile, and k of a block. Blocks take up to 16 and 24 KB of the first-level cache's 32 KB.
#if defined(AS_ISA_AVX512)
constexpr int kPairRows = 12, kBlockK = 256;
#elif defined(AS_ISA_VNNI)
constexpr int kPairRows = 4, kBlockK = 512;
#else
constexpr int kPairRows = 3, kBlockK = 512;
#endif
constexpr int rows_of_tile(int) { return kPairRows; }

// acc[r] += sums of pairs of products of weights and `a`. Uses no intrinsics without VNNI, because GCC 12 would assign
// the sums to other registers and copy accumulators. Multiplications come first. Otherwise additions, which have more
// ports to choose from, take theirs (4 to 5 %).
template <int R>
AS_INLINE void add_pairs16(vi (&acc)[R][NV], int r, const vi (&w)[NV], vi a) {
#if defined(AS_ISA_VNNI)
#pragma GCC unroll 4
  for (int v = 0; v < NV; v++) acc[r][v] = idot16(acc[r][v], w[v], a);
#elif defined(AS_ISA_AVX512)
  vi first, x = acc[r][0], y = acc[r][1];
  asm("vpmaddwd %3, %4, %2\n\tvpmaddwd %3, %5, %3\n\tvpaddd %2, %0, %0\n\tvpaddd %3, %1, %1"
      : "+v"(x), "+v"(y), "=&v"(first), "+v"(a)
      : "v"(w[0]), "v"(w[1]));
  acc[r][0] = x, acc[r][1] = y;
#else
  vi first, second, x = acc[r][0], y = acc[r][1], z = acc[r][2];
  asm("vpmaddwd %5, %6, %3\n\tvpmaddwd %5, %7, %4\n\tvpmaddwd %5, %8, %5\n\tvpaddd %3, %0, %0\n\tvpaddd %4, %1, "
      "%1\n\tvpaddd %5, %2, %2"
      : "+x"(x), "+x"(y), "+x"(z), "=&x"(first), "=&x"(second), "+x"(a)
      : "x"(w[0]), "x"(w[1]), "x"(w[2]));
  acc[r][0] = x, acc[r][1] = y, acc[r][2] = z;
#endif
}

// acc += pairs of products of widened weights and the two 16-bit activations at line(r) + at
template <int R, typename L>
AS_INLINE void add_pairs(const vi (&weights)[NV], L&& line, int at, vi (&acc)[R][NV]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) add_pairs16(acc, r, weights, iset_bytes(line(r) + at));
}

template <int R>
AS_INLINE void clear(vi (&acc)[R][NV]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) acc[r][v] = iset(0);
}

// to [R][NV] = (add ? to : 0) + acc
template <int R>
AS_INLINE void add_to(const vi (&acc)[R][NV], vi* to, bool add) {
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) istore(to + r * NV + v, add ? iadd(acc[r][v], iload(to + r * NV + v)) : acc[r][v]);
}

// kept [R][NV] = (add ? kept : 0) + products of a block of centred 16-bit weights, [k / 2][NR][2].
template <int R, typename L>
AS_INLINE void multiply_words(const int16_t* block, int k, L&& line, vi* kept, bool add) {
  vi acc[R][NV];
  clear(acc);
  for (int i = 0, end = (k + 3) / 4 * 4; i < end; i += 2) {
    vi weights[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) weights[v] = iload(block + (size_t)i * NR + v * W * 2);
    add_pairs<R>(weights, line, 2 * i, acc);
  }
  add_to(acc, kept, add);
}

// 8-bit weights of int8. 16-bit activations of four k are stored in the order 0, 2, 1, 3, because a lane's even and odd
// bytes are unpacked separately.
struct WideBytes {
  static constexpr int kMiddle = 128, kUnit = 4, kAhead = kAheadBytes, kWideMiddle = 0;
  static constexpr bool kWidens = true;
  static constexpr int kFewRows = 24;  // up to this many, weights are widened in registers
  using Value = int16_t;
  using Wide = int16_t;
  template <int R, typename L>
  static AS_INLINE void group(const char* w, int k, L&& line, vi (&acc)[R][NV], size_t ahead) {
    const vi mask = iset(0x00ff00ff);
    for (int i = 0; i < k; i += kUnit, w += NR * 4) {
      vi weights[NV];
      prefetch_unit<R>(w, ahead);
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) weights[v] = iand(iload(w + v * W * 4), mask);
      add_pairs<R>(weights, line, 2 * i, acc);
      const char* again = reload(w);
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) weights[v] = shift_right16<8>(iload(again + v * W * 4));
      add_pairs<R>(weights, line, 2 * i + 4, acc);
    }
  }
  // A block of weights, centred.
  static AS_INLINE void widen(const char* w, int k, Wide* block) {
    const vi mask = iset(0x00ff00ff), middle = iset(0x00800080);
    for (int i = 0; i < k; i += kUnit, w += NR * 4, block += NR * kUnit)
      for (int v = 0; v < NV; v++) {
        const vi raw = iload(w + v * W * 4);
        istore(block + v * W * 2, isub16(iand(raw, mask), middle));
        istore(block + NR * 2 + v * W * 2, isub16(shift_right16<8>(raw), middle));
      }
  }
  template <int R, typename L>
  static AS_INLINE void multiply(const Wide* block, int k, L&& line, vi* kept, bool add) {
    multiply_words<R>(block, k, line, kept, add);
  }
};

// 4-bit weights of 16-bit activations. From the lowest bits on, a lane's 16-bit halves hold k = 0, 4, 1, 5 and 2, 6, 3,
// 7.
template <typename Codes>
struct WideNibbles {
  static constexpr int kMiddle = Codes::kMiddle, kUnit = 8, kAhead = kAheadNibbles, kWideMiddle = 0;
  static constexpr bool kWidens = true;
  static constexpr int kFewRows = 12;
  using Value = int16_t;
  using Wide = int16_t;
  template <int J>
  static AS_INLINE vi pick(vi raw) {
    return Codes::of(J == 3 ? shift_right16<12>(raw) : iand(shift_right16<4 * J>(raw), iset(0x000f000f)));
  }
  static constexpr int kAt[4] = {0, 2, 1, 3};  // the pair of the unit's activations for the J-th nibbles
  template <int J, int R, typename L>
  static AS_INLINE void quarter(const char* w, L&& line, int at, vi (&acc)[R][NV]) {
    vi weights[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) weights[v] = pick<J>(iload(w + v * W * 4));
    add_pairs<R>(weights, line, at + 4 * kAt[J], acc);
  }
  template <int R, typename L>
  static AS_INLINE void group(const char* w, int k, L&& line, vi (&acc)[R][NV], size_t ahead) {
    for (int i = 0; i < k; i += kUnit, w += NR * 4) {
      prefetch_unit<R>(w, ahead);
      quarter<0>(w, line, 2 * i, acc);
      quarter<1>(reload(w), line, 2 * i, acc);
      quarter<2>(reload(w), line, 2 * i, acc);
      quarter<3>(reload(w), line, 2 * i, acc);
    }
  }
  static AS_INLINE void widen(const char* w, int k, Wide* block) {
    const vi middle = iset(kMiddle * 0x00010001);
    for (int i = 0; i < k; i += kUnit, w += NR * 4, block += NR * kUnit)
      for (int v = 0; v < NV; v++) {
        const vi raw = iload(w + v * W * 4);
        istore(block + (kAt[0] * NR + v * W) * 2, isub16(pick<0>(raw), middle));
        istore(block + (kAt[1] * NR + v * W) * 2, isub16(pick<1>(raw), middle));
        istore(block + (kAt[2] * NR + v * W) * 2, isub16(pick<2>(raw), middle));
        istore(block + (kAt[3] * NR + v * W) * 2, isub16(pick<3>(raw), middle));
      }
  }
  template <int R, typename L>
  static AS_INLINE void multiply(const Wide* block, int k, L&& line, vi* kept, bool add) {
    multiply_words<R>(block, k, line, kept, add);
  }
};

// Blocks of 4-bit weights of w4a8 (8-bit activations).
struct WidenedNibbles {
  static constexpr int kMiddle = 8, kUnit = 8, kAhead = kAheadNibbles, kWideMiddle = 8;
  static constexpr bool kWidens = true;
  static constexpr int kFewRows = 12;
  using Value = int8_t;
  using Wide = uint8_t;
  // Widens weights to a byte each, [k / 4][NR][4].
  static AS_INLINE void widen(const char* w, int k, Wide* block) {
    const vi mask = iset(0x0f0f0f0f);
    for (int i = 0; i < k; i += kUnit, w += NR * 4, block += NR * kUnit)
      for (int v = 0; v < NV; v++) {
        const vi raw = iload(w + v * W * 4);
        istore(block + v * W * 4, iand(raw, mask));
        istore(block + (NR + v * W) * 4, iand(shift_right16<4>(raw), mask));
      }
  }
};

#if defined(AS_ISA_VNNI)

struct Nibbles : WidenedNibbles {
  template <int R, typename L>
  static AS_INLINE void dot_rows(const vi (&weights)[NV], L&& line, int at, vi (&acc)[R][NV]) {
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      const vi value = iset_bytes(line(r) + at);
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) acc[r][v] = idot8(acc[r][v], weights[v], value);
    }
  }
  template <int R, typename L>
  static AS_INLINE void group(const char* w, int k, L&& line, vi (&acc)[R][NV], size_t ahead) {
    constexpr bool kSplit =
        R * NV < 8;  // too few chains to hide the latency: low and high nibbles get their own chains
    const vi mask = iset(0x0f0f0f0f);
    vi upper[R][NV];
    clear(upper);
    for (int i = 0; i < k; i += kUnit, w += NR * 4) {
      vi weights[NV];
      prefetch_unit<R>(w, ahead);
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) weights[v] = iand(iload(w + v * W * 4), mask);
      dot_rows(weights, line, i, acc);
      const char* again = reload(w);
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) weights[v] = iand(shift_right16<4>(iload(again + v * W * 4)), mask);
      if constexpr (kSplit) dot_rows(weights, line, i + 4, upper);
      else dot_rows(weights, line, i + 4, acc);
    }
    if constexpr (kSplit)
#pragma GCC unroll 16
      for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) acc[r][v] = iadd(acc[r][v], upper[r][v]);
  }
  template <int R, typename L>
  static AS_INLINE void multiply(const Wide* block, int k, L&& line, vi* kept, bool add) {
    vi acc[R][NV];
    clear(acc);
    for (int i = 0; i < k; i += 4, block += NR * 4) {
      vi weights[NV];
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) weights[v] = iload(block + v * W * 4);
      dot_rows(weights, line, i, acc);
    }
    add_to(acc, kept, add);
  }
};

#else

using Bytes = WideBytes;

// add_pairs16() for unsigned and signed bytes, summed in 16 bits.
template <int R>
AS_INLINE void add_pairs8(vi (&acc)[R][NV], int r, const vi (&w)[NV], vi a) {
#if defined(AS_ISA_AVX512)
  vi first, x = acc[r][0], y = acc[r][1];
  asm("vpmaddubsw %3, %4, %2\n\tvpmaddubsw %3, %5, %3\n\tvpaddw %2, %0, %0\n\tvpaddw %3, %1, %1"
      : "+v"(x), "+v"(y), "=&v"(first), "+v"(a)
      : "v"(w[0]), "v"(w[1]));
  acc[r][0] = x, acc[r][1] = y;
#else
  vi first, second, x = acc[r][0], y = acc[r][1], z = acc[r][2];
  asm("vpmaddubsw %5, %6, %3\n\tvpmaddubsw %5, %7, %4\n\tvpmaddubsw %5, %8, %5\n\tvpaddw %3, %0, %0\n\tvpaddw %4, %1, "
      "%1\n\tvpaddw %5, %2, %2"
      : "+x"(x), "+x"(y), "+x"(z), "=&x"(first), "=&x"(second), "+x"(a)
      : "x"(w[0]), "x"(w[1]), "x"(w[2]));
  acc[r][0] = x, acc[r][1] = y, acc[r][2] = z;
#endif
}

struct Nibbles : WidenedNibbles {
  static constexpr int kChunk = 32;  // k: eight pairs, the most that 16 bits can sum
  template <int R, typename L>
  static AS_INLINE void add_bytes(const vi (&weights)[NV], L&& line, int at, vi (&part)[R][NV]) {
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) add_pairs8(part, r, weights, iset_bytes(line(r) + at));
  }
  template <int R, typename L>
  static AS_INLINE void group(const char* w, int k, L&& line, vi (&acc)[R][NV], size_t ahead) {
    const vi mask = iset(0x0f0f0f0f), ones = iset(0x00010001);
    for (int k0 = 0; k0 < k; k0 += kChunk) {
      vi part[R][NV];
      clear(part);
      for (int i = k0, end = std::min(k, k0 + kChunk); i < end; i += kUnit, w += NR * 4) {
        vi weights[NV];
        prefetch_unit<R>(w, ahead);
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) weights[v] = iand(iload(w + v * W * 4), mask);
        add_bytes<R>(weights, line, i, part);
        const char* again = reload(w);
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) weights[v] = iand(shift_right16<4>(iload(again + v * W * 4)), mask);
        add_bytes<R>(weights, line, i + 4, part);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) acc[r][v] = iadd(acc[r][v], madd16(part[r][v], ones));
    }
  }
  template <int R, typename L>
  static AS_INLINE void multiply(const Wide* block, int k, L&& line, vi* kept, bool add) {
    const vi ones = iset(0x00010001);
    for (int k0 = 0; k0 < k; k0 += kChunk, add = true) {
      vi part[R][NV];
      clear(part);
      for (int i = k0, end = std::min(k, k0 + kChunk); i < end; i += 4, block += NR * 4) {
        vi weights[NV];
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) weights[v] = iload(block + v * W * 4);
        add_bytes<R>(weights, line, i, part);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) part[r][v] = madd16(part[r][v], ones);
      add_to(part, kept, add);
    }
  }
};
#endif

#endif

}  // namespace
}  // namespace AS_ISA
}  // namespace as
