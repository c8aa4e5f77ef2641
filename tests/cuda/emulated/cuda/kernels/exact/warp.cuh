// Instead of native/cuda/kernels/exact/warp.cuh.
#pragma once
#include "cuda/kernels/common/device.cuh"

#define __forceinline__
#define __grid_constant__

struct uint2 {
  uint32_t x, y;
};
struct float2 {
  float x, y;
};
struct int4 {
  int x, y, z, w;
};

template <typename T>
T __ldcg(const T* from) {
  return *from;
}
template <typename T>
T __ldg(const T* from) {
  return *from;
}
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline int __float2int_rn(float x) { return (int)std::rint(x); }
inline uint16_t __ushort_as_half(uint16_t bits) { return bits; }
inline float __half2float(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float size = exponent == 0    ? std::ldexp((float)fraction, -24)
                     : exponent == 31 ? (fraction ? NAN : INFINITY)
                                      : std::ldexp((float)(fraction + 1024), exponent - 25);
  return bits >> 15 ? -size : size;
}

namespace as {
namespace cuda {

// The operands of the rows and columns that a thread's four sums belong to, from the lanes that have them.
template <int kRegisters>
void multiply_bytes(int (&sums)[4], const uint32_t (&a)[2 * kRegisters], const uint32_t (&b)[kRegisters],
                    const int (&c)[4]) {
  int d[4] = {c[0], c[1], c[2], c[3]};
  const auto byte = [](uint32_t word, int i) { return (int)(int8_t)(word >> 8 * i); };
  const auto pair = [](uint32_t low, uint32_t high) { return (uint64_t)high << 32 | low; };
  const int lane = emulated::lane(), row = lane / 4, column = lane % 4 * 2;
  for (int t = 0; t < 4; t++)
    for (int i = 0; i < kRegisters; i++) {
      const uint64_t rows = emulated::block.exchange(pair(a[2 * i], a[2 * i + 1]), row * 4 + t);
      for (int j = 0; j < 2; j++) {
        const uint32_t own = emulated::block.exchange(b[i], (column + j) * 4 + t);
        for (int k = 0; k < 4; k++)
          d[j] += byte((uint32_t)rows, k) * byte(own, k), d[2 + j] += byte((uint32_t)(rows >> 32), k) * byte(own, k);
      }
    }
  std::copy_n(d, 4, sums);
}
inline void multiply_bytes(int (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const int (&c)[4]) {
  multiply_bytes<2>(d, a, b, c);
}
inline void multiply_bytes(int (&d)[4], const uint32_t (&a)[2], const uint32_t (&b)[1], const int (&c)[4]) {
  multiply_bytes<1>(d, a, b, c);
}
inline int kept(int x) { return x; }

inline void copy_16_to(void* to, const void* from) { std::memcpy(to, from, 16); }
inline void copy_4_to(void* to, const void* from) { std::memcpy(to, from, 4); }
inline void commit_copies() {}
template <int>
void wait_copies() {}

inline uint32_t bytes_of(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t both = (uint64_t)high << 32 | low;
  uint32_t found = 0;
  for (int i = 0; i < 4; i++) {
    const uint32_t byte = both >> 8 * (selector >> 4 * i & 7) & 255;
    found |= (selector >> (4 * i + 3) & 1 ? (byte >> 7 ? 255u : 0u) : byte) << 8 * i;
  }
  return found;
}

}  // namespace cuda
}  // namespace as
