// Lanes of a CPU's panels as operands of products of bytes: signed integers, in the order of the activations (exact.h).
#pragma once
#include "cuda/kernels/exact/arithmetic.cuh"

namespace as::cuda {

// Eight weights as two words of four bytes. words: two lanes of 8-bit weights, or one of 4-bit ones.
template <ExactFormat kFormat>
__device__ inline void unpack_eight(const uint32_t (&words)[exact_bits(kFormat) == 8 ? 2 : 1], uint32_t (&out)[2]) {
  if constexpr (exact_bits(kFormat) == 8) {
#pragma unroll
    for (int i = 0; i < 2; i++) out[i] = words[i] ^ 0x80808080u;
  } else if constexpr (kFormat == ExactFormat::e2m1) {
    // Codes are inverted: a nibble above 7 is positive, and its lower bits are 7 less the size's code. A table of the
    // sizes and one of their negatives are both looked up.
    const uint32_t w = words[0], sizes = w & 0x77777777u, left = w << 4;
    const uint32_t positive[2] = {bytes_of(left, w, 0xd9c8), bytes_of(left, w, 0xfbea)};
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint32_t selector = i ? sizes >> 16 : sizes;
      const uint32_t up = bytes_of(0x0406080cu, 0x00010203u, selector),
                     down = bytes_of(0xfcfaf8f4u, 0x00fffefdu, selector);
      out[i] = (up & positive[i]) | (down & ~positive[i]);
    }
  } else {
    // n - 8 for each n of 0 to 15, without borrows between bytes
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint32_t n = i ? words[0] >> 4 : words[0];
      out[i] = (((n & 0x0f0f0f0fu) | 0x80808080u) - 0x08080808u) ^ 0x80808080u;
    }
  }
}

// One row's part of a step: kStep / 4 columns of a thread's, those of lane % 4, as one or two words.
template <ExactFormat kFormat, int kStep>
struct Lanes {
  static constexpr bool kBytes = exact_bits(kFormat) == 8;
  static_assert(kStep == 32 || (kStep == 16 && kFormat == ExactFormat::e2m1));
  static constexpr int kWords = kBytes ? 2 : 1, kRegisters = kStep / 16;
  uint32_t words[kWords];

  // Bytes from a step's first lane of a row to the thread's words, of a step with `left` columns or more in its group.
  // Words behind the group are not read, but others in their place: their activations are zero.
  static __device__ void places(int t, int panel, int left, uint32_t (&out)[kWords]) {
    const int first = kBytes ? 2 * t : kStep == 16 ? t / 2 : t;
#pragma unroll
    for (int i = 0; i < kWords; i++) out[i] = (first + i) * (kBytes ? 4 : 8) < left ? (first + i) * panel * 4 : 0;
  }
  // From one step of a group to the next.
  static __device__ uint32_t step_bytes(int panel) { return kStep / (kBytes ? 4 : 8) * panel * 4; }
  // from: the row's first lane of the step.
  __device__ void load(const char* from, const uint32_t (&places)[kWords]) {
#pragma unroll
    for (int i = 0; i < kWords; i++) words[i] = __ldg(reinterpret_cast<const uint32_t*>(from + places[i]));
  }
  __device__ void unpack(int t, uint32_t (&out)[kRegisters]) const {
    uint32_t both[2];
    unpack_eight<kFormat>(words, both);
    if constexpr (kRegisters == 2) out[0] = both[0], out[1] = both[1];
    else out[0] = t % 2 ? both[1] : both[0];
  }
};

// Sums of a group's products as floats: fl(256 high + low), or fl(low) of one plane.
//
// A sum starts at the bits of a float whose last place is 1, or 256 for the high plane's. As long as it changes by less
// than 2^22, its bits are that float plus the sum, or plus 256 times the sum, and two subtractions recover it exactly.
// The last one rounds: (2^23 1.5 + low) + (256 high - 2^23 1.5). This takes half of the instructions of a conversion,
// and those have a quarter of the rate.
template <ExactFormat kFormat>
struct GroupSums {
  static constexpr int kPlanes = exact_planes(kFormat);
  static constexpr int kLowBits = 0x4b400000, kHighBits = 0x4f400000;  // 1.5 * 2^23, 1.5 * 2^31
  int starts[kPlanes][4];

  __device__ GroupSums() {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      starts[0][i] = kept(kPlanes == 2 ? kHighBits : kLowBits);
      if (kPlanes == 2) starts[kPlanes - 1][i] = kept(kLowBits);
    }
  }
  static __device__ float value(int high, int low) {
    const float last = __uint_as_float((uint32_t)low);
    if (kPlanes == 1) return __fsub_rn(last, 12582912.0f);
    return __fadd_rn(last, __fsub_rn(__uint_as_float((uint32_t)high), 3221225472.0f + 12582912.0f));
  }
  // Sums from zero, of any size up to 2^24.
  static __device__ float converted(int high, int low) {
    return kPlanes == 1 ? (float)low : __fmaf_rn(256.0f, (float)high, (float)low);
  }
};

}  // namespace as::cuda
