// Dequantization (layout: kernels/common/quantized.h).
#pragma once
#include <cuda_fp8.h>

#include "cuda/kernels/common/device.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {

// Rounds to nearest even; larger values become the largest, 448.
__device__ inline uint8_t to_e4m3(float x) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3); }
__device__ inline uint16_t two_e4m3(float low, float high) {
  return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
}
__device__ inline float from_e4m3(uint8_t quant) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(quant, __NV_E4M3)));
}
// The four values of a word.
__device__ inline float4 four_from_e4m3(uint32_t quants) {
  const float2 low = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(quants & 0xffff, __NV_E4M3))),
               high = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(quants >> 16, __NV_E4M3)));
  return make_float4(low.x, low.y, high.x, high.y);
}

// Quantization of a cache's values between `low` and `high`, as in the CPU backend (cpu/cache.cpp). bad: some values
// are NaN or infinite.
template <int kBits>
struct Levels {
  static constexpr int kMost = (1 << kBits) - 1;
  float low, step, inverse, half;
  bool bad, flat;

  __device__ Levels(float low, float high, bool bad) : low(low), bad(bad) {
    step = (float)(((double)high - low) / kMost);  // in double: the range may pass the largest float
    flat = bad || step < 1e-37f;                   // (nearly) equal values, whose inverse would overflow
    inverse = flat ? 0 : __fdiv_rn(2.0f, step), half = __fmul_rn(0.5f, low);
  }
  __device__ int quant(float x) const {
    return flat ? 0 : min(kMost, __float2int_rn(__fmul_rn(__fsub_rn(__fmul_rn(0.5f, x), half), inverse)));
  }
  __device__ float scale() const { return bad ? NAN : flat ? 0 : step; }
  __device__ float minimum() const { return bad ? NAN : low; }
};

// Dequantizes with the same bits as the CPU backend.
__device__ inline float recovered(uint32_t scales, int quant, int bits) {
  const float scale = __uint_as_float(scales << 16), offset = __uint_as_float(scales & 0xffff0000u);
  return __fadd_rn(__fmul_rn(scale, (float)(quant - (1 << (bits - 1)))), offset);
}
__device__ inline float e2m1_value(uint32_t value) {
  constexpr float kValues[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  return value & 8 ? -kValues[value & 7] : kValues[value & 7];
}
// Rounded to bfloat16, as in GEMMs.
__device__ inline float nf4_value(uint32_t value) {
  constexpr uint16_t kValues[16] = {0xbf80, 0xbf32, 0xbf06, 0xbeca, 0xbe92, 0xbe3d, 0xbdba, 0x0000,
                                    0x3da3, 0x3e25, 0x3e7c, 0x3ead, 0x3ee2, 0x3f10, 0x3f39, 0x3f80};
  return __uint_as_float((uint32_t)kValues[value] << 16);
}
// The value of a small float in 4 bits. scales: of both halves of its group.
__device__ inline float small_float(const Quants& c, uint32_t scales, int column, uint32_t value) {
  const bool second = c.codes == Codes::nvfp4 ? column / 16 % 2 : column / 32 % 2;
  const float scale = __uint_as_float(second ? scales & 0xffff0000u : scales << 16);
  return c.codes == Codes::nf4 ? __fmul_rn(nf4_value(value), scale)
                               : __fmul_rn(e2m1_value(value), __fmul_rn(scale, 1 / kMxLarger));
}
__device__ inline float value_of(const Quants& c, int row, int column, int k) {
  if (c.mx) {
    const uint32_t value = mx_value(column % 32 / 8, c.words[word_of(c, row, column, blocks_of(k))] >> column % 2 * 16);
    const int scale =
        reinterpret_cast<const uint8_t*>(c.words)[mx_tile(row, column, blocks_of(k)) + mx_scale(row, column)];
    return scalbnf(e2m1_value(value), scale - kMxBias - 127);
  }
  const uint32_t word = c.words[word_of(c, row, column, blocks_of(k))];
  if (c.floats)
    return __fmul_rn(__uint_as_float(c.scales[scale_of(row, column / c.group, c.groups)]),
                     from_e4m3(word >> bit_of(8, column) & 0xff));
  const uint32_t scales = c.scales[scale_of(row, column / c.group, c.groups)], value = value_in(c, column, word);
  return c.codes == Codes::integers ? recovered(scales, value, c.bits) : small_float(c, scales, column, value);
}

// A word as a pair of bfloat16 values.
__device__ __forceinline__ __nv_bfloat162 pair_of(uint32_t bits) {
  return reinterpret_cast<const __nv_bfloat162&>(bits);
}
__device__ __forceinline__ uint32_t bits_of(const __nv_bfloat162& pair) {
  return reinterpret_cast<const uint32_t&>(pair);
}
// word & mask | with, by one instruction
__device__ __forceinline__ uint32_t masked(uint32_t word, uint32_t mask, uint32_t with) {
  uint32_t y;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(y) : "r"(word), "r"(mask), "r"(with));
  return y;
}

