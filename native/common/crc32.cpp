#include "common/crc32.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif

namespace as {
namespace {

constexpr std::array<uint32_t, 256> byte_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; i++) {
    uint32_t c = i;
    for (int bit = 0; bit < 8; bit++) c = c & 1 ? 0xedb88320u ^ (c >> 1) : c >> 1;
    table[i] = c;
  }
  return table;
}

// All functions below take and return the inverted CRC.
uint32_t by_bytes(const unsigned char* p, size_t bytes, uint32_t crc) {
#if defined(__ARM_FEATURE_CRC32)
  for (; bytes >= 8; bytes -= 8, p += 8) {
    uint64_t word;
    std::memcpy(&word, p, 8);
    crc = __crc32d(crc, word);
  }
#endif
  static constexpr std::array<uint32_t, 256> kTable = byte_table();
  for (size_t i = 0; i < bytes; i++) crc = kTable[(crc ^ p[i]) & 0xff] ^ (crc >> 8);
  return crc;
}

#if defined(__x86_64__)
// Folds 64 bytes at a time by carry-less products; `bytes` is a multiple of 16, and at least 64. The constants are
// powers of x modulo the polynomial, from Gopal et al., Fast CRC Computation for Generic Polynomials Using PCLMULQDQ
// (Intel, 2009).
__attribute__((target("pclmul,sse4.1"))) uint32_t by_products(const unsigned char* p, size_t bytes, uint32_t crc) {
  const auto load = [](const unsigned char* from) __attribute__((target("pclmul,sse4.1"))) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  };
  const auto folded = [](__m128i x, __m128i keys, __m128i next) __attribute__((target("pclmul,sse4.1"))) {
    return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(x, keys, 0x00), _mm_clmulepi64_si128(x, keys, 0x11)), next);
  };
  constexpr size_t kAhead = 2048;  // prefetching by hardware ends with a page
  const __m128i by_64 = _mm_set_epi64x(0x1c6e41596, 0x154442bd4), by_16 = _mm_set_epi64x(0xccaa009e, 0x1751997d0);
  __m128i x[4];
  for (int i = 0; i < 4; i++) x[i] = load(p + 16 * i);
  x[0] = _mm_xor_si128(x[0], _mm_cvtsi32_si128((int)crc));
  for (p += 64, bytes -= 64; bytes >= 64; p += 64, bytes -= 64) {
    __builtin_prefetch(p + kAhead);
    for (int i = 0; i < 4; i++) x[i] = folded(x[i], by_64, load(p + 16 * i));
  }
  __m128i y = x[0];
  for (int i = 1; i < 4; i++) y = folded(y, by_16, x[i]);
  for (; bytes >= 16; p += 16, bytes -= 16) y = folded(y, by_16, load(p));
  // To 64 bits, then to 32 by Barrett's reduction.
  const __m128i low = _mm_setr_epi32(-1, 0, -1, 0), barrett = _mm_set_epi64x(0x1f7011641, 0x1db710641);
  y = _mm_xor_si128(_mm_srli_si128(y, 8), _mm_clmulepi64_si128(y, by_16, 0x10));
  y = _mm_xor_si128(_mm_srli_si128(y, 4),
                    _mm_clmulepi64_si128(_mm_and_si128(y, low), _mm_set_epi64x(0, 0x163cd6124), 0x00));
  const __m128i quotient = _mm_clmulepi64_si128(_mm_and_si128(y, low), barrett, 0x10);
  y = _mm_xor_si128(y, _mm_clmulepi64_si128(_mm_and_si128(quotient, low), barrett, 0x00));
  return (uint32_t)_mm_extract_epi32(y, 1);
}
#endif

}  // namespace

uint32_t crc32(const void* data, size_t bytes, uint32_t crc) {
  const auto* p = static_cast<const unsigned char*>(data);
  crc = ~crc;
#if defined(__x86_64__)
  static const bool kProducts = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  if (const size_t most = bytes / 16 * 16; kProducts && most >= 64) {
    crc = by_products(p, most, crc);
    p += most, bytes -= most;
  }
#endif
  return ~by_bytes(p, bytes, crc);
}

}  // namespace as
