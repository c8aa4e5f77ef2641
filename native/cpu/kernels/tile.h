// The register tile of the GEMMs: MR rows x NV vectors of accumulators. A panel has NR = NV * W features.
//
// Two FMA ports with latency 4 need 8 independent chains. Of AVX2's 16 registers, 12 are accumulators (4 x 3), 3 hold
// weights and 1 a broadcast. Of AVX-512's 32 registers, 24 are accumulators (12 x 2). Arm has 32 registers and loads
// two vectors a cycle besides its multiply-adds. 6 x 4 needs 10 loads for 24 multiply-adds, 12 x 2 would need 14. With
// 6 x 4, one row has four chains.
#pragma once
#include <algorithm>
#include <type_traits>

#include "cpu/isa.h"
#include "cpu/kernels/format.h"
#include "cpu/simd.h"

namespace as {
namespace AS_ISA {

#if defined(AS_ISA_AVX512)
constexpr int NV = 2, MR = 12;
#elif defined(AS_ISA_AVX2)
constexpr int NV = 3, MR = 4;
#else
constexpr int NV = 4, MR = 6;
#endif
constexpr int NR = NV * W;
constexpr int KC = 256;  // k of a block: KC x NR floats of weights fit or nearly fit the first-level cache
constexpr int MB = MR > 6 ? MR * 20 : MR * 40;  // rows of a block: MB x KC floats of x stay in the second level

// Rows of each block of m: as equal as whole tiles allow, because every block streams all weights again.
AS_INLINE int block_rows(int m) {
  const int blocks = (m + MB - 1) / MB;
  return std::min(MB, ((m + blocks - 1) / blocks + MR - 1) / MR * MR);
}

// Prefetches data that is needed in a few microseconds into the second-level cache. Prefetches into the first level
// occupy its miss buffers, and a core has too few for the latency of memory. (24 lines in 120 ns are 13 GB/s, measured
// on Zen 4 at any distance; into the second level, 29 GB/s from 8 KB ahead on.)
AS_INLINE void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }

// Prefetches a line of weights that are read once, ahead of w. With one or two rows, where memory is the bottleneck, it
// is `Far` bytes ahead, into the second level. With more rows, products would wait for the second level (4-bit weights
// at 8 rows ran at 0.8 of the speed), so the line comes from memory into the second level first and from there into the
// first. (Straight into the first it would have to be far ahead, which occupies the miss buffers, or it comes too late:
// 2 KB ahead are 70 ns of products with 8 rows.)
constexpr int kFarAhead = 8192, kNearAhead = 256;  // bytes
template <int Rows, int Far>
AS_INLINE void prefetch_weights(const void* w) {
  const char* at = static_cast<const char*>(w);
  if constexpr (Rows <= 2) prefetch_far(at + Far);
  else prefetch_far(at + kFarAhead), __builtin_prefetch(at + kNearAhead);
}
constexpr int kStreamAhead = 3072;  // bytes, for weights of 8 bits and more

// A single stream of weights leaves some of a Zen 3 core's bandwidth unused. So one row, for which memory is the
// bottleneck, is multiplied with several panels in turn there (isa.h: uses_streams()), each prefetched less far ahead.
// (One core: 12 GB/s with one stream, 16 with four, of 16 that can be read. With turns or distances twice as long it is
// 14 to 15.)
#ifdef AS_ISA_AVX2
constexpr int kStreams = 4;
#else
constexpr int kStreams = 1;  // slower with AVX-512 on Zen 5 and Emerald Rapids
#endif
constexpr int kStreamsAhead = 1024;  // bytes, of each

// Prefetches part `i` of `pieces` of the data at p: the next block of weights, gradually while this one is processed.
AS_INLINE void fetch_part(const void* p, size_t bytes, int i, int pieces) {
  const size_t share = (bytes / pieces + 64) / 64 * 64;
  const char* from = static_cast<const char*>(p) + i * share;
  for (size_t line = 0; line < share; line += 64) prefetch_far(from + line);
}

// Calls f(std::integral_constant<int, n>) for a run-time n in [1, N].
template <int N, typename F>
inline void with_constant(int n, F&& f) {
  if (n == N) return f(std::integral_constant<int, N>{});
  if constexpr (N > 1) with_constant<N - 1>(n, f);
}

// Calls f(number of streams as a constant, panel, apart) until all panels in [p0, p1) are done: a call takes `panel`
// and each `apart`-th after it.
template <typename F>
inline void for_streams(int p0, int p1, F&& f) {
  const int each = (p1 - p0) / kStreams, end = p0 + each;
  for (int p = p0; p < end; p++) f(std::integral_constant<int, kStreams>{}, p, each);
  const int rest = p0 + each * kStreams;
  if (rest < p1) with_constant<kStreams - 1>(p1 - rest, [&](auto streams) { f(streams, rest, 1); });
}

// Writes accumulators to memory in a fully unrolled loop. If one is indexed at run time, the compiler keeps all of them
// in memory, also in the multiplying loop. Later steps work on `out`.
template <int R, int N, typename V>
__attribute__((always_inline)) inline void spill(const V (&acc)[R][N], V* out) {
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int v = 0; v < N; v++) out[r * N + v] = acc[r][v];
}

}  // namespace AS_ISA
}  // namespace as
