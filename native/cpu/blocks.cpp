#include "cpu/blocks.h"

#include <cstring>
#include <stdexcept>

namespace as {
namespace {

constexpr BlockKind kQ4_0{32, 18, 4, 0, false}, kQ4_1{32, 20, 4, 0, false}, kQ8_0{32, 34, 8, 0, false},
    kQ4_K{256, 144, 4, 8, true}, kQ5_K{256, 176, 8, 8, true}, kQ6_K{256, 210, 8, 16, false};

// Of kBytes bytes the lower halves, then the upper ones, two in a byte.
template <int kBytes>
void pair_halves(const uint8_t* in, uint8_t* out) {
  for (int i = 0; i < kBytes / 2; i++) {
    uint16_t two;
    std::memcpy(&two, in + 2 * i, 2);
    out[i] = (uint8_t)((two & 15) | (two >> 4 & 0xf0));
    out[kBytes / 2 + i] = (uint8_t)((two >> 4 & 15) | (two >> 8 & 0xf0));
  }
}

// Eight scales and eight minimums of 6 bits.
void six_bits(const uint8_t* in, int8_t* scales, int8_t* minimums) {
  for (int i = 0; i < 4; i++) {
    scales[i] = in[i] & 63, minimums[i] = in[4 + i] & 63;
    scales[4 + i] = (int8_t)((in[8 + i] & 15) | in[i] >> 6 << 4);
    minimums[4 + i] = (int8_t)(in[8 + i] >> 4 | in[4 + i] >> 6 << 4);
  }
}

void q5_k(const uint8_t* fifth, const uint8_t* low, uint8_t* codes) {
  for (int part = 0; part < 4; part++, low += 32, codes += 64)
    for (int i = 0; i < 32; i++) {
      codes[i] = (uint8_t)((low[i] & 15) | (fifth[i] >> 2 * part & 1) << 4);
      codes[32 + i] = (uint8_t)(low[i] >> 4 | (fifth[i] >> (2 * part + 1) & 1) << 4);
    }
}

void q6_k(const uint8_t* low, const uint8_t* high, uint8_t* codes) {
  for (int part = 0; part < 2; part++, low += 64, high += 32, codes += 128)
    for (int i = 0; i < 32; i++) {
      codes[i] = (uint8_t)((low[i] & 15) | (high[i] & 3) << 4);
      codes[32 + i] = (uint8_t)((low[32 + i] & 15) | (high[i] >> 2 & 3) << 4);
      codes[64 + i] = (uint8_t)(low[i] >> 4 | (high[i] >> 4 & 3) << 4);
      codes[96 + i] = (uint8_t)(low[32 + i] >> 4 | high[i] >> 6 << 4);
    }
}

}  // namespace

const BlockKind& block_kind_of(const std::string& name) {
  if (name == "Q4_0") return kQ4_0;
  if (name == "Q4_1") return kQ4_1;
  if (name == "Q8_0") return kQ8_0;
  if (name == "Q4_K") return kQ4_K;
  if (name == "Q5_K") return kQ5_K;
  if (name == "Q6_K") return kQ6_K;
  throw std::invalid_argument("blocks of " + name + " are not unpacked here");
}

void unpack_blocks(const BlockKind& kind, const uint8_t* data, int64_t blocks, uint8_t* codes, int8_t* scales,
                   int8_t* minimums) {
  for (int64_t b = 0; b < blocks; b++, data += kind.bytes, codes += kind.values * kind.bits / 8) {
    if (&kind == &kQ4_0) pair_halves<16>(data + 2, codes);
    else if (&kind == &kQ4_1) pair_halves<16>(data + 4, codes);
    else if (&kind == &kQ8_0)
      for (int i = 0; i < 32; i++) codes[i] = data[2 + i] ^ 0x80;
    else if (&kind == &kQ6_K) q6_k(data, data + 128, codes), std::memcpy(scales, data + 192, 16);
    else {
      six_bits(data + 4, scales, minimums);
      if (&kind == &kQ5_K) q5_k(data + 16, data + 48, codes);
      else
        for (int i = 0; i < 4; i++) pair_halves<32>(data + 16 + 32 * i, codes + 32 * i);
    }
    if (kind.scales) scales += kind.scales;
    if (kind.minimums) minimums += kind.scales;
  }
}

}  // namespace as