// A row's scale and offset, each twice in a pair. Of small floats the scales of both halves of a group.
struct Affine {
  __nv_bfloat162 scale, offset;

  __device__ __forceinline__ void set(uint32_t scales) {
    scale = __low2bfloat162(pair_of(scales)), offset = __high2bfloat162(pair_of(scales));
  }
  // Dequantizes 4-bit values q in the lowest bits of each half of a word. As the lowest bits of the 7-bit fraction of
  // bfloat16 128, they read as 128 + q.
  __device__ __forceinline__ uint32_t low(uint32_t word) const {
    const __nv_bfloat162 above = pair_of(masked(word, 0x000f000fu, 0x43004300u));
    return bits_of(__hfma2(scale, __hsub2(above, __float2bfloat162_rn(136)), offset));
  }
  // Dequantizes values q in the lowest eight bits of bfloat16s that are zero otherwise. Such a bfloat16 is the number q
  // / 2^133, since exponents 0 and 1 have the same unit. Times 2^127, less two, it is (q - middle) / larger, exactly.
  // The product with the scale times `larger` is exact as well; that scale is finite wherever values are.
  __device__ __forceinline__ uint32_t tiny(uint32_t pair, float larger) const {
    const __nv_bfloat162 centred = __hfma2(pair_of(pair), pair_of(0x7f007f00u), __float2bfloat162_rn(-2));
    return bits_of(__hfma2(__hmul2(scale, __float2bfloat162_rn(larger)), centred, offset));
  }
};

// The two pairs of e2m1 values of 16 columns (`second`: the word's last 16) times their scale, which is stored 2^126
// times larger. A value's three lower bits, as the lowest exponent bits and the highest fraction bit of a bfloat16, are
// that value times 2^-126 (0.5 becomes a subnormal number, 0 stays 0), and the sign is a bfloat16's. So one
// multiplication makes the value; nothing is rounded if the scale has up to six significant bits. Bits are placed so
// that three of a word's four pairs come from it by a shift and a mask. Of the last one, whose bits lie apart, one
// multiplication makes three copies, of which no two meet, and each has some bits in place. Instructions of all units
// count alike here.
__device__ __forceinline__ void e2m1_pairs(uint32_t word, bool second, __nv_bfloat162 scale, uint32_t& low,
                                           uint32_t& high) {
  constexpr uint32_t kMask = 0x81c081c0u, kLastPair = 0x006c006cu, kPlaces = 1 << 0 | 1 << 5 | 1 << 10;
  const uint32_t first_pair = (second ? word << 6 : word) & kMask;
  const uint32_t other_pair = (second ? (word >> 8 & kLastPair) * kPlaces : word << 3) & kMask;
  low = bits_of(__hmul2(pair_of(first_pair), scale)), high = bits_of(__hmul2(pair_of(other_pair), scale));
}

// The same of NF4. Its table, rounded to bfloat16, is in eight registers: four bytes are looked up at a time.
__device__ __forceinline__ void nf4_pairs(uint32_t word, bool second, __nv_bfloat162 scale, uint32_t& low,
                                          uint32_t& high) {
  const uint32_t four = second ? word >> 16 : word;
  const uint32_t is_upper = __byte_perm(0xff00u, 0, four >> 3 & 0x1111);  // a byte for each value of at least 8
  const auto bytes = [&](uint32_t first, uint32_t second, uint32_t third, uint32_t fourth) {
    const uint32_t lower = __byte_perm(first, second, four), upper = __byte_perm(third, fourth, four);
    return (lower & ~is_upper) | (upper & is_upper);
  };
  const uint32_t lows = bytes(0xca063280u, 0x00ba3d92u, 0xad7c25a3u, 0x803910e2u),
                 highs = bytes(0xbebfbfbfu, 0x00bdbebeu, 0x3e3e3e3du, 0x3f3f3f3eu);
  low = bits_of(__hmul2(pair_of(__byte_perm(lows, highs, 0x5140)), scale));
  high = bits_of(__hmul2(pair_of(__byte_perm(lows, highs, 0x7362)), scale));
}

// A lane's quantized values of a tile of 16 rows x 64 columns, loaded 16 bytes at a time.
template <int kBits, Codes kCodes = Codes::integers>
struct LaneQuants {
  static constexpr int kLoads = kBits / 4;
  uint4 loaded[kLoads];

