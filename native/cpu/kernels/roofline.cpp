// The machine's roofline, which benchmarks report beside their figures: memory bandwidth and the multiply-add rate.
#include "cpu/kernels/kernels.h"
#include "cpu/kernels/tables.h"
#include "cpu/simd.h"

namespace as {
namespace AS_ISA {

// Reads n floats once, as four streams with every line prefetched: a single stream leaves some of a core's bandwidth
// unused (measured: 27 of 34 GB/s in small pages, 61 of 66 with two threads in huge ones). The sum only keeps the
// compiler from removing the loads.
float read_memory(const float* p, size_t n) {
  constexpr int kStreams = 4;
  const size_t each = n / kStreams;
  vf a[4] = {vzero(), vzero(), vzero(), vzero()};
  for (size_t i = 0; i + 4 * W <= each; i += 4 * W)
    for (int s = 0; s < kStreams; s++) {
      const float* q = p + s * each + i;
      for (size_t line = 0; line < 4 * W * sizeof(float); line += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(q) + 1024 + line);
      for (int j = 0; j < 4; j++) a[j] = vadd(a[j], vload(q + j * W));
    }
  return vsum(vadd(vadd(a[0], a[1]), vadd(a[2], a[3])));
}

// `rounds` x 12 independent fused multiply-adds in registers. Returns the number of floating-point operations.
double multiply_add(int64_t rounds, float* keep) {
  vf a[12];
  const vf b = vset(0.9999f), c = vset(0.0001f);
  for (int i = 0; i < 12; i++) a[i] = vset((float)i);
  for (int64_t r = 0; r < rounds; r++)
    for (int i = 0; i < 12; i++) a[i] = vfma(a[i], b, c);
  vf s = a[0];
  for (int i = 1; i < 12; i++) s = vadd(s, a[i]);
  *keep = vsum(s);
  return 2.0 * W * 12 * rounds;
}

}  // namespace AS_ISA
}  // namespace as
