// The tile registers of AMX: eight of up to 16 rows x 64 bytes, tmm0 ... tmm7.
//
// Two threads of a core seem to share the memory behind these registers, to which a load or a product needs room beside
// what both threads hold. A cleared tile (tile_zero) needs none. So operands are cleared after their last use: with all
// eight tiles in use, two threads multiply at 0.6 of the rate that they reach so (docs/decisions/amx-threads.md).
//
// Uses inline assembly, because GCC 12's intrinsics do not tell the compiler that a tile load reads memory. The
// compiler could move a store past the load. AS_AMX_EMULATED computes the same in C++, to test indexing on machines
// without AMX. Its bits and speed differ.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "common/bf16.h"
#include "cpu/kernels/format.h"
#include "cpu/simd.h"

namespace as {
namespace AS_ISA {

// The operand of ldtilecfg: palette 1, then bytes a row and rows of each tile.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

#if defined(AS_AMX_EMULATED)

struct EmulatedTiles {
  bool configured = false;
  TileConfig config;
  char data[8][16][64];
};
inline thread_local EmulatedTiles emulated_tiles;

inline void tile_configure(const TileConfig& config) {
  emulated_tiles.configured = true, emulated_tiles.config = config;
}
inline void tile_release() { emulated_tiles.configured = false; }
// Ends the process if tiles are not configured, as the CPU does.
inline EmulatedTiles& configured_tiles() {
  if (!emulated_tiles.configured) std::abort();
  return emulated_tiles;
}
template <int T>
void tile_zero() {
  std::memset(configured_tiles().data[T], 0, sizeof emulated_tiles.data[T]);
}
template <int T>
void tile_load(const void* p, int64_t stride) {
  auto& t = configured_tiles();
  std::memset(t.data[T], 0, sizeof t.data[T]);
  for (int r = 0; r < t.config.rows[T]; r++)
    std::memcpy(t.data[T][r], (const char*)p + r * stride, t.config.row_bytes[T]);
}
template <int T>
void tile_load_far(const void* p, int64_t stride) {
  tile_load<T>(p, stride);
}
template <int T>
void tile_store(void* p, int64_t stride) {
  auto& t = configured_tiles();
  for (int r = 0; r < t.config.rows[T]; r++) std::memcpy((char*)p + r * stride, t.data[T][r], 64);
}
template <int C, int A, int B>
void tile_dot_bf16() {
  auto& t = configured_tiles();
  const __m512i high = _mm512_set1_epi32((int)0xffff0000);
  auto first = [&](__m512i x) { return (__m512)_mm512_slli_epi32(x, 16); };
  auto second = [&](__m512i x) { return (__m512)_mm512_and_si512(x, high); };
  for (int r = 0; r < t.config.rows[C]; r++) {
    __m512 c = _mm512_loadu_ps(t.data[C][r]);
    for (int i = 0; i < 16; i++) {
      const __m512i a = iset_bytes(t.data[A][r] + 4 * i), b = _mm512_loadu_si512(t.data[B][i]);
      c = _mm512_add_ps(c, _mm512_add_ps(_mm512_mul_ps(first(a), first(b)), _mm512_mul_ps(second(a), second(b))));
    }
    _mm512_storeu_ps(t.data[C][r], c);
  }
}
template <int C, int A, int B>
void tile_dot_s8u8() {
  auto& t = configured_tiles();
  for (int r = 0; r < t.config.rows[C]; r++) {
    __m512i c = _mm512_loadu_si512(t.data[C][r]);
    for (int i = 0; i < 16; i++)
      c = _mm512_dpbusd_epi32(c, _mm512_loadu_si512(t.data[B][i]), iset_bytes(t.data[A][r] + 4 * i));
    _mm512_storeu_si512(t.data[C][r], c);
  }
}
template <int C, int A, int B>
void tile_dot_s8s8() {
  auto& t = configured_tiles();
  for (int r = 0; r < t.config.rows[C]; r++)
    for (int j = 0; j < 16; j++) {
      int32_t c;
      std::memcpy(&c, t.data[C][r] + 4 * j, 4);
      for (int i = 0; i < t.config.row_bytes[A]; i++)
        c += (int8_t)t.data[A][r][i] * (int8_t)t.data[B][i / 4][4 * j + i % 4];
      std::memcpy(t.data[C][r] + 4 * j, &c, 4);
    }
}

#else

AS_INLINE void tile_configure(const TileConfig& config) { asm volatile("ldtilecfg %0" ::"m"(config) : "memory"); }
AS_INLINE void tile_release() { asm volatile("tilerelease" ::: "memory"); }
template <int T>
AS_INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
AS_INLINE void tile_load(const void* p, int64_t stride) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(p), "r"(stride) : "memory");
}
// Loads from the second-level cache without displacing data in the first.
template <int T>
AS_INLINE void tile_load_far(const void* p, int64_t stride) {
  asm volatile("tileloaddt1 (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(p), "r"(stride) : "memory");
}
template <int T>
AS_INLINE void tile_store(void* p, int64_t stride) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(T), "r"(p), "r"(stride) : "memory");
}
// Tile C += tile A [rows][32] * tile B [16 pairs of k][16 columns][2], in bfloat16.
template <int C, int A, int B>
AS_INLINE void tile_dot_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
// Tile C += tile A [rows][64], signed bytes, * tile B [16 fours of k][16 columns][4], unsigned bytes; exact.
template <int C, int A, int B>
AS_INLINE void tile_dot_s8u8() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
// The same with signed bytes in B.
template <int C, int A, int B>
AS_INLINE void tile_dot_s8s8() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

#endif

}  // namespace AS_ISA
}  // namespace as