  // The 16 columns of step `step`, a compile-time constant, as mma.sync's first operand. rows: row lane / 4 and the row
  // eight further.
  __device__ __forceinline__ void fragment(int step, const Affine (&rows)[2], uint32_t (&a)[4]) const {
    const uint4& four = loaded[kBits == 4 ? 0 : step / 2];
    const bool last = kBits == 4 ? step / 2 : step % 2;
    const uint32_t words[2] = {last ? four.z : four.x, last ? four.w : four.y};
#pragma unroll
    for (int below = 0; below < 2; below++) {
      const Affine& row = rows[below];
      const __nv_bfloat162 scale = (kCodes == Codes::nvfp4 ? step % 2 : step / 2) ? row.offset : row.scale;
      if constexpr (is_e2m1(kCodes)) {
        e2m1_pairs(words[below], step % 2, scale, a[below], a[2 + below]);
      } else if constexpr (kCodes == Codes::nf4) {
        nf4_pairs(words[below], step % 2, scale, a[below], a[2 + below]);
      } else if constexpr (kBits == 4) {
        const uint32_t word = step % 2 ? words[below] >> 8 : words[below];
        a[below] = row.low(word), a[2 + below] = row.tiny(word & 0x00f000f0u, 4);
      } else {
        a[below] = row.tiny(__byte_perm(words[below], 0, 0x4140), 64);
        a[2 + below] = row.tiny(__byte_perm(words[below], 0, 0x4342), 64);
      }
    }
  }
};

// A lane's MXFP4 values of an expert's tile.
struct MxQuants {
  uint4 loaded;
  uint32_t scales;

  // A lane's offsets in a tile.
  static __device__ __forceinline__ int values_at() { return threadIdx.x % 32 * 16; }
  static __device__ __forceinline__ int scales_at() { return kTileRows * kBlock / 2 + threadIdx.x % 32 / 4 * 4; }
  __device__ __forceinline__ void load(const char* tile) {
    loaded = *reinterpret_cast<const uint4*>(tile + values_at());
    scales = *reinterpret_cast<const uint32_t*>(tile + scales_at());
  }
  // As LaneQuants::fragment().
  __device__ __forceinline__ void fragment(int step, uint32_t (&a)[4]) const {
    const uint32_t words[2] = {step / 2 ? loaded.z : loaded.x, step / 2 ? loaded.w : loaded.y};
    // The bytes of both rows become exponents of bfloat16.
    const __nv_bfloat162 both = pair_of((step / 2 ? scales >> 1 : scales << 7) & 0x7f807f80u);
#pragma unroll
    for (int below = 0; below < 2; below++) {
      const __nv_bfloat162 scale = below ? __high2bfloat162(both) : __low2bfloat162(both);
      e2m1_pairs(words[below], step % 2, scale, a[below], a[2 + below]);
    }
  }
};

// Zeros a fragment's 16 columns from `columns` on, which do not exist.
__device__ inline void cut_fragment(uint32_t (&a)[4], int columns) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int column = i / 2 * 8 + threadIdx.x % 4 * 2;
    if (column >= columns) a[i] = 0;
    else if (column + 1 >= columns) a[i] &= 0xffff;
  }
}

// Scales of weights: none for floats; of quantized values, those that change within 64 columns of K or only between
// blocks; those of MXFP4, which lie in its tiles.
enum class Scales { none, blocks, fine, mx };

// Weights of kBits bits.
template <int kBits_, Scales kScales_, Codes kCodes_ = Codes::integers>
struct WeightType {
  static constexpr int kBits = kBits_;
  static constexpr Scales kScales = kScales_;
  static constexpr bool kFine = kScales == Scales::fine;
  static constexpr Codes kCodes = kCodes_;
};

// Calls start() with the type of quantized integers, or with that of small floats.
template <typename Start>
void by_integers(const Quants& quants, const Start& start) {
  const bool fine = quants.fine();
  if (quants.bits == 4) fine ? start(WeightType<4, Scales::fine>()) : start(WeightType<4, Scales::blocks>());
  else fine ? start(WeightType<8, Scales::fine>()) : start(WeightType<8, Scales::blocks>());
}
template <typename Start>
void by_small_floats(const Quants& quants, const Start& start) {
  if (quants.codes == Codes::nvfp4) start(WeightType<4, Scales::fine, Codes::nvfp4>());
  else if (quants.codes == Codes::mxfp4) start(WeightType<4, Scales::blocks, Codes::mxfp4>());
  else start(WeightType<4, Scales::blocks, Codes::nf4>());
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
