// wgmma with the first operand in registers: weights, unchanged or dequantized there.
#pragma once
#include "cuda/kernels/common/wgmma.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// d [64, N] (+)= a [64, K] b [N, K]^T by a warpgroup, with sums in the order of Tile (wgmma.cuh). a: each warp's 16 of
// 64 rows in the order of mma.sync's first operand. K: 16 values of 16 bits, or 32 8-bit integers.
template <int N>
struct RegisterTile;
template <int N>
struct ByteTile;

#define AS_FOUR(c, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3])
#define AS_OPERANDS_4(c) AS_FOUR(c, 0)
#define AS_OPERANDS_8(c) AS_OPERANDS_4(c), AS_FOUR(c, 4)
#define AS_OPERANDS_16(c) AS_OPERANDS_8(c), AS_FOUR(c, 8), AS_FOUR(c, 12)
#define AS_OPERANDS_32(c) AS_OPERANDS_16(c), AS_FOUR(c, 16), AS_FOUR(c, 20), AS_FOUR(c, 24), AS_FOUR(c, 28)
#define AS_OPERANDS_64(c)                                                                                            \
  AS_OPERANDS_32(c), AS_FOUR(c, 32), AS_FOUR(c, 36), AS_FOUR(c, 40), AS_FOUR(c, 44), AS_FOUR(c, 48), AS_FOUR(c, 52), \
      AS_FOUR(c, 56), AS_FOUR(c, 60)
