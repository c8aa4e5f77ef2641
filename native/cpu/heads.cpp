#include "cpu/heads.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "cpu/blocks.h"
#include "cpu/pack.h"
#include "cpu/place_avx2.h"

namespace as {
namespace {

// Copies `rows` values of kBytes bytes each, one row after the other.
template <int kBytes>
AS_INLINE void gather(const char* from, int64_t stride, int rows, char* out) {
  if (stride == kBytes) std::memcpy(out, from, rows * kBytes);
  else if (stride == 0) {  // one value for all of them
    std::conditional_t<kBytes == 4, uint32_t, std::conditional_t<kBytes == 2, uint16_t, uint8_t>> value;
    std::memcpy(&value, from, kBytes);
    for (int r = 0; r < rows; r++) std::memcpy(out + r * kBytes, &value, kBytes);
  } else
    for (int r = 0; r < rows; r++) std::memcpy(out + r * kBytes, from + r * stride, kBytes);
}
void gather(const char* from, int64_t stride, int rows, int bytes, char* out) {
  if (bytes == 4) gather<4>(from, stride, rows, out);
  else if (bytes == 2) gather<2>(from, stride, rows, out);
  else gather<1>(from, stride, rows, out);
}

// gather() for e8m0, 2^(byte - 127), as float32 or bfloat16, whose bits begin with the exponent. 2^-127 is subnormal.
template <typename Bits>
AS_INLINE void gather_powers(const char* from, int64_t stride, int rows, char* out) {
  constexpr int kShift = 8 * sizeof(Bits) - 9;
  for (int r = 0; r < rows; r++) {
    const auto bits = (Bits)std::max((int32_t)(uint8_t)from[r * stride] << kShift, 1 << (kShift - 1));
    std::memcpy(out + r * sizeof bits, &bits, sizeof bits);
  }
}

// gather() for float16. Returns the number of NaN and infinite values. Eight at a time are collected in a register:
// what was written two bytes at a time would have to leave the store buffer before it could be read back for the test.
int gather_halves(const char* from, int64_t stride, int rows, char* out) {
  constexpr uint16_t kExponent = F16::kExponent;
  const auto half = [&](int r) {
    uint16_t x;
    std::memcpy(&x, from + r * stride, 2);
    return x;
  };
  pack::Half8 special{};
  int bad = 0, r = 0;
  for (; r + 8 <= rows; r += 8) {
    const pack::Half8 x = {half(r),     half(r + 1), half(r + 2), half(r + 3),
                           half(r + 4), half(r + 5), half(r + 6), half(r + 7)};
    std::memcpy(out + 2 * r, &x, sizeof x);
    special |= F16::special(x);
  }
  for (int i = r; i < rows; i++) {
    const uint16_t x = half(i);
    std::memcpy(out + 2 * i, &x, 2);
    bad += (x & kExponent) == kExponent;
  }
  uint64_t found[2];
  std::memcpy(found, &special, sizeof found);
  if (found[0] | found[1])  // rarely
    for (int i = 0; i < r; i++) bad += (half(i) & kExponent) == kExponent;
  return bad;
}

// Copies a byte of each row; rows that were written by eights are read by eights, see gather_halves().
AS_INLINE void copy_bytes(const int8_t* from, int rows, char* out) {
  int r = 0;
  for (; r + 8 <= rows; r += 8) std::memcpy(out + r, from + r, 8);
  if (r < rows) std::memcpy(out + r, from + r, rows - r);
}

// Transposes bytes `first` to first + 7 of eight rows into columns, from `lane` on.
AS_INLINE void transpose_bytes(const int8_t (&rows)[8][16], int first, int8_t (*out)[kMaxRows], int lane) {
  uint64_t x[8];
  for (int i = 0; i < 8; i++) std::memcpy(&x[i], rows[i] + first, 8);
  const auto exchange = [](uint64_t& a, uint64_t& b, int shift, uint64_t mask) {
    const uint64_t t = (a >> shift ^ b) & mask;
    b ^= t, a ^= t << shift;
  };
  for (int i = 0; i < 4; i++) exchange(x[i], x[i + 4], 32, 0x00000000ffffffff);
  for (int i = 0; i < 4; i++) exchange(x[i + i / 2 * 2], x[i + i / 2 * 2 + 2], 16, 0x0000ffff0000ffff);
  for (int i = 0; i < 4; i++) exchange(x[2 * i], x[2 * i + 1], 8, 0x00ff00ff00ff00ff);
  for (int i = 0; i < 8; i++) std::memcpy(out[i] + lane, &x[i], 8);
}

}  // namespace

void gather_powers(const char* from, int64_t stride, int rows, int bytes, char* out) {
  if (bytes == 2) gather_powers<uint16_t>(from, stride, rows, out);
  else if (stride != 1) gather_powers<uint32_t>(from, stride, rows, out);
  else gather_powers<uint32_t>(from, 1, rows, out);  // compiles to vectors
}

int Heads::place(int64_t row, int rows, int panel, int g, int lane) {
  const int scale = w_.scale_bytes(), zero = w_.zero_bytes();
  const int64_t first = (int64_t)g * w_.group, column = column_ + first, group = column / stored_.group;
  char *scales = w_.head(panel, g) + lane * scale, *zeros = w_.head(panel, g) + w_.panel * scale + lane * zero;
  const bool own = is_block(stored_.packing);
  int bad = 0;
  if (own && stored_.super_group) {
    const int64_t block = column / stored_.super_group, in_block = group - block * stored_.super_group / stored_.group;
    if (block != block_ || row != row_) {
      block_ = block, row_ = row;
      for (int r = 0; r < rows; r += 8) unpack_eight(row + r, std::min(8, rows - r), block, r);
    }
    copy_bytes(scales_[in_block], rows, scales);
    if (zero) copy_bytes(minimums_[in_block], rows, zeros);
  } else if (own) {
    bad = gather_halves(stored_.scales.at(row, group), stored_.scales.row, rows, scales);
    if (zero) bad += gather_halves(stored_.zeros.at(row, group), stored_.zeros.row, rows, zeros);
  } else {
    if (stored_.scale_type == ScaleType::e8m0) place_powers(row, rows, group, scale, scales);
    else if (stored_.scales.shared == 1) gather(stored_.scales.at(row, group), stored_.scales.row, rows, scale, scales);
    else
      for (int64_t r = 0, same; r < rows; r += same) {
        same = std::min<int64_t>(stored_.scales.alike(row + r), rows - r);
        gather(stored_.scales.at(row + r, group), 0, (int)same, scale, scales + r * scale);
      }
    if (zero) gather(stored_.zeros.at(row, group), stored_.zeros.row, rows, zero, zeros);
  }
  if (!w_.scaling.super_group || first % w_.scaling.super_group) return bad;
  const int64_t above = column / stored_.super_group;
  char* super = reinterpret_cast<char*>(w_.super_scales(panel, g) + lane);
  const int special = gather_halves(stored_.super_scales.at(row, above), stored_.super_scales.row, rows, super);
  if (own) bad += special;
  super += w_.panel * sizeof(uint16_t);
  if (!stored_.super_offsets.data) {
    std::memset(super, 0, rows * sizeof(uint16_t));
    return bad;
  }
  const int wrong = gather_halves(stored_.super_offsets.at(row, above), stored_.super_offsets.row, rows, super);
  if (own) {
    bad += wrong;
    for (int r = 0; r < rows; r++) super[2 * r + 1] = (char)(super[2 * r + 1] ^ 0x80);  // minimums are subtracted
  }
  return bad;
}

void Heads::place_powers(int64_t row, int rows, int64_t group, int bytes, char* out) {
  const int64_t block = group / 8, first = block * 8;
  if (rows % 8 || first + 8 > stored_.groups() || stored_.scales.step != 1)
    return gather_powers(stored_.scales.at(row, group), stored_.scales.row, rows, bytes, out);
  if (block != block_ || row != row_) {
    block_ = block, row_ = row;
    for (int r = 0; r < rows; r += 8) {
      int8_t eight[8][16];
      for (int i = 0; i < 8; i++) std::memcpy(eight[i], stored_.scales.at(row + r + i, first), 8);
      transpose_bytes(eight, 0, scales_, r);
    }
  }
  gather_powers(reinterpret_cast<const char*>(scales_[group - first]), 1, rows, bytes, out);
}

void Heads::unpack_eight(int64_t row, int rows, int64_t block, int lane) {
  if (rows == 8 && unpack_scales_of_eight(stored_, row, block, reinterpret_cast<int8_t*>(scales_) + lane,
                                          reinterpret_cast<int8_t*>(minimums_) + lane, kMaxRows))
    return;
  int8_t scales[8][16] = {}, minimums[8][16] = {};
  for (int r = 0; r < rows; r++)
    unpack_scales(stored_.packing, stored_.q + (row + r) * stored_.stride, block, scales[r], minimums[r]);
  for (int half = 0; half < 16; half += 8) {
    transpose_bytes(scales, half, scales_ + half, lane);
    if (!half && w_.zero_bytes()) transpose_bytes(minimums, 0, minimums_, lane);
    if (stored_.group * 8 == stored_.super_group) break;
  }
}

}  // namespace as
