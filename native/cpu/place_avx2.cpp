#include "cpu/place_avx2.h"

#include <algorithm>
#include <cstring>

#include "cpu/blocks.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define AS_AVX2 __attribute__((target("avx2")))
#define AS_AVX2_INLINE __attribute__((target("avx2"), always_inline)) inline
#endif

namespace as {

#if defined(__x86_64__)
namespace {

typedef __m256i V;  // 64 values of 4 bits or 32 of 8: eight lanes of a row

AS_AVX2_INLINE V load(const void* p) { return _mm256_loadu_si256(static_cast<const V*>(p)); }
AS_AVX2_INLINE V load(const void* low, const void* high) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(low))),
                                 _mm_loadu_si128(static_cast<const __m128i*>(high)), 1);
}
AS_AVX2_INLINE V lower(V x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
AS_AVX2_INLINE V upper(V x) { return lower(_mm256_srli_epi16(x, 4)); }
template <int kOrder>
AS_AVX2_INLINE V words_of(V a, V b) {
  return _mm256_castps_si256(_mm256_shuffle_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b), kOrder));
}
// Combines two words of 4-bit values into one: the first gives the lower bits. Each register half has a, then b.
AS_AVX2_INLINE V joined(V a, V b) {
  return _mm256_or_si256(words_of<0x88>(a, b), _mm256_slli_epi16(words_of<0xdd>(a, b), 4));
}
// Packs pairs of adjacent values, with the first one of each pair in `first`.
AS_AVX2_INLINE V joined_pairs(V first, V second) {
  return joined(_mm256_unpacklo_epi8(first, second), _mm256_unpackhi_epi8(first, second));
}
// Bits `mask` of the bytes shifted down by `shift`, moved to bit 4.
AS_AVX2_INLINE V fifth_bits(const uint8_t* p, int shift, char mask) {
  const V x = _mm256_srl_epi16(load(p), _mm_cvtsi32_si128(shift));
  return _mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi8(mask)), 4);
}

// Loads eight lanes of a row from k on, a multiple of what they hold.
template <Packing kPacking, int kBits>
AS_AVX2_INLINE V eight_lanes(const uint8_t* row, int64_t k) {
  if constexpr (kPacking == Packing::rows && kBits == 4) {
    const V x = load(row + k / 2);
    return joined_pairs(lower(x), upper(x));
  } else if constexpr (kPacking == Packing::rows) {
    return load(row + k);
  } else if constexpr (kPacking == Packing::signed_rows) {
    return _mm256_xor_si256(load(row + k), _mm256_set1_epi8((char)0x80));
  } else if constexpr (kPacking == Packing::swapped_rows) {
    const V x = load(row + k / 2);
    return joined_pairs(upper(x), lower(x));
  } else if constexpr (kPacking == Packing::q4_0 || kPacking == Packing::q4_1) {
    constexpr int kBytes = kPacking == Packing::q4_0 ? 18 : 20, kHead = kBytes - 16;
    const uint8_t* block = row + k / 32 * kBytes + kHead;
    const V x = load(block, block + kBytes);
    return joined(lower(x), upper(x));
  } else if constexpr (kPacking == Packing::q8_0) {
    return _mm256_xor_si256(load(row + k / 32 * 34 + 2), _mm256_set1_epi8((char)0x80));
  } else if constexpr (kPacking == Packing::q4_k) {
    const V x = load(row + k / 256 * 144 + 16 + k % 256 / 2);
    return _mm256_permute4x64_epi64(joined(lower(x), upper(x)), 0xd8);
  } else if constexpr (kPacking == Packing::q5_k) {
    const uint8_t* block = row + k / 256 * 176;
    const int part = (int)(k % 256 / 32);
    const V x = load(block + 48 + part / 2 * 32);
    return _mm256_or_si256(part % 2 ? upper(x) : lower(x), fifth_bits(block + 16, part, 1));
  } else {
    const uint8_t* block = row + k / 256 * 210;
    const int part = (int)(k % 256 / 32);
    const V x = load(block + part / 4 * 64 + part % 2 * 32);
    return _mm256_or_si256(part % 4 / 2 ? upper(x) : lower(x),
                           fifth_bits(block + 128 + part / 4 * 32, part % 4 * 2, 3));
  }
}

