#include "cpu/blocks.h"

#include <cstring>

#include "cpu/kernels/place.h"

namespace as {
namespace {

constexpr BlockKind kKinds[] = {
    {32, 18, 4, 32, 0, -1, false}, {32, 20, 4, 32, 0, 2, false},  {32, 34, 8, 32, 0, -1, false},
    {256, 144, 4, 32, 0, 2, true}, {256, 176, 8, 32, 0, 2, true}, {256, 210, 8, 16, 208, -1, true},
};

typedef uint16_t Half8 __attribute__((vector_size(16)));

AS_INLINE Byte16 load(const uint8_t* p) {
  Byte16 x;
  std::memcpy(&x, p, 16);
  return x;
}
AS_INLINE void store(uint8_t* p, Byte16 x) { std::memcpy(p, &x, 16); }
// Shifts every byte down by `shift` and keeps the bits of `mask`.
AS_INLINE Byte16 bits_of(Byte16 x, int shift, uint8_t mask) { return (Byte16)((Half8)x >> (uint16_t)shift) & mask; }

// The lower halves of 16 bytes, then the upper ones.
AS_INLINE void halves(const uint8_t* in, uint8_t* out) {
  const Byte16 x = load(in);
  store(out, x & 15), store(out + 16, bits_of(x, 4, 15));
}

}  // namespace

const BlockKind& block_kind(Packing packing) { return kKinds[(int)packing - (int)Packing::q4_0]; }

void unpack_block(Packing packing, const uint8_t* row, int64_t i, uint8_t* out) {
  const BlockKind& kind = block_kind(packing);
  const int parts = kind.values / kUnpacked, part = (int)(i % parts);
  const uint8_t* block = row + i / parts * kind.bytes;
  switch (packing) {
    case Packing::q4_0:
      return halves(block + 2, out);
    case Packing::q4_1:
      return halves(block + 4, out);
    case Packing::q8_0:
      for (int b = 0; b < 32; b += 16) store(out + b, load(block + 2 + b) ^ 0x80);
      return;
    case Packing::q4_k:
      for (int b = 0; b < 32; b += 16) store(out + b, bits_of(load(block + 16 + part / 2 * 32 + b), part % 2 * 4, 15));
      return;
    case Packing::q5_k:
      for (int b = 0; b < 32; b += 16)
        store(out + b, bits_of(load(block + 48 + part / 2 * 32 + b), part % 2 * 4, 15) |
                           bits_of(load(block + 16 + b), part, 1) << 4);
      return;
    default:
      for (int b = 0; b < 32; b += 16)
        store(out + b, bits_of(load(block + part / 4 * 64 + part % 2 * 32 + b), part % 4 / 2 * 4, 15) |
                           bits_of(load(block + 128 + part / 4 * 32 + b), part % 4 * 2, 3) << 4);
  }
}

void unpack_scales(Packing packing, const uint8_t* row, int64_t b, int8_t* scales, int8_t* minimums) {
  const uint8_t* block = row + b * block_kind(packing).bytes;
  if (packing == Packing::q6_k) {
    std::memcpy(scales, block + 192, 16);
    return;
  }
  uint32_t first, second, third;  // eight scales and eight minimums of 6 bits
  std::memcpy(&first, block + 4, 4), std::memcpy(&second, block + 8, 4), std::memcpy(&third, block + 12, 4);
  const uint32_t all[4] = {first & 0x3f3f3f3f, (third & 0x0f0f0f0f) | (first >> 6 & 0x03030303) << 4,
                           second & 0x3f3f3f3f, (third >> 4 & 0x0f0f0f0f) | (second >> 6 & 0x03030303) << 4};
  std::memcpy(scales, all, 8), std::memcpy(minimums, all + 2, 8);
}

StoredRows block_rows(Packing packing, const uint8_t* data, int64_t stride, int64_t columns) {
  const BlockKind& kind = block_kind(packing);
  StoredRows rows;
  rows.bits = kind.bits, rows.columns = columns, rows.group = kind.group;
  rows.packing = packing, rows.q = data, rows.stride = stride;
  const auto half = [&](int at) {
    return at < 0 ? Strided{} : Strided{reinterpret_cast<const char*>(data) + at, stride, kind.bytes};
  };
  (kind.nested ? rows.super_scales : rows.scales) = half(kind.scale);
  (kind.nested ? rows.super_offsets : rows.zeros) = half(kind.offset);
  rows.super_group = kind.nested ? kind.values : 0;
  return rows;
}

}  // namespace as