// letter: asm constraint of the sums. a0 ... adds: the operands' numbers, which follow the `count` sums.
#define AS_TILE(tile, sum, letter, n, types, tail, count, a0, a1, a2, a3, b, adds)                           \
  template <>                                                                                                \
  struct tile {                                                                                              \
    static __device__ void multiply(sum (&d)[count], const uint32_t (&left)[4], uint64_t right, int keeps) { \
      asm volatile("{ .reg .pred p;\nsetp.ne.b32 p, %" #adds                                                 \
                   ", 0;\n"                                                                                  \
                   "wgmma.mma_async.sync.aligned.m64n" #n types " {" AS_NAMES_##count                        \
                   "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b ", p" tail "; }"                      \
                   : AS_OPERANDS_##count(letter)                                                             \
                   : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right), "r"(keeps));        \
    }                                                                                                        \
  };
#define AS_TILES(n, count, ...)                                                                                \
  AS_TILE(RegisterTile<n>, float, "+f", n, "k16.f32." AS_DTYPE16_TEXT "." AS_DTYPE16_TEXT, ", 1, 1, 0", count, \
          __VA_ARGS__)                                                                                         \
  AS_TILE(ByteTile<n>, int, "+r", n, "k32.s32.s8.s8", "", count, __VA_ARGS__)
AS_TILES(8, 4, 4, 5, 6, 7, 8, 9)
AS_TILES(16, 8, 8, 9, 10, 11, 12, 13)
AS_TILES(32, 16, 16, 17, 18, 19, 20, 21)
AS_TILES(64, 32, 32, 33, 34, 35, 36, 37)
AS_TILES(128, 64, 64, 65, 66, 67, 68, 69)
#undef AS_TILES
#undef AS_TILE

// The same for e4m3, with both operands in shared memory.
template <int N>
struct Float8Tile;
#define AS_TILE(n, count, a, b, adds)                                                                               \
  template <>                                                                                                       \
  struct Float8Tile<n> {                                                                                            \
    static __device__ void multiply(float (&d)[count], uint64_t left, uint64_t right, int keeps) {                  \
      asm volatile("{ .reg .pred p;\nsetp.ne.b32 p, %" #adds                                                        \
                   ", 0;\n"                                                                                         \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" AS_NAMES_##count "}, %" #a ", %" #b \
                                                                                                 ", p, 1, 1; }"     \
                   : AS_SUMS_##count                                                                                \
                   : "l"(left), "l"(right), "r"(keeps));                                                            \
    }                                                                                                               \
  };
AS_TILE(8, 4, 4, 5, 6)
AS_TILE(16, 8, 8, 9, 10)
AS_TILE(32, 16, 16, 17, 18)
AS_TILE(64, 32, 32, 33, 34)
AS_TILE(80, 40, 40, 41, 42)
AS_TILE(96, 48, 48, 49, 50)
AS_TILE(112, 56, 56, 57, 58)
AS_TILE(128, 64, 64, 65, 66)
AS_TILE(144, 72, 72, 73, 74)
AS_TILE(160, 80, 80, 81, 82)
AS_TILE(192, 96, 96, 97, 98)
AS_TILE(224, 112, 112, 113, 114)
AS_TILE(256, 128, 128, 129, 130)
#undef AS_TILE

// The same for integers: signed 8-bit activations and unsigned quantized values, with both operands in shared memory.
// In QuantTile the quantized values are the first operand.
template <int N>
struct IntegerTile;
template <int N>
struct QuantTile;
#define AS_TILE(tile, types, n, count, a, b, adds)                                                                  \
  template <>                                                                                                       \
  struct tile<n> {                                                                                                  \
    static __device__ void multiply(int (&d)[count], uint64_t left, uint64_t right, int keeps) {                    \
      asm volatile("{ .reg .pred p;\nsetp.ne.b32 p, %" #adds                                                        \
                   ", 0;\n"                                                                                         \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k32.s32." types " {" AS_NAMES_##count "}, %" #a ", %" #b \
                                                                                                 ", p; }"           \
                   : AS_INTEGERS_##count                                                                            \
                   : "l"(left), "l"(right), "r"(keeps));                                                            \
    }                                                                                                               \
  };
#define AS_INTEGERS_4 AS_OPERANDS_4("+r")
#define AS_INTEGERS_8 AS_OPERANDS_8("+r")
#define AS_INTEGERS_16 AS_OPERANDS_16("+r")
#define AS_INTEGERS_32 AS_OPERANDS_32("+r")
#define AS_INTEGERS_64 AS_OPERANDS_64("+r")
#define AS_EIGHT_INTEGERS(i) AS_FOUR("+r", i), AS_FOUR("+r", i + 4)
#define AS_INTEGERS_72 AS_INTEGERS_64, AS_EIGHT_INTEGERS(64)
#define AS_INTEGERS_96 AS_INTEGERS_72, AS_EIGHT_INTEGERS(72), AS_EIGHT_INTEGERS(80), AS_EIGHT_INTEGERS(88)
#define AS_INTEGERS_112 AS_INTEGERS_96, AS_EIGHT_INTEGERS(96), AS_EIGHT_INTEGERS(104)
#define AS_INTEGERS_128 AS_INTEGERS_112, AS_EIGHT_INTEGERS(112), AS_EIGHT_INTEGERS(120)
AS_TILE(IntegerTile, "s8.u8", 128, 64, 64, 65, 66)
AS_TILE(IntegerTile, "s8.u8", 144, 72, 72, 73, 74)
AS_TILE(IntegerTile, "s8.u8", 192, 96, 96, 97, 98)
AS_TILE(IntegerTile, "s8.u8", 224, 112, 112, 113, 114)
AS_TILE(IntegerTile, "s8.u8", 256, 128, 128, 129, 130)
AS_TILE(QuantTile, "u8.s8", 8, 4, 4, 5, 6)
AS_TILE(QuantTile, "u8.s8", 16, 8, 8, 9, 10)
AS_TILE(QuantTile, "u8.s8", 32, 16, 16, 17, 18)
AS_TILE(QuantTile, "u8.s8", 64, 32, 32, 33, 34)
AS_TILE(QuantTile, "u8.s8", 128, 64, 64, 65, 66)
#undef AS_TILE

// Descriptor of rows of blocks of bytes (gemm_integer.h): 64-byte swizzle, 512 bytes from eight rows to the next.
__device__ inline uint64_t byte_descriptor(uint32_t address) {
  return (uint64_t)((address & 0x3ffff) >> 4) | 1ull << 16 | (uint64_t)(8 * kBlock >> 4) << 32 | 2ull << 62;
}
template <int kValues>
__device__ inline void settle(int (&d)[kValues]) {
#pragma unroll
  for (int i = 0; i < kValues; i++) asm volatile("" : "+r"(d[i])::"memory");
}
#endif

}  // namespace AS_DTYPE16
}  // namespace as::cuda
