#include "cpu/quantized.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <vector>

#include "common/row_hash.h"
#include "cpu/blocks.h"
#include "cpu/kernels/place.h"
#include "cpu/pack.h"
#include "cpu/place_avx2.h"

namespace as {
namespace {

// Distinguish the hashes of a row's arrays.
constexpr uint64_t kHashOfZeros = 0xa24baed4963ee407, kHashOfSuperScales = 0x9fb21c651e98df25,
                   kHashOfSuperOffsets = 0xd6e8feb86659fd93;

// A panel of one row: a plain row, except for the groups' heads.
Packed plain_row(const QuantizedRows& rows) {
  return layout(1, (int)rows.columns, Rules{1, false}, rows.bits == 8 ? Format::w8a8 : Format::w4a8, (int)rows.group);
}

// Converts lanes of eight 4-bit values, with k and k + 4 in a byte (format.h), into pairs of neighbours.
void pair_neighbours(const char* lanes, int64_t bytes, uint8_t* out) {
  auto paired = [](uint32_t lane) {
    const uint32_t low = lane & 0x0f0f0f0f, high = lane >> 4 & 0x0f0f0f0f;
    const uint32_t first = (low | low >> 4) & 0x00ff00ff, second = (high | high >> 4) & 0x00ff00ff;
    return ((first | first >> 8) & 0xffff) | (second | second >> 8) << 16;
  };
  uint32_t lane;
  for (; bytes >= 4; bytes -= 4, lanes += 4, out += 4) {
    std::memcpy(&lane, lanes, 4);
    lane = paired(lane);
    std::memcpy(out, &lane, 4);
  }
  if (!bytes) return;
  std::memcpy(&lane, lanes, 4);
  lane = paired(lane);
  std::memcpy(out, &lane, bytes);
}

// Unpacks n 4-bit values of a row, from `first` on, to a byte each. swapped: the even value is in the upper half.
AS_INLINE void split_halves(const uint8_t* row, bool swapped, int64_t first, int n, uint8_t* out) {
  int i = 0;
  if (first % 2 == 0) {
    const Byte16 order = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
    for (; i + 16 <= n; i += 16) {
      uint64_t pairs;
      std::memcpy(&pairs, row + (first + i) / 2, 8);
      const Byte16 both = (Byte16)Long2{pairs, 0}, lower = both & 15, upper = both >> 4;
      const Byte16 values = swapped ? mix(upper, lower, order) : mix(lower, upper, order);
      std::memcpy(out + i, &values, 16);
    }
  }
  for (; i < n; i++) out[i] = row[(first + i) / 2] >> ((first + i) % 2 != swapped) * 4 & 15;
}

uint32_t word_at(const uint8_t* p) {
  uint32_t word;
  std::memcpy(&word, p, 4);
  return word;
}

// The position of each of eight rows in a word of octets.
constexpr int kOctetPlace[8] = {0, 4, 1, 5, 2, 6, 3, 7};

// Unpacks n <= kPlacedK quantized values of a row, from k on, to a byte each.
void codes_of_row(const StoredRows& s, int64_t row, int64_t k, int n, uint8_t* out) {
  if (is_transposed(s.packing)) {
    const bool words = s.packing == Packing::words;
    const int64_t in_word = words ? 32 / s.bits : 8, other = s.skipped + row;
    for (int i = 0; i < n; i++) {
      const uint8_t* from =
          words ? s.q + (k + i) / in_word * s.stride + row * 4 : s.q + (k + i) * s.stride + other / 8 * 4;
      const int at = words ? (int)((k + i) % in_word) * s.bits : kOctetPlace[other % 8] * 4;
      out[i] = (uint8_t)(word_at(from) >> at & ((1 << s.bits) - 1));
    }
    return;
  }
  const uint8_t* from = s.q + row * s.stride;
  if (is_block(s.packing)) {
    if (k % kUnpacked == 0 && n % kUnpacked == 0) {
      for (int i = 0; i < n; i += kUnpacked) unpack_block(s.packing, from, (k + i) / kUnpacked, out + i);
      return;
    }
    uint8_t some[kPlacedK + 2 * kUnpacked];
    const int64_t first = k / kUnpacked, last = (k + n - 1) / kUnpacked;
    for (int64_t i = first; i <= last; i++) unpack_block(s.packing, from, i, some + (i - first) * kUnpacked);
    std::memcpy(out, some + k % kUnpacked, n);
    return;
  }
  if (s.bits == 4) return split_halves(from, s.packing == Packing::swapped_rows, k, n, out);
  if (n == kPlacedK) std::memcpy(out, from + k, kPlacedK);  // the constant length compiles to few moves
  else std::memcpy(out, from + k, n);
  if (s.packing == Packing::signed_rows)
    for (int i = 0; i < n; i++) out[i] ^= 0x80;
}

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
void gather_powers(const char* from, int64_t stride, int rows, int bytes, char* out) {
  if (bytes == 2) gather_powers<uint16_t>(from, stride, rows, out);
  else if (stride != 1) gather_powers<uint32_t>(from, stride, rows, out);
  else gather_powers<uint32_t>(from, 1, rows, out);  // compiles to vectors
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

constexpr int kMaxRows = 64;  // of a panel

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

// Writes the heads (scales and offsets) of groups for rows of one panel.
class Heads {
 public:
  Heads(const Packed& w, const StoredRows& stored, int64_t column) : w_(w), stored_(stored), column_(column) {}

  // For group g of the panel: stored rows from `row` on go to its lanes from `lane` on. Returns the number of block
  // scales that are NaN or infinite.
  int place(int64_t row, int rows, int panel, int g, int lane) {
    const int scale = w_.scale_bytes(), zero = w_.zero_bytes();
    const int64_t first = (int64_t)g * w_.group, column = column_ + first, group = column / stored_.group;
    char *scales = w_.head(panel, g) + lane * scale, *zeros = w_.head(panel, g) + w_.panel * scale + lane * zero;
    const bool own = is_block(stored_.packing);
    int bad = 0;
    if (own && stored_.super_group) {
      const int64_t block = column / stored_.super_group,
                    in_block = group - block * stored_.super_group / stored_.group;
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
      else if (stored_.scales.shared == 1)
        gather(stored_.scales.at(row, group), stored_.scales.row, rows, scale, scales);
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

 private:
  // Places scales of e8m0. They are read and transposed for eight groups at once, if so many follow.
  void place_powers(int64_t row, int rows, int64_t group, int bytes, char* out) {
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
  // Unpacks the scales of a block of up to eight rows into lanes from `lane` on.
  void unpack_eight(int64_t row, int rows, int64_t block, int lane) {
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

  const Packed& w_;
  const StoredRows& stored_;
  const int64_t column_;
  int64_t block_ = -1, row_ = -1;  // the unpacked block; a group's scales are adjacent
  int8_t scales_[16][kMaxRows], minimums_[8][kMaxRows];
};

// place() for small floats. Returns the number of e4m3 NaN.
int place_small_floats(const Packed& w, const uint8_t (*q)[kPlacedK], int rows, int n, int k0, int lane,
                       char* weights) {
  const int unit = w.unit();
  int bad = 0;
  char* out = weights + (int64_t)(k0 / unit) * w.panel + lane;
  for (int i = 0; i < n; i += unit, out += w.panel)
    for (int r = 0; r < rows; r++) {
      out[r] = (char)(unit == 2 ? q[r][i] | q[r][i + 1] << 4 : q[r][i]);
      bad += unit == 1 && (q[r][i] & 0x7f) == 0x7f;
    }
  return bad;
}

// Moves values of `rows` <= kPlacedRows stored rows, from `row` on, into a panel from k0 of the matrix on. k0 starts a
// group or a chunk of kPlacedK. Returns the number of e4m3 NaN.
int place_values(const Packed& w, const StoredRows& stored, int64_t column, int64_t row, int rows, int panel, int lane,
                 int k0) {
  alignas(64) uint8_t q[kPlacedRows][kPlacedK];
  int bad = 0;
  for (int k = k0; k < w.k;) {
    // Several whole groups, or part of one.
    const int first = k / w.group, in_group = k - first * w.group;
    const int most =
        !in_group && w.group < kPlacedK ? kPlacedK / w.group * w.group : std::min(kPlacedK, w.group - in_group);
    const int n = std::min(most, w.k - k);
    for (int r = 0; r < rows; r++) {
      codes_of_row(stored, row + r, column + k, n, q[r]);
      if (w.bias)
        for (int i = 0; i < n; i++) q[r][i] = (uint8_t)(q[r][i] + w.bias);
      if (w.inverted())
        for (int i = 0; i < n; i++) q[r][i] ^= w.inverted();
      if (n < kPlacedK) std::memset(q[r] + n, 0, kPlacedK - n);
    }
    for (int at = 0, g = first; at < n; at += w.group, g++) {
      const int length = std::min(n - at, w.group);
      const auto* quantized = reinterpret_cast<const uint8_t(*)[kPlacedK]>(q[0] + at);
      if (is_small_float(w.format))
        bad += place_small_floats(w, quantized, rows, length, in_group, lane, w.weights(panel, g));
      else place(w, quantized, rows, length, in_group, lane, w.weights(panel, g));
    }
    k += n;
  }
  return bad;
}

// place_rows() for any packing.
int64_t place_any(const Packed& w, const StoredRows& stored, int64_t row_offset, int64_t column, int64_t r0,
                  int64_t r1) {
  int64_t bad = 0;
  Heads heads(w, stored, column);
  for (int64_t row = r0; row < r1;) {
    const int panel = (int)(row / w.panel), lane = (int)(row % w.panel);
    const int rows = (int)std::min<int64_t>(r1 - row, w.panel - lane), eights = rows / 8 * 8;
    const int64_t from = row - row_offset;
    for (int g = 0; g < w.groups(); g++) bad += heads.place(from, rows, panel, g, lane);
    const int k = place_eights(w, stored, column, from, eights, panel, lane, bad);
    for (int r = 0; r < rows; r += kPlacedRows) {
      const int some = std::min(kPlacedRows, rows - r), done = std::clamp(eights - r, 0, some);
      if (k < w.k && done) bad += place_values(w, stored, column, from + r, done, panel, lane + r, k);
      if (done < some) bad += place_values(w, stored, column, from + r + done, some - done, panel, lane + r + done, 0);
    }
    row += rows;
  }
  return bad;
}

// Whether the words are whole lanes of w.
bool fits_words(const Packed& w, const StoredRows& stored, int64_t column) {
  return stored.packing == Packing::words && w.planes && column % w.unit() == 0 && w.k % w.unit() == 0 &&
         w.group % w.unit() == 0 && !w.bias && !w.inverted();
}
bool fits_octets(const Packed& w, const StoredRows& stored, int64_t row_offset) {
  return stored.packing == Packing::octets && w.unit() == 8 && !w.inverted() && w.k % 8 == 0 && w.group % 8 == 0 &&
         w.panel % 8 == 0 && (stored.skipped - row_offset) % 8 == 0;
}

// Reorders words of eight k from sequential order into that of lanes (format.h).
AS_INLINE Word4 spread(Word4 x) {
  x = (x | x << 8) & 0x00ff00ff;
  return (x | x << 4) & 0x0f0f0f0f;
}
AS_INLINE Word4 lanes_of_words(Word4 x) { return spread(x & 0xffff) | spread(x >> 16) << 4; }

// Moves `rows` rows of `lanes` words to rows of lanes, which hold eight k each, or four.
void lay_words(const uint8_t* from, int64_t stride, int rows, int lanes, bool eights, char* to, int64_t to_stride) {
  const int done = place_words_of_eight(from, stride, rows, lanes, eights, to, to_stride);
  for (; done < lanes && rows > 0; rows--, from += stride, to += to_stride) {
    int l = done;
    for (; l + 4 <= lanes; l += 4) {
      Word4 x;
      std::memcpy(&x, from + l * 4, 16);
      if (eights) x = lanes_of_words(x);
      std::memcpy(to + l * 4, &x, 16);
    }
    for (; l < lanes; l++) {
      Word4 x = {word_at(from + l * 4)};
      if (eights) x = lanes_of_words(x);
      std::memcpy(to + l * 4, &x, 4);
    }
  }
}

// Hashes `count` values of `bytes` bytes each, `stride` bytes apart.
uint64_t hash_of(const char* data, int64_t stride, int64_t count, int bytes, uint64_t key) {
  if (stride == bytes) return row_hash(data, count * bytes, key);
  std::vector<char> values(count * bytes);
  for (int64_t i = 0; i < count; i++) std::memcpy(values.data() + i * bytes, data + i * stride, bytes);
  return row_hash(values.data(), values.size(), key);
}

// The hash of row i of a packing that is not transposed.
uint64_t hash_of_row(const Packed& m, const StoredRows& s, int64_t i) {
  const uint8_t* q = s.q + i * s.stride;
  if (is_block(s.packing)) {
    const BlockKind& kind = block_kind(s.packing);
    return row_hash(q, s.columns / kind.values * kind.bytes, i);
  }
  uint64_t sum = row_hash(q, s.row_bytes(), i);
  if (s.scale_type == ScaleType::e8m0) {  // as if they were stored in the matrix' type
    std::vector<char> scales(s.groups() * m.scale_bytes());
    gather_powers(s.scales.at(i, 0), s.scales.step, (int)s.groups(), m.scale_bytes(), scales.data());
    sum += row_hash(scales.data(), scales.size(), ~i);
  } else sum += hash_of(s.scales.at(i, 0), s.scales.step, s.groups(), m.scale_bytes(), ~i);
  if (s.zeros.data) sum += fold(hash_of(s.zeros.at(i, 0), s.zeros.step, s.groups(), m.zero_bytes(), i), kHashOfZeros);
  if (s.super_scales.data)
    sum += fold(hash_of(s.super_scales.at(i, 0), s.super_scales.step, s.super_groups(), 2, i), kHashOfSuperScales);
  if (s.super_offsets.data)
    sum += fold(hash_of(s.super_offsets.at(i, 0), s.super_offsets.step, s.super_groups(), 2, i), kHashOfSuperOffsets);
  return sum;
}

constexpr int64_t kLines = 8;  // that are placed after another

// Hashes blocks of transposed rows, some lines at a time. A line has one k of all rows, or the k of a word.
class HashedLines {
 public:
  // The blocks that begin with rows [first, last) of `count`.
  HashedLines(const StoredRows& s, int64_t count, int64_t first, int64_t last) : s_(s), count_(count) {
    const int64_t together = s.hashed_together();
    block_ = (first + together - 1) / together;
    sums_.resize(std::max<int64_t>(0, (last + together - 1) / together - block_));
  }
  // Lines [first, last), in this order.
  void add(int64_t first, int64_t last) {
    for (size_t i = 0; i < sums_.size(); i++) {
      const auto [row, rows] = rows_of(i);
      const bool words = s_.packing == Packing::words;
      const int64_t other = s_.skipped + row, begin = words ? row * 4 : other / 8 * 4,
                    end = words ? (row + rows) * 4 : (other + rows + 7) / 8 * 4;
      for (int64_t line = first; line < last; line++)
        sums_[i] += row_hash(s_.q + line * s_.stride + begin, end - begin, line, kLines * s_.stride);
    }
  }
  // The sum of the blocks' hashes, scales and zeros included.
  uint64_t end(const Packed& m, uint64_t key) {
    uint64_t all = 0;
    for (size_t i = 0; i < sums_.size(); i++) {
      const auto [row, rows] = rows_of(i);
      uint64_t sum = sums_[i];
      for (int64_t g = 0; g < s_.groups(); g++) {
        sum += hash_of(s_.scales.at(row, g), s_.scales.row, rows, m.scale_bytes(), ~g);
        if (s_.zeros.data)
          sum += fold(hash_of(s_.zeros.at(row, g), s_.zeros.row, rows, m.zero_bytes(), g), kHashOfZeros);
      }
      all += fold(sum, key + block_ + i);
    }
    return all;
  }

 private:
  std::pair<int64_t, int64_t> rows_of(size_t i) const {
    const int64_t first = (block_ + i) * s_.hashed_together();
    return {first, std::min(count_ - first, s_.hashed_together())};
  }

  const StoredRows& s_;
  int64_t count_, block_;
  std::vector<uint64_t> sums_;  // of lines
};

// place_rows() for words that are whole lanes, or octets. kLines lines are hashed and then placed: of all lines, those
// of one block that lie a multiple of 4 KB apart would fall out of the caches before they are placed.
Placed place_lines(const Packed& w, const StoredRows& stored, int64_t count, int64_t row_offset, int64_t column,
                   int64_t r0, int64_t r1, uint64_t key) {
  const bool words = stored.packing == Packing::words;
  const int unit = w.unit(), in_line = words ? unit : 1;  // k
  const int64_t lines = (stored.columns + in_line - 1) / in_line;
  // Rows that are only part of an octet are placed one by one.
  const int64_t whole0 = words ? r0 : std::min((r0 + 7) / 8 * 8, r1),
                whole1 = words ? r1 : std::max(whole0, r1 / 8 * 8);
  place_any(w, stored, row_offset, column, r0, whole0), place_any(w, stored, row_offset, column, whole1, r1);
  HashedLines hashes(stored, count, r0 - row_offset, r1 - row_offset);
  Heads heads(w, stored, column);
  std::vector<char*> to;  // of whole octets
  hashes.add(0, column / in_line);
  for (int g = 0; g < w.groups(); g++) {
    to.clear();
    for (int64_t row = whole0, next; row < whole1; row = next) {
      const int panel = (int)(row / w.panel);
      next = std::min(whole1, (int64_t)(panel + 1) * w.panel);
      heads.place(row - row_offset, (int)(next - row), panel, g, (int)(row % w.panel));
      for (int64_t octet = row; !words && octet < next; octet += 8)
        to.push_back(w.weights(panel, g) + octet % w.panel * 4);
    }
    const int64_t first = (column + (int64_t)g * w.group) / in_line, last = first + w.group_k(g) / in_line;
    for (int64_t line = first, next; line < last; line = next) {
      next = std::min(line + kLines, last);
      hashes.add(line, next);
      const uint8_t* from = stored.q + line * stored.stride;
      if (!words) {
        place_words_of_octets(from + (stored.skipped + whole0 - row_offset) / 8 * 4, stored.stride, (int)to.size(),
                              to.data());
        for (char*& octet : to) octet += (int64_t)w.panel * 4;
        continue;
      }
      for (int64_t row = r0, end; row < r1; row = end) {
        const int panel = (int)(row / w.panel), lane = (int)(row % w.panel);
        end = std::min(r1, (int64_t)(panel + 1) * w.panel);
        lay_words(from + (row - row_offset) * 4, stored.stride, (int)(next - line), (int)(end - row), unit == 8,
                  w.weights(panel, g) + ((line - first) * w.panel + lane) * 4, (int64_t)w.panel * 4);
      }
    }
  }
  hashes.add((column + w.k) / in_line, lines);
  return {0, hashes.end(w, key)};
}

}  // namespace

Packing packing_of(const std::string& name) {
  constexpr const char* kNames[] = {"rows", "signed", "swapped", "words", "octets", "Q4_0",
                                    "Q4_1", "Q8_0",   "Q4_K",    "Q5_K",  "Q6_K"};
  for (size_t i = 0; i < std::size(kNames); i++)
    if (name == kNames[i]) return (Packing)i;
  throw std::invalid_argument(
      "packing must be rows, signed, swapped, words, octets, Q4_0, Q4_1, Q8_0, Q4_K, Q5_K or "
      "Q6_K, got " +
      name);
}

StoredRows StoredRows::from(int64_t row) const {
  StoredRows rows = *this;
  if (packing == Packing::octets) rows.q += (skipped + row) / 8 * 4, rows.skipped = (int)((skipped + row) % 8);
  else rows.q += row * (packing == Packing::words ? 4 : stride);
  for (Strided* values : {&rows.scales, &rows.zeros, &rows.super_scales, &rows.super_offsets})
    if (values->data) values->advance(row);
  return rows;
}

int64_t quantize_rows(const Kernels& kernels, const SourceRows& source, const QuantizedRows& out, int64_t r0,
                      int64_t r1) {
  Packed row = plain_row(out);
  std::vector<char> memory(row.panel_bytes);
  row.data = memory.data();
  SourceRows one = source;
  one.row_offset = 0;
  const size_t item = source.type == SourceType::f32 ? 4 : 2;
  int64_t bad = 0;
  for (int64_t r = r0; r < r1; r++) {
    one.data = static_cast<const char*>(source.data) + (size_t)(r * source.stride) * item;
    bad += kernels.quantize(row, one, 0, 1);
    uint8_t* q = out.q + r * out.row_bytes();
    for (int g = 0; g < row.groups(); g++) {
      out.scales[r * out.groups() + g] = *row.scales(0, g), out.offsets[r * out.groups() + g] = *row.offsets(0, g);
      const int64_t first = g * out.group, length = row.group_k(g);
      if (out.bits == 8) std::memcpy(q + first, row.weights(0, g), length);
      else pair_neighbours(row.weights(0, g), (length + 1) / 2, q + first / 2);
    }
  }
  return bad;
}

Placed place_rows(const Packed& w, const StoredRows& stored, int64_t count, int64_t row_offset, int64_t column,
                  int64_t r0, int64_t r1, uint64_t key) {
  if (fits_words(w, stored, column) || fits_octets(w, stored, row_offset))
    return place_lines(w, stored, count, row_offset, column, r0, r1, key);
  Placed placed;
  if (is_transposed(stored.packing)) {
    HashedLines hashes(stored, count, r0 - row_offset, r1 - row_offset);
    const int64_t in_line = stored.packing == Packing::words ? 32 / stored.bits : 1;
    hashes.add(0, (stored.columns + in_line - 1) / in_line);
    placed.hash = hashes.end(w, key);
  } else {
    for (int64_t i = r0 - row_offset; i < r1 - row_offset; i++) placed.hash += fold(hash_of_row(w, stored, i), key + i);
  }
  placed.bad = place_any(w, stored, row_offset, column, r0, r1);
  return placed;
}

int64_t recover_row(const StoredRows& stored, int64_t row, int64_t column, int64_t k, float* out, uint16_t* rounded) {
  const uint8_t* q = stored.q + row * stored.stride + column;
  int64_t bad = 0;
  for (int64_t i = 0, next; i < k; i = next) {
    const int64_t group = (column + i) / stored.group;
    next = std::min(k, (group + 1) * stored.group - column);
    const char* at = stored.scales.at(row, group);
    float scale;
    if (stored.scale_type == ScaleType::float32) std::memcpy(&scale, at, 4);
    else {
      uint16_t bits;
      std::memcpy(&bits, at, 2);
      const uint32_t wide = stored.scale_type == ScaleType::float16 ? F16::widen(Word4{bits})[0] : (uint32_t)bits << 16;
      std::memcpy(&scale, &wide, 4);
    }
    bad += dequantize_e4m3(q + i, next - i, scale, out + i, rounded + i);
  }
  return bad;
}

void unpack_quantized(const StoredRows& stored, int64_t rows, uint8_t* out) {
  alignas(16) uint8_t q[kPlacedK];
  for (int64_t r = 0; r < rows; r++, out += stored.row_bytes())
    for (int64_t k = 0; k < stored.columns; k += kPlacedK) {
      const int n = (int)std::min<int64_t>(kPlacedK, stored.columns - k);
      codes_of_row(stored, r, k, n, stored.bits == 8 ? out + k : q);
      if (stored.bits == 8) continue;
      if (n % 2) q[n] = 0;
      for (int i = 0; i < n; i += 2) out[(k + i) / 2] = (uint8_t)(q[i] | q[i + 1] << 4);
    }
}

}  // namespace as
