// What the exact kernels use of a warp, apart from C++: products of bytes, and copies to shared memory. (Tests have
// another version, for the CPU.)
#pragma once
#include "cuda/kernels/common/device.cuh"

namespace as::cuda {

// d [16, 8] = a [16, 32] b [8, 32]^T + c, integers; d may be c.
__device__ inline void multiply_bytes(int (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const int (&c)[4]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, "
      "%13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}
// The same with 16 columns.
__device__ inline void multiply_bytes(int (&d)[4], const uint32_t (&a)[2], const uint32_t (&b)[1], const int (&c)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %8, %9, %10};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b[0]), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}
// A number that the compiler keeps in registers, instead of writing it anew for each use.
__device__ inline int kept(int x) {
  int y;
  asm("mov.b32 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// Asynchronous copies of 16 and of 4 bytes.
__device__ inline void copy_16_to(void* to, const void* from) { copy_16(shared_address(to), from); }
__device__ inline void copy_4_to(void* to, const void* from) { copy_4(shared_address(to), from, true); }

// Four bytes of those of low (0 to 3) and high (4 to 7) by the selector's nibbles; with 8 added: their sign.
__device__ inline uint32_t bytes_of(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t found;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(found) : "r"(low), "r"(high), "r"(selector));
  return found;
}

}  // namespace as::cuda
