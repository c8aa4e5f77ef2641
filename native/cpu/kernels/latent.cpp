// Packs rows of a latent cache into keys and values for the kernels of attention (span_layout.h).
//
// The cache holds one row a token, so that decode reads each byte once. Keys are wanted as [group][d][token], values as
// rows or as pairs of rows. A packed block stays in the second-level cache, and serves all query heads of a group of
// tiles. Packing moves bits only, after rows of int8 are dequantized, so results do not depend on it.
//
// For one tile of bfloat16, tile products read the rows as they are (attention_tiles.h), so only their addresses are
// "packed". Four tiles of a prompt were 1.2 times as fast with a packed block that they share.
#include <cstdint>
#include <cstring>

#include "cpu/kernels/tables.h"
#include "cpu/kernels/tile.h"
#include "cpu/kernels/transpose.h"
#include "cpu/simd.h"

namespace as {
namespace AS_ISA {
namespace {

// Transposes units of T: 16 rows of n units, `stride` bytes apart, to [n][16].
template <typename T>
void transpose(const char* rows, size_t stride, int n, char* out) {
  T* to = reinterpret_cast<T*>(out);
  for (int i = 0; i < n; i++, to += kKeyGroup)
    for (int t = 0; t < kKeyGroup; t++) std::memcpy(to + t, rows + t * stride + i * sizeof(T), sizeof(T));
}

void transpose_words(const char* rows, size_t stride, int n, char* out) {
  int i = 0;
#if defined(AS_ISA_AVX512)
  for (; i + 16 <= n; i += 16) transpose_16(rows + i * 4, stride, out + i * 64);
#endif
  transpose<uint32_t>(rows + i * 4, stride, n - i, out + i * 64);
}

// Interleaves n 16-bit values of two rows. n is a multiple of 16.
void interleave(const char* even, const char* odd, int n, char* out) {
  const uint16_t *a = reinterpret_cast<const uint16_t*>(even), *b = reinterpret_cast<const uint16_t*>(odd);
  uint16_t* to = reinterpret_cast<uint16_t*>(out);
  for (int d = 0; d < n; d += 16) {
#if defined(AS_ISA_AVX512)
    const __m512i x = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(a + d))),
                  y = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(b + d)));
    _mm512_storeu_si512(to + 2 * d, _mm512_or_si512(x, _mm512_slli_epi32(y, 16)));
#else
    for (int i = d; i < d + 16; i++) to[2 * i] = a[i], to[2 * i + 1] = b[i];
#endif
  }
}

// Dequantizes n values, a multiple of 16. bfloat16 is for instruction sets that convert to it.
void dequantize(const uint8_t* quants, int n, float scale, float minimum, [[maybe_unused]] DType dtype, char* out) {
#if defined(AS_ISA_AVX512)
  const vf factor = vset(scale), low = vset(minimum);
  for (int d = 0; d < n; d += W) {
    const vf x = vfma(to_float(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(quants + d)))), factor, low);
#if defined(__AVX512BF16__)
    if (dtype == DType::bf16) {
      _mm256_storeu_si256((__m256i*)(out + 2 * d), (__m256i)_mm512_cvtneps_pbh(x));
      continue;
    }
#endif
    vstore(reinterpret_cast<float*>(out) + d, x);
  }
#else
  float* to = reinterpret_cast<float*>(out);
  for (int d = 0; d < n; d++) to[d] = quants[d] * scale + minimum;
#endif
}

// Dequantizes a group of rows, to float_row_bytes each. The padding of a row's parts is overwritten by what follows.
void dequantize_rows(const SpanLayout& s, const char* rows, char* out) {
  const size_t each = s.float_row_bytes(), size = bits_of(s.dtype) / 8;
  const int first = padded_part(s.split), rest = s.head_dim - s.split;
  for (int t = 0; t < kKeyGroup; t++, rows += s.row_bytes, out += each) {
    const uint8_t* quants = reinterpret_cast<const uint8_t*>(rows);
    const float* scales = reinterpret_cast<const float*>(rows + s.row_bytes - kLatentScaleBytes);
    dequantize(quants, first, scales[0], scales[1], s.dtype, out);
    dequantize(quants + first, padded_part(rest), scales[2], scales[3], s.dtype, out + s.split * size);
    std::memset(out + s.head_dim * size, 0, each - s.head_dim * size);
  }
}

}  // namespace

#if defined(AS_ISA_AMX)
namespace {

// Rows are not prefetched: the hardware does it (docs/decisions/latent.md).
void list_rows(const SpanLayout& s, const void* const* spans, int span_size, int tokens, char* out) {
  LatentRows& list = *reinterpret_cast<LatentRows*>(out);
  char* floats = out + (sizeof(LatentRows) + 63) / 64 * 64;
  floats += -(uintptr_t)floats % 64;
  list.stride = s.split ? s.float_row_bytes() : s.row_bytes;
  for (int g = 0, t = 0; t < tokens; g++, t += kKeyGroup) {
    list.groups[g] = static_cast<const char*>(spans[t / span_size]) + t % span_size * s.row_bytes;
    if (!s.split) continue;
    dequantize_rows(s, list.groups[g], floats);
    list.groups[g] = floats, floats += kKeyGroup * list.stride;
  }
}

}  // namespace
#endif

void pack_latent(const SpanLayout& s, const void* const* spans, const void* const* next, int span_size, int tokens,
                 char* out) {
#if defined(AS_ISA_AMX)
  if (s.pairs && s.for_one_tile) return list_rows(s, spans, span_size, tokens, out);
#endif
  for (int t = 0; t < tokens; t += kKeyGroup) {
    const size_t within = t % span_size * s.row_bytes;
    const char* rows = static_cast<const char*>(spans[t / span_size]) + within;
    const char* ahead = static_cast<const char*>(next[t / span_size]) + within;
    for (size_t line = 0; line < kKeyGroup * s.row_bytes; line += 64) prefetch_far(ahead + line);
    size_t stride = s.row_bytes;
    if (s.split) {
      char* floats = out + s.scale_offset;
      dequantize_rows(s, rows, floats);
      rows = floats, stride = s.float_row_bytes();
    }
    char *keys = out + t / kKeyGroup * s.group_bytes, *values = out + s.value_offset + t * s.value_bytes;
    if (s.dtype == DType::f32) transpose_words(rows, stride, s.head_dim, keys);
    else if (s.pairs) transpose_words(rows, stride, s.key_dim / 2, keys);
    else transpose<uint16_t>(rows, stride, s.head_dim, keys);
    for (int i = 0; i < kKeyGroup; i += 2, values += 2 * s.value_bytes) {
      const char *even = rows + i * stride, *odd = even + stride;
      if (s.pairs) interleave(even, odd, s.padded_dim, values);
      else std::memcpy(values, even, s.value_bytes), std::memcpy(values + s.value_bytes, odd, s.value_bytes);
    }
  }
}

}  // namespace AS_ISA
}  // namespace as