// Stores eight rows of eight words as columns: words 0 to 3 of all rows from `first` on, words 4 to 7 from `second` on.
AS_AVX2_INLINE void store_columns(const V (&x)[8], char* first, char* second, int64_t stride) {
  V a[8], b[8];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    a[2 * i] = _mm256_unpacklo_epi32(x[2 * i], x[2 * i + 1]);
    a[2 * i + 1] = _mm256_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {  // b[4 i + c]: columns c and c + 4 of rows 4 i to 4 i + 3
    b[4 * i] = _mm256_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 1] = _mm256_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 2] = _mm256_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
    b[4 * i + 3] = _mm256_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++) {
    _mm256_storeu_si256(reinterpret_cast<V*>(first + c * stride), _mm256_permute2x128_si256(b[c], b[4 + c], 0x20));
    _mm256_storeu_si256(reinterpret_cast<V*>(second + c * stride), _mm256_permute2x128_si256(b[c], b[4 + c], 0x31));
  }
}

// Prefetches a cache line of each of eight of the rows that are placed next, from `first` on. Hashing, which reads them
// first, would wait for memory, which has nothing to do while rows are placed.
AS_AVX2_INLINE void prefetch_eight(const uint8_t* first, int64_t stride) {
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) __builtin_prefetch(first + i * stride, 0, 2);
}

// Moves chunks of two vectors of each row (a cache line or half of one), for all rows of the panel.
template <Packing kPacking, int kBits>
AS_AVX2 int place_lanes(const Packed& w, const StoredRows& stored, int64_t column, int64_t row, int rows, int panel,
                        int lane) {
  constexpr int kUnit = kBits == 4 ? 8 : 4, kHalf = 4 * kUnit, kChunk = 8 * kUnit;
  const int64_t stride = (int64_t)w.panel * 4;
  const V bias = _mm256_set1_epi8((char)w.bias), inverted = _mm256_set1_epi8((char)(w.inverted() * 0x11));
  const int end = w.k / kChunk * kChunk;
  const int64_t bytes = stored.bytes();
  const auto place_of = [&](int k) __attribute__((always_inline)) {
    const int g = k / w.group;
    return w.weights(panel, g) + (k - g * w.group) / kUnit * stride + (int64_t)lane * 4;
  };
  for (int k0 = 0; k0 < end; k0 += 2 * kChunk) {
    const int pieces = std::min(2, (end - k0) / kChunk);
    char* to[4];
    for (int i = 0; i < 2 * pieces; i++) to[i] = place_of(k0 + i * kHalf);
    const int64_t passed = (column + k0) * bytes / stored.columns;  // of a row
    for (int r = 0; r < rows; r += 8) {
      const uint8_t* from = stored.q + (row + r) * stored.stride;
      prefetch_eight(from + rows * stored.stride + passed, stored.stride);
      for (int piece = 0; piece < pieces; piece++) {
        V x[8];
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
          x[i] = eight_lanes<kPacking, kBits>(from + i * stored.stride, column + k0 + piece * kChunk);
          if constexpr (kBits == 8) x[i] = _mm256_add_epi8(x[i], bias);
          else x[i] = _mm256_xor_si256(x[i], inverted);
        }
        store_columns(x, to[2 * piece] + r * 4, to[2 * piece + 1] + r * 4, stride);
      }
    }
  }
  return end;
}

// One of three steps that transpose eight rows of bytes, in each half of the registers.
AS_AVX2_INLINE void interleave(const V (&from)[8], V (&into)[8]) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    into[2 * i] = _mm256_unpacklo_epi8(from[i], from[i + 4]);
    into[2 * i + 1] = _mm256_unpackhi_epi8(from[i], from[i + 4]);
  }
}

