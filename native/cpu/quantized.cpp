#include "cpu/quantized.h"

#include <algorithm>
#include <vector>

#include "cpu/kernels/place.h"
#include "cpu/row_hash.h"

namespace as {
namespace {

// Tell a row's arrays apart.
constexpr uint64_t kHashOfZeros = 0xa24baed4963ee407, kHashOfSuperScales = 0x9fb21c651e98df25,
                   kHashOfSuperOffsets = 0xd6e8feb86659fd93;

// A panel of one row: a plain row but for its groups' heads.
Packed plain_row(const QuantizedRows& rows) {
  return layout(1, (int)rows.columns, Rules{1, false}, rows.bits == 8 ? Format::w8a8 : Format::w4a8, (int)rows.group);
}

// Lanes of eight 4-bit values, k and k + 4 in a byte (format.h), into pairs of neighbours.
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

// n values from k `first` of a stored row on, a byte each.
AS_INLINE void unpack(const uint8_t* row, int bits, int64_t first, int n, uint8_t* out) {
  if (bits == 8) {
    if (n == kPlacedK) std::memcpy(out, row + first, kPlacedK);  // of a length that is known: a move or four
    else std::memcpy(out, row + first, n);
    return;
  }
  int i = 0;
  if (first % 2 == 0) {
    const Byte16 order = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
    for (; i + 16 <= n; i += 16) {
      uint64_t pairs;
      std::memcpy(&pairs, row + (first + i) / 2, 8);
      const Byte16 both = (Byte16)Long2{pairs, 0}, values = mix(both & 15, both >> 4, order);
      std::memcpy(out + i, &values, 16);
    }
  }
  for (; i < n; i++) out[i] = row[(first + i) / 2] >> (first + i) % 2 * 4 & 15;
}

// The head's part of a row: of its group g, which begins with the stored column `column`.
void place_scales(const Packed& w, const StoredRows& stored, int64_t row, int64_t column, int panel, int g, int lane) {
  const int scale = w.scale_bytes(), zero = w.zero_bytes();
  const int64_t at = row * stored.groups() + column / stored.group;
  char* head = w.head(panel, g);
  std::memcpy(head + lane * scale, stored.scales + at * scale, scale);
  if (zero) std::memcpy(head + w.panel * scale + lane * zero, stored.zeros + at * zero, zero);
  if (!w.scaling.super_group) return;
  const int64_t above = row * stored.super_groups() + column / stored.super_group;
  uint16_t* super = w.super_scales(panel, g);
  super[lane] = stored.super_scales[above];
  super[w.panel + lane] = stored.super_offsets ? stored.super_offsets[above] : 0;
}

// As place(), of codes.
void place_codes(const Packed& w, const uint8_t (*q)[kPlacedK], int rows, int n, int k0, int lane, char* weights) {
  const int unit = w.unit();
  char* out = weights + (int64_t)(k0 / unit) * w.panel + lane;
  for (int i = 0; i < n; i += unit, out += w.panel)
    for (int r = 0; r < rows; r++) out[r] = (char)(unit == 2 ? q[r][i] | q[r][i + 1] << 4 : q[r][i]);
}

}  // namespace

StoredRows StoredRows::from(const Packed& m, int64_t row) const {
  StoredRows rows = *this;
  rows.q += row * row_bytes(), rows.scales += row * groups() * m.scale_bytes();
  if (zeros) rows.zeros += row * groups() * m.zero_bytes();
  if (super_scales) rows.super_scales += row * super_groups();
  if (super_offsets) rows.super_offsets += row * super_groups();
  return rows;
}

uint64_t StoredRows::hash(const Packed& m, int64_t row) const {
  const StoredRows one = from(m, row);
  uint64_t sum = row_hash(one.q, row_bytes(), row) + row_hash(one.scales, groups() * m.scale_bytes(), ~row);
  if (zeros) sum += fold(row_hash(one.zeros, groups() * m.zero_bytes(), row), kHashOfZeros);
  if (super_scales) sum += fold(row_hash(one.super_scales, 2 * super_groups(), row), kHashOfSuperScales);
  if (super_offsets) sum += fold(row_hash(one.super_offsets, 2 * super_groups(), row), kHashOfSuperOffsets);
  return sum;
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

void place_rows(const Packed& w, const StoredRows& stored, int64_t row_offset, int64_t column, int64_t r0, int64_t r1) {
  for (int64_t row = r0; row < r1;) {
    const int panel = (int)(row / w.panel), lane = (int)(row % w.panel);
    const int rows = (int)std::min<int64_t>({r1 - row, (int64_t)kPlacedRows, (int64_t)(w.panel - lane)});
    for (int g = 0, first = 0; g < w.groups(); first += w.group_k(g), g++) {
      for (int r = 0; r < rows; r++) place_scales(w, stored, row + r - row_offset, column + first, panel, g, lane + r);
      for (int k0 = 0; k0 < w.group_k(g); k0 += kPlacedK) {
        const int n = std::min(kPlacedK, w.group_k(g) - k0);
        alignas(64) uint8_t q[kPlacedRows][kPlacedK];
        for (int r = 0; r < rows; r++) {
          unpack(stored.q + (row + r - row_offset) * stored.row_bytes(), stored.bits, column + first + k0, n, q[r]);
          if (w.bias)
            for (int i = 0; i < n; i++) q[r][i] = (uint8_t)(q[r][i] + w.bias);
          if (n < kPlacedK) std::memset(q[r] + n, 0, kPlacedK - n);
        }
        if (is_coded(w.format)) place_codes(w, q, rows, n, k0, lane, w.weights(panel, g));
        else place(w, q, rows, n, k0, lane, w.weights(panel, g));
      }
    }
    row += rows;
  }
}

}  // namespace as
