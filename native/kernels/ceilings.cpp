// What this machine can do at most, for benchmarks to measure beside their figures: reading memory, multiplying and adding.
#include "kernels.h"
#include "simd.h"
#include "tables.h"

namespace as {
namespace AS_ISA {

// Reads n floats once, front to back; the sum only keeps the loads alive.
float read_memory(const float* p, size_t n) {
  vf a[4] = {vzero(), vzero(), vzero(), vzero()};
  for (size_t i = 0; i + 4 * W <= n; i += 4 * W) {
    __builtin_prefetch(reinterpret_cast<const char*>(p + i) + 2048);
    for (int j = 0; j < 4; j++) a[j] = vadd(a[j], vload(p + i + j * W));
  }
  return vsum(vadd(vadd(a[0], a[1]), vadd(a[2], a[3])));
}

// `rounds` x 12 independent fused multiply-adds in registers; returns how many floating-point operations that were.
double multiply_add(long rounds, float* keep) {
  vf a[12];
  const vf b = vset(0.9999f), c = vset(0.0001f);
  for (int i = 0; i < 12; i++) a[i] = vset((float)i);
  for (long r = 0; r < rounds; r++)
    for (int i = 0; i < 12; i++) a[i] = vfma(a[i], b, c);
  vf s = a[0];
  for (int i = 1; i < 12; i++) s = vadd(s, a[i]);
  *keep = vsum(s);
  return 2.0 * W * 12 * rounds;
}

}  // namespace AS_ISA
}  // namespace as