// Transposes eight or sixteen rows of sixteen bytes into columns. Of sixteen, rows i and i + 8 share x[i].
template <int kRows>
AS_AVX2_INLINE void store_byte_columns(const V (&x)[8], char* to, int64_t stride) {
  V a[8], b[8];
  interleave(x, a), interleave(a, b), interleave(b, a);
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++, to += 2 * stride) {
    if constexpr (kRows == 16) {
      const V both = _mm256_permute4x64_epi64(a[i], 0xd8);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(both));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + stride), _mm256_extracti128_si256(both, 1));
    } else {
      const __m128i both = _mm256_castsi256_si128(a[i]);
      _mm_storel_epi64(reinterpret_cast<__m128i*>(to), both);
      _mm_storeh_pd(reinterpret_cast<double*>(to + stride), _mm_castsi128_pd(both));
    }
  }
}

// Moves sixteen bytes of eight or sixteen rows. found: the largest bytes so far, without their signs and doubled, so
// that e4m3's NaN are 0xfe.
template <int kBits, int kRows>
AS_AVX2_INLINE void place_square(const uint8_t* from, int64_t stride, bool swapped, char* to, int64_t to_stride,
                                 V& found) {
  V x[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    const uint8_t* row = from + i * stride;
    x[i] = load(row, kRows == 16 ? row + 8 * stride : row);
    if (kBits == 8) found = _mm256_max_epu8(found, _mm256_add_epi8(x[i], x[i]));
    if (kBits == 4 && swapped) x[i] = _mm256_or_si256(upper(x[i]), _mm256_slli_epi16(lower(x[i]), 4));
  }
  store_byte_columns<kRows>(x, to, to_stride);
}

// Small floats, one or two to a byte: a cache line of each row at a time.
template <int kBits>
AS_AVX2 int place_bytes(const Packed& w, const StoredRows& stored, int64_t column, int64_t row, int rows, int panel,
                        int lane, int64_t& bad) {
  constexpr int kUnit = kBits == 4 ? 2 : 1, kChunk = 16 * kUnit, kLine = 4 * kChunk;
  const int end = w.k / kChunk * kChunk;
  const bool swapped = stored.packing == Packing::swapped_rows;
  V found = _mm256_setzero_si256();
  for (int k0 = 0; k0 < end; k0 += kLine) {
    const int squares = std::min(4, (end - k0) / kChunk);
    char* to[4];
    for (int i = 0; i < squares; i++) {
      const int k = k0 + i * kChunk, g = k / w.group;
      to[i] = w.weights(panel, g) + (int64_t)(k - g * w.group) / kUnit * w.panel + lane;
    }
    for (int r = 0; r < rows; r += 16) {
      const bool both = r + 16 <= rows;
      const uint8_t* from = stored.q + (row + r) * stored.stride + (column + k0) / kUnit;
      for (int i = 0; i < squares; i++, from += 16)
        if (both) place_square<kBits, 16>(from, stored.stride, swapped, to[i] + r, w.panel, found);
        else place_square<kBits, 8>(from, stored.stride, swapped, to[i] + r, w.panel, found);
    }
  }
  const V nan = _mm256_set1_epi8((char)0xfe);
  if (_mm256_movemask_epi8(_mm256_cmpeq_epi8(found, nan)))  // rarely
    for (int r = 0; r < rows; r++)
      for (int k = 0; k < end; k++) bad += (stored.q[(row + r) * stored.stride + column + k] & 0x7f) == 0x7f;
  return end;
}

}  // namespace

