// Four 32-bit words in a 16-byte register, by the compiler's vector extensions: the same code for every instruction
// set. (simd.h has vectors of an instruction set's own width.)
#pragma once
#include <cstdint>
#include <cstring>

#include "cpu/kernels/format.h"

namespace as {

typedef uint32_t Word4 __attribute__((vector_size(16)));

// Lanes I... of a and b, concatenated.
template <int... I, typename V>
AS_INLINE V shuffle(V a, V b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, I...);
#else
  return __builtin_shuffle(a, b, V{I...});
#endif
}

AS_INLINE Word4 interleave_low(Word4 a, Word4 b) { return shuffle<0, 4, 1, 5>(a, b); }
AS_INLINE Word4 interleave_high(Word4 a, Word4 b) { return shuffle<2, 6, 3, 7>(a, b); }

// Transposes four rows of four words into four columns, `stride` bytes apart.
AS_INLINE void transpose_words(Word4 r0, Word4 r1, Word4 r2, Word4 r3, void* target, int64_t stride) {
  const Word4 a = interleave_low(r0, r2), b = interleave_high(r0, r2);
  const Word4 c = interleave_low(r1, r3), d = interleave_high(r1, r3);
  const Word4 columns[4] = {interleave_low(a, c), interleave_high(a, c), interleave_low(b, d), interleave_high(b, d)};
  for (int i = 0; i < 4; i++) std::memcpy(static_cast<char*>(target) + i * stride, &columns[i], sizeof columns[i]);
}

}  // namespace as
