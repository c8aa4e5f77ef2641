#include "cpu/quantized.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <vector>

#include "common/row_hash.h"
#include "cpu/blocks.h"
#include "cpu/heads.h"
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
  uint64_t sum = row_hash(s.q + i * s.stride, s.bytes(), i);
  if (is_block(s.packing)) return sum;
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

// Maps the pages of stored rows [first, last), so that they can be prefetched.
void touch_rows(const StoredRows& s, int64_t first, int64_t last) {
  constexpr int64_t kPage = 4096;
  if (first >= last) return;
  const uint8_t* end = s.q + (last - 1) * s.stride + s.bytes();
  for (const uint8_t* p = s.q + first * s.stride; p < end; p += kPage) (void)*static_cast<const volatile uint8_t*>(p);
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

int64_t StoredRows::bytes() const {
  return is_block(packing) ? columns / block_kind(packing).values * block_kind(packing).bytes : row_bytes();
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
    const int64_t first = r0 - row_offset, last = r1 - row_offset;
    for (int64_t i = first; i < last; i++) placed.hash += fold(hash_of_row(w, stored, i), key + i);
    if (!is_small_float(w.format)) touch_rows(stored, last, std::min(count, 2 * last - first));
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