namespace {

// Swaps bits `mask` of b with those `shift` bits further up in a.
AS_AVX2_INLINE void exchange(V& a, V& b, int shift, int mask) {
  const V t = _mm256_and_si256(_mm256_xor_si256(_mm256_srli_epi32(a, shift), b), _mm256_set1_epi32(mask));
  b = _mm256_xor_si256(b, t), a = _mm256_xor_si256(a, _mm256_slli_epi32(t, shift));
}

// Transposes four words of four rows each.
AS_AVX2_INLINE void transpose_words(V r0, V r1, V r2, V r3, V (&out)[4]) {
  const V a = _mm256_unpacklo_epi32(r0, r1), b = _mm256_unpackhi_epi32(r0, r1), c = _mm256_unpacklo_epi32(r2, r3),
          d = _mm256_unpackhi_epi32(r2, r3);
  out[0] = _mm256_unpacklo_epi64(a, c), out[1] = _mm256_unpackhi_epi64(a, c);
  out[2] = _mm256_unpacklo_epi64(b, d), out[3] = _mm256_unpackhi_epi64(b, d);
}

// Stores byte j of eight words, four in each half of x, from to + j * stride on.
AS_AVX2_INLINE void store_bytes_of_words(V x, int8_t* to, int64_t stride) {
  x = _mm256_shuffle_epi8(x, _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, 0, 4, 8, 12, 1, 5,
                                              9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  x = _mm256_permutevar8x32_epi32(x, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  alignas(32) uint64_t columns[4];
  _mm256_store_si256(reinterpret_cast<V*>(columns), x);
  for (int j = 0; j < 4; j++) std::memcpy(to + j * stride, &columns[j], 8);
}

// Bits 6 and 7 of the bytes, moved to bits 4 and 5.
AS_AVX2_INLINE V upper_two(V x) { return _mm256_and_si256(_mm256_srli_epi32(x, 2), _mm256_set1_epi8(0x30)); }

AS_AVX2 void scales_of_eight(const StoredRows& stored, const uint8_t* block, int8_t* scales, int8_t* minimums,
                             int64_t stride) {
  if (stored.packing == Packing::q6_k) {
    V x[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) x[i] = load(block + i * stored.stride + 192, block + i * stored.stride + 192);
    store_byte_columns<8>(x, reinterpret_cast<char*>(scales), stride);
    return;
  }
  V rows[4], words[4];  // the block's two float16, then three words with scales and minimums of 6 bits
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) rows[i] = load(block + i * stored.stride, block + (i + 4) * stored.stride);
  transpose_words(rows[0], rows[1], rows[2], rows[3], words);
  const V six = _mm256_set1_epi8(0x3f);
  store_bytes_of_words(_mm256_and_si256(words[1], six), scales, stride);
  store_bytes_of_words(_mm256_or_si256(lower(words[3]), upper_two(words[1])), scales + 4 * stride, stride);
  store_bytes_of_words(_mm256_and_si256(words[2], six), minimums, stride);
  store_bytes_of_words(_mm256_or_si256(upper(words[3]), upper_two(words[2])), minimums + 4 * stride, stride);
}

AS_AVX2 void eight_octets(const uint8_t* from, int64_t stride, int count, char* const* to) {
  V x[8];  // k = 4 + b follows k = b: they share a byte of a lane
  const V some = _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    const uint8_t* p = from + (i % 2 * 4 + i / 2) * stride;
    x[i] = count == 8 ? load(p) : _mm256_maskload_epi32(reinterpret_cast<const int*>(p), some);
    __builtin_prefetch(p + 8 * stride);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) exchange(x[i], x[i + 4], 16, 0x0000ffff);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) exchange(x[i + i / 2 * 2], x[i + i / 2 * 2 + 2], 8, 0x00ff00ff);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) exchange(x[2 * i], x[2 * i + 1], 4, 0x0f0f0f0f);
  // x[i] holds nibble i of the words, which belongs to row kOctet[i].
  V first[4], second[4];
  transpose_words(x[0], x[4], x[1], x[5], first), transpose_words(x[2], x[6], x[3], x[7], second);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const V low = _mm256_permute2x128_si256(first[i], second[i], 0x20),
            high = _mm256_permute2x128_si256(first[i], second[i], 0x31);
    if (i < count) _mm256_storeu_si256(reinterpret_cast<V*>(to[i]), low);
    if (i + 4 < count) _mm256_storeu_si256(reinterpret_cast<V*>(to[i + 4]), high);
  }
}

// Reorders words of eight k from sequential order: 0 beside 4, 1 beside 5 and so on.
AS_AVX2_INLINE V lanes_of_words(V x) {
  x = _mm256_shuffle_epi8(x, _mm256_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15, 0, 2, 1, 3, 4, 6, 5,
                                              7, 8, 10, 9, 11, 12, 14, 13, 15));
  const V t = _mm256_and_si256(_mm256_xor_si256(_mm256_srli_epi32(x, 4), x), _mm256_set1_epi32(0x00f000f0));
  return _mm256_xor_si256(_mm256_xor_si256(x, t), _mm256_slli_epi32(t, 4));
}

constexpr int kAhead = 8;  // rows of words: the next that place_lines() passes

template <bool kEights>
AS_AVX2 int words_of_eight(const uint8_t* from, int64_t stride, int rows, int lanes, char* to, int64_t to_stride) {
  const int whole = lanes / 8 * 8;
  for (int i = 0; i < rows; i++, from += stride, to += to_stride)
    for (int l = 0; l < whole; l += 8) {
      if (l % 16 == 0) __builtin_prefetch(from + kAhead * stride + l * 4);
      const V x = load(from + l * 4);
      _mm256_storeu_si256(reinterpret_cast<V*>(to + l * 4), kEights ? lanes_of_words(x) : x);
    }
  return whole;
}

}  // namespace

bool unpack_scales_of_eight(const StoredRows& stored, int64_t row, int64_t b, int8_t* scales, int8_t* minimums,
                            int64_t stride) {
  scales_of_eight(stored, stored.q + row * stored.stride + b * block_kind(stored.packing).bytes, scales, minimums,
                  stride);
  return true;
}

int place_words_of_eight(const uint8_t* from, int64_t stride, int rows, int lanes, bool eights, char* to,
                         int64_t to_stride) {
  return eights ? words_of_eight<true>(from, stride, rows, lanes, to, to_stride)
                : words_of_eight<false>(from, stride, rows, lanes, to, to_stride);
}

void place_words_of_octets(const uint8_t* from, int64_t stride, int octets, char* const* to) {
  for (int o = 0; o < octets; o += 8) eight_octets(from + o * 4, stride, std::min(8, octets - o), to + o);
}

int place_eights(const Packed& w, const StoredRows& stored, int64_t column, int64_t row, int rows, int panel, int lane,
                 int64_t& bad) {
  if (rows == 0) return 0;
  if (is_small_float(w.format)) {
    if (is_transposed(stored.packing) || is_block(stored.packing) || column % w.unit() || w.group % (16 * w.unit()))
      return 0;
    if (stored.bits == 8) return place_bytes<8>(w, stored, column, row, rows, panel, lane, bad);
    return place_bytes<4>(w, stored, column, row, rows, panel, lane, bad);
  }
  // A vector's values start at an aligned position in the file, too.
  const int aligned = is_block(stored.packing) ? (stored.bits == 4 ? 64 : 32) : stored.bits == 4 ? 2 : 1;
  if (!w.planes || w.group % (4 * w.unit()) || column % aligned) return 0;
  const auto place = [&](auto packing, auto bits) {
    return place_lanes<decltype(packing)::value, decltype(bits)::value>(w, stored, column, row, rows, panel, lane);
  };
  const std::integral_constant<int, 4> four;
  const std::integral_constant<int, 8> eight;
#define AS_CASE(name, bits) \
  case Packing::name:       \
    return place(std::integral_constant<Packing, Packing::name>(), bits);
  switch (stored.packing) {
    case Packing::rows:
      if (stored.bits == 4) return place(std::integral_constant<Packing, Packing::rows>(), four);
      return place(std::integral_constant<Packing, Packing::rows>(), eight);
      AS_CASE(signed_rows, eight)
      AS_CASE(swapped_rows, four)
      AS_CASE(q4_0, four)
      AS_CASE(q4_1, four)
      AS_CASE(q8_0, eight)
      AS_CASE(q4_k, four)
      AS_CASE(q5_k, eight)
      AS_CASE(q6_k, eight)
    default:
      return 0;
  }
#undef AS_CASE
}

#else

int place_eights(const Packed&, const StoredRows&, int64_t, int64_t, int, int, int, int64_t&) { return 0; }

bool unpack_scales_of_eight(const StoredRows&, int64_t, int64_t, int8_t*, int8_t*, int64_t) { return false; }

int place_words_of_eight(const uint8_t*, int64_t, int, int, bool, char*, int64_t) { return 0; }

void place_words_of_octets(const uint8_t* from, int64_t stride, int octets, char* const* to) {
  for (int o = 0; o < octets; o++)
    for (int r = 0; r < 8; r++) {
      uint32_t lanes = 0;
      for (int i = 0; i < 8; i++) {
        uint32_t word;
        std::memcpy(&word, from + i * stride + o * 4, 4);
        lanes |= (word >> 4 * r & 15) << (i % 4 * 8 + i / 4 * 4);
      }
      std::memcpy(to[o] + kOctet[r] * 4, &lanes, 4);
    }
}

#endif

namespace {

// Dequantizes whole vectors, and returns how many values they cover. Subnormal values are converted as integers: the
// product with a power of two, which a scalar takes, is slow for vectors of float32's subnormals.
#if defined(__x86_64__)
AS_AVX2 int64_t dequantize_vectors(const uint8_t* q, int64_t n, float scale, float* out, uint16_t* rounded,
                                   int64_t& bad) {
  const __m256 factor = _mm256_set1_ps(scale), least = _mm256_set1_ps(0x1p-9f);
  V nan = _mm256_setzero_si256();
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const V code = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(q + i))),
            rest = _mm256_and_si256(code, _mm256_set1_epi32(0x7f)),
            sign = _mm256_slli_epi32(_mm256_xor_si256(code, rest), 24),
            normal = _mm256_add_epi32(_mm256_slli_epi32(rest, 20), _mm256_set1_epi32(120 << 23));
    nan = _mm256_sub_epi32(nan, _mm256_cmpeq_epi32(rest, _mm256_set1_epi32(0x7f)));
    const __m256 subnormal = _mm256_mul_ps(_mm256_cvtepi32_ps(rest), least),
                 is_subnormal = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(8), rest)),
                 value = _mm256_blendv_ps(_mm256_castsi256_ps(normal), subnormal, is_subnormal),
                 product = _mm256_mul_ps(_mm256_or_ps(value, _mm256_castsi256_ps(sign)), factor);
    const __m256 result = _mm256_add_ps(product, _mm256_setzero_ps());
    _mm256_storeu_ps(out + i, result);
    const V bits = _mm256_castps_si256(result),
            even = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1)),
            upper = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(even, _mm256_set1_epi32(0x7fff))), 16);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(rounded + i),
                     _mm_packus_epi32(_mm256_castsi256_si128(upper), _mm256_extracti128_si256(upper, 1)));
  }
  alignas(32) uint32_t counts[8];
  _mm256_store_si256(reinterpret_cast<V*>(counts), nan);
  for (uint32_t count : counts) bad += count;
  return i;
}
#else
int64_t dequantize_vectors(const uint8_t*, int64_t, float, float*, uint16_t*, int64_t&) { return 0; }
#endif

}  // namespace

int64_t dequantize_e4m3(const uint8_t* q, int64_t n, float scale, float* out, uint16_t* rounded) {
  int64_t bad = 0;
  for (int64_t i = dequantize_vectors(q, n, scale, out, rounded, bad); i < n; i++) {
    bad += (q[i] & 0x7f) == 0x7f;
    uint32_t bits = (uint32_t)(q[i] & 0x7f) << 20 | (uint32_t)(q[i] & 0x80) << 24;
    float value;
    std::memcpy(&value, &bits, 4);
    out[i] = scale * (value * 0x1p120f) + 0.0f;
    std::memcpy(&bits, &out[i], 4);
    rounded[i] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
  return bad;
}

}  // namespace as
