#include "cpu/weights.h"

#include <atomic>
#include <cerrno>
#include <map>
#include <stdexcept>
#include <string>

#include "common/row_hash.h"
#include "cpu/pack.h"
#include "program/weight_spec.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace as {

Format format_of(const std::string& name) {
  const std::map<std::string, Format> formats = {
      {"float32", Format::f32}, {"bfloat16", Format::bf16},  {"int8", Format::int8}, {"int4", Format::int4},
      {"w8a8", Format::w8a8},   {"w4a8", Format::w4a8},      {"e4m3", Format::e4m3}, {"nf4", Format::nf4},
      {"e2m1", Format::e2m1},   {"e2m1a16", Format::e2m1a16}};
  const auto found = formats.find(name);
  if (found == formats.end())
    throw std::invalid_argument(
        "dtype must be float32, bfloat16, int8, int4, w8a8, w4a8, e4m3, nf4, e2m1 or e2m1a16, got " + name);
  return found->second;
}

Packed packed_of(const Rules& rules, int out_features, int in_features, const std::string& dtype, int group_size,
                 const ScaleLayout& scaling, int gathered) {
  const Format format = format_of(dtype);
  check_matrix({out_features, in_features, dtype, group_size, scaling});
  const bool nested = scaling.super_group > 0;
  if (!scaling.is_default() &&
      (scaling.group_rows != 1 || scaling.permuted || (nested && scaling.scales != ScaleType::float16) ||
       (nested && (scaling.scale_bits != 8 || scaling.zeros == ZeroType::points)) ||
       scaling.scales == ScaleType::none || scaling.scales == ScaleType::e8m0 ||
       (is_coded(format) && scaling.zeros != ZeroType::none)))
    throw std::invalid_argument(
        "the CPU backend takes scales of float32, bfloat16 and float16 for each row and group, or float16 times 8 "
        "bits, and no offsets or zero points of small floats");
  if (is_coded(format) && scaling.is_default())
    throw std::invalid_argument("a matrix of " + dtype + " has no offsets: pass the layout of its scales");
  if (gathered < 0 || (gathered && (!is_quantized(format) || is_small_float(format))))
    throw std::invalid_argument("an order of columns needs a matrix of quantized integers");
  const Packed packed =
      layout(out_features, gathered ? gathered : in_features, rules, format, group_size, scaling, in_features);
  if (packed.planes && packed.group > kMaxIntegerK)
    throw std::invalid_argument("matrix of " + std::to_string(in_features) +
                                " input features: sums of 8-bit products are exact up to " +
                                std::to_string(kMaxIntegerK) + " in a group");
  return packed;
}

int64_t pack_floats(const Packed& m, const SourceRows& source, int64_t r0, int64_t r1) {
  const auto pack = [&](auto tag) {
    using S = decltype(tag);
    auto* s = static_cast<const typename S::Storage*>(source.data) + source.column;
    if (m.format == Format::f32)
      return pack_rows<S>(s, source.stride, m.k, source.row_offset, r0, r1, m.panel, (float*)m.data);
    return pack_rows<S>(s, source.stride, m.k, source.row_offset, r0, r1, m.panel, (uint16_t*)m.data, m.pairs);
  };
  if (source.type == SourceType::f32) return pack(F32{});
  return source.type == SourceType::f16 ? pack(F16{}) : pack(BF16{});
}

namespace {

// Gathers rows [r0, r1) of a source whose values are not adjacent (such as a transposed matrix) into `room`.
template <typename T>
SourceRows gathered(const SourceRows& source, int64_t r0, int64_t r1, std::vector<char>& room) {
  const int64_t columns = source.columns;
  room.resize((r1 - r0) * columns * sizeof(T));
  const T* from = static_cast<const T*>(source.data) + (r0 - source.row_offset) * source.stride;
  T* to = reinterpret_cast<T*>(room.data());
  for (int64_t k = 0; k < columns; k++, from += source.step)
    for (int64_t r = 0; r < r1 - r0; r++) to[r * columns + k] = from[r * source.stride];
  SourceRows rows = source;
  rows.data = room.data(), rows.stride = columns, rows.row_offset = r0, rows.step = 1;
  return rows;
}

}  // namespace

int Weights::add_matrix(int out_features, int in_features, const std::string& dtype, int group_size, int experts,
                        const ScaleLayout& scaling, std::vector<int> order) {
  if (experts < 1 || out_features % experts)
    throw std::invalid_argument("a matrix of " + std::to_string(out_features) + " rows is not a stack of " +
                                std::to_string(experts) + " experts");
  for (int from : order)
    if (from < -1 || from >= in_features)
      throw std::invalid_argument("order: there is no input feature " + std::to_string(from) + " of " +
                                  std::to_string(in_features));
  Packed packed =
      packed_of(k_.rules, out_features / experts, in_features, dtype, group_size, scaling, (int)order.size());
  packed.data = arena_.take(matrix_bytes(packed, experts), "weights");
  make_huge_pages();
  if (!order.empty()) packed.order = order.data();  // a move does not change this address
  weights_.push_back({packed, 0, {}, experts, std::move(order)});
  sizes_.push_back((double)matrix_bytes(packed, experts));
  return (int)weights_.size() - 1;
}

// Places the huge pages of shared memory that the latest matrix has entered. Unless /sys/kernel/mm says otherwise, the
// kernel makes them of private memory alone when they are touched, but of both when it is asked to. It may leave some
// out while other threads make theirs, and is asked again for these.
void Weights::make_huge_pages() {
  constexpr int kAttempts = 4;
  const size_t used = arena_.shared_bytes();
  if (used <= huge_bytes_) return;
  char* const begin = arena_.shared()->data() + huge_bytes_;
  const int64_t pages = (used - huge_bytes_ + kHugePage - 1) / kHugePage;
  std::atomic<size_t> small{0};
  pool_.run([&](int thread) {
    const auto [first, end] = part(pages, thread, pool_.size());
    if (first == end) return;
    for (int64_t i = first; i < end; i++) *const_cast<volatile char*>(begin + i * kHugePage) = 0;  // on this node
    const size_t bytes = (end - first) * kHugePage;
    int left = kAttempts;
    while (left && madvise(begin + first * kHugePage, bytes, MADV_COLLAPSE)) left = errno == EINVAL ? 0 : left - 1;
    if (!left) small += bytes;
  });
  huge_bytes_ += pages * kHugePage, small_bytes_ += small;
}

bool shares_huge_pages() {
  const SharedBlock block(SharedBlock::Untouched{}, kHugePage, "a test");
  *const_cast<volatile char*>(block.data()) = 0;
  return !madvise(block.data(), kHugePage, MADV_COLLAPSE);
}

// Checks that rows [row_offset, row_offset + rows) of the matrix can be columns [column, column + k) of rows of
// `columns` values in groups of `group`, and returns the matrix.
const Packed& Weights::checked_part(int id, int64_t rows, int64_t row_offset, int64_t column, int64_t columns,
                                    int64_t group) const {
  const Packed& m = matrix(id);
  const int64_t n = (int64_t)m.n * experts(id);
  if (rows < 0 || row_offset < 0 || row_offset + rows > n || column < 0 || column + m.k > columns)
    throw std::invalid_argument("rows " + std::to_string(row_offset) + "..." + std::to_string(row_offset + rows) +
                                " of columns " + std::to_string(column) + "... of " + std::to_string(columns) +
                                " do not fit a matrix of " + std::to_string(n) + " x " + std::to_string(m.k));
  if (is_quantized(m.format))
    for (int64_t g = 0, first = column; g < m.groups(); first += m.group_k(g), g++)
      if (group < 1 || first / group != (first + m.group_k(g) - 1) / group)
        throw std::invalid_argument("groups of " + std::to_string(m.group) + " from column " + std::to_string(column) +
                                    " on are not parts of groups of " + std::to_string(group));
  return m;
}

void Weights::check_quantized(int id, const StoredRows& source, int64_t rows, int64_t row_offset,
                              int64_t column) const {
  const Packed& m = checked_part(id, rows, row_offset, column, source.columns, source.group);
  if (!is_quantized(m.format)) {
    if (source.bits == 8 && source.packing == Packing::rows && !source.zeros.data && !source.super_group) return;
    throw std::invalid_argument("a matrix of floats takes plain rows of e4m3 without zeros and nested scales");
  }
  if (bits_of(m.format) != source.bits)
    throw std::invalid_argument("values of " + std::to_string(source.bits) + " bits do not fit a matrix of " +
                                std::to_string(bits_of(m.format)));
  const bool offsets = m.scaling.zeros == ZeroType::offsets, nested = m.scaling.super_group > 0,
             in_blocks = is_block(source.packing) && source.super_group;  // the offsets have the scales' type
  const bool zeros = in_blocks ? source.super_offsets.data : source.zeros.data;
  if (zeros != (m.zero_bytes() > 0) || (source.super_scales.data != nullptr) != nested ||
      (source.super_offsets.data != nullptr) != (nested && offsets))
    throw std::invalid_argument("scales, zeros and super-groups' scales must be those of the matrix' layout");
  if (nested && (source.super_group % m.scaling.super_group || column % m.scaling.super_group))
    throw std::invalid_argument("super-groups of " + std::to_string(m.scaling.super_group) + " from column " +
                                std::to_string(column) + " on are not parts of super-groups of " +
                                std::to_string(source.super_group));
}

std::vector<int64_t> Weights::fill_quantized(int id, const std::vector<StoredRows>& sources,
                                             const std::vector<int64_t>& rows, int64_t row_offset, int64_t column) {
  struct Piece {  // rows of one matrix
    Packed m;
    StoredRows from;
    int64_t rows, offset, before, panels;  // offset: in the matrix; before: rows and panels of the stack before it
    uint64_t key;                          // of the first row's hash
    size_t source;
  };
  const int64_t n = matrix(id).n, panels = matrix(id).panels();
  std::vector<Piece> pieces;
  int64_t first = INT64_MAX, last = 0;
  for (size_t i = 0; i < sources.size(); row_offset += rows[i++]) {
    check_quantized(id, sources[i], rows[i], row_offset, column);
    each_expert(id, rows[i], row_offset, [&](const Packed& m, int64_t count, int64_t offset, int64_t done) {
      const int64_t expert = (row_offset + done) / n;
      pieces.push_back({m, sources[i].from(done), count, offset, expert * n, expert * panels,
                        (uint64_t)(row_offset + done + offset), i});
      first = std::min(first, expert * panels + offset / m.panel);
      last = std::max(last, expert * panels + (offset + count + m.panel - 1) / m.panel);
    });
  }
  first = std::min(first, last);
  std::vector<std::atomic<int64_t>> bad(sources.size());
  std::atomic<uint64_t> hash{0};
  pool_.run([&](int thread) {
    const auto [part0, part1] = part(last - first, thread, pool_.size());
    uint64_t sum = 0;
    std::vector<float> room;
    std::vector<uint16_t> rounded;
    for (const Piece& p : pieces) {
      const int64_t panel = p.m.panel, end_of_piece = p.offset + p.rows,
                    begin = std::max(p.offset, (first + part0 - p.panels) * panel),
                    end = std::min(end_of_piece, (first + part1 - p.panels) * panel),
                    together = p.from.hashed_together();
      // One panel at a time, or as many rows as are hashed together: hashing brings them into the cache.
      for (int64_t r0 = begin, r1; r0 < end; r0 = r1) {
        const int64_t next = p.offset + ((r0 - p.offset) / together + 1) * together;
        r1 = std::min(end, (next + panel - 1) / panel * panel);
        if (is_quantized(p.m.format)) {
          const Placed placed = place_rows(p.m, p.from, p.rows, p.offset, column, r0, r1, p.key);
          bad[p.source] += placed.bad, sum += placed.hash;
          continue;
        }
        // The stride of rows is no multiple of 4 KB: packing reads a column of them.
        const int64_t k = p.m.k, stride = k + 32;
        room.resize((r1 - r0) * stride), rounded.resize((r1 - r0) * stride);
        for (int64_t r = r0, at = 0; r < r1; r++, at += stride) {
          bad[p.source] += recover_row(p.from, r - p.offset, column, k, room.data() + at, rounded.data() + at);
          sum +=
              row_hash(room.data() + at, k * sizeof(float), p.before + r);  // as fill_matrix() does with these floats
        }
        if (p.m.format == Format::f32) pack_floats(p.m, {room.data(), SourceType::f32, stride, r0, 0, k, k}, r0, r1);
        else pack_floats(p.m, {rounded.data(), SourceType::bf16, stride, r0, 0, k, k}, r0, r1);
      }
    }
    hash += sum;
  });
  weights_[id].source_hash += hash;
  return {bad.begin(), bad.end()};
}

int64_t Weights::quantize(const SourceRows& source, const QuantizedRows& out, int64_t rows) const {
  std::atomic<int64_t> bad{0};
  pool_.run([&](int thread) {
    const auto [r0, r1] = part(rows, thread, pool_.size());
    pool_.guard([&, r0 = r0, r1 = r1] { bad += quantize_rows(k_, source, out, r0, r1); });
  });
  return bad;
}

std::vector<int64_t> Weights::fill_matrix(int id, const std::vector<SourceRows>& sources,
                                          const std::vector<int64_t>& rows) {
  struct Piece {  // rows of one matrix
    Packed m;
    SourceRows from;
    int64_t rows, before, panels;  // rows and panels of the stack before this matrix
    size_t source;
  };
  const int64_t n = matrix(id).n, panels = matrix(id).panels();
  if (is_quantized(matrix(id).format) && !matrix(id).plain_scales)
    throw std::invalid_argument("a matrix with another layout of its scales than InstantQuant's takes quantized rows");
  std::vector<Piece> pieces;
  for (size_t i = 0; i < sources.size(); i++) {
    const SourceRows& source = sources[i];
    checked_part(id, rows[i], source.row_offset, source.column, source.columns, source.group);
    const size_t item = source.type == SourceType::f32 ? 4 : 2;
    each_expert(id, rows[i], source.row_offset, [&](const Packed& m, int64_t count, int64_t offset, int64_t done) {
      const int64_t expert = (source.row_offset + done) / n;
      SourceRows from = source;
      from.data = static_cast<const char*>(source.data) + done * source.stride * item, from.row_offset = offset;
      pieces.push_back({m, from, count, expert * n, expert * panels, i});
    });
  }
  std::vector<std::atomic<int64_t>> bad(sources.size());
  std::atomic<uint64_t> hash{0};
  int64_t first = pieces.empty() ? 0 : INT64_MAX, last = 0;
  for (const Piece& p : pieces) {
    first = std::min(first, p.panels + p.from.row_offset / p.m.panel);
    last = std::max(last, p.panels + (p.from.row_offset + p.rows + p.m.panel - 1) / p.m.panel);
  }
  pool_.run([&](int thread) {
    const auto [part0, part1] =
        part(last - first, thread, pool_.size());  // whole panels, so that no two threads write the same cache line
    uint64_t sum = 0;
    std::vector<char> room;
    for (const Piece& p : pieces) {
      const int64_t row_offset = p.from.row_offset, end = row_offset + p.rows;
      const int64_t p0 = std::max(first + part0 - p.panels, row_offset / p.m.panel),
                    p1 = std::min(first + part1 - p.panels, (end + p.m.panel - 1) / p.m.panel);
      const size_t item = p.from.type == SourceType::f32 ? 4 : 2;
      for (int64_t panel = p0; panel < p1; panel++) {
        const int64_t r0 = std::max(row_offset, panel * p.m.panel), r1 = std::min(end, (panel + 1) * p.m.panel);
        SourceRows from = p.from;
        if (from.step != 1)
          from = item == 4 ? gathered<float>(from, r0, r1, room) : gathered<uint16_t>(from, r0, r1, room);
        const char* row =
            static_cast<const char*>(from.data) + ((r0 - from.row_offset) * from.stride + from.column) * item;
        for (int64_t r = r0; r < r1; r++, row += from.stride * item)
          sum += row_hash(row, p.m.k * item, p.before + r);  // brings the panel into the cache
        bad[p.source] += fill_rows(p.m, from, r0, r1);
      }
    }
    hash += sum;
  });
  weights_[id].source_hash += hash;
  return {bad.begin(), bad.end()};
}

// Rows [r0, r1) of a matrix, all in one panel.
int64_t Weights::fill_rows(const Packed& m, const SourceRows& source, int64_t r0, int64_t r1) const {
  return is_quantized(m.format) ? k_.quantize(m, source, r0, r1) : pack_floats(m, source, r0, r1);
}

int Weights::add_vector(std::vector<float> values) {
  sizes_.push_back((double)values.size() * sizeof(float));
  weights_.push_back({{}, 0, std::move(values), 1});
  return (int)weights_.size() - 1;
}

int Weights::share_matrix(const Weights& other, int id) {
  weights_.push_back({other.matrix(id), other.weights_[id].source_hash, {}, other.experts(id), {}, true});
  sizes_.push_back(other.sizes_[id]);
  return (int)weights_.size() - 1;
}

void Weights::read_row(int id, int64_t row, float* out) const {
  const int64_t n = matrix(id).n, all = n * experts(id);
  if (row < 0 || row >= all)
    throw std::invalid_argument("row " + std::to_string(row) + " is not in 0..." + std::to_string(all - 1));
  k_.read_row(matrix(id, (int)(row / n)), row % n, out);
}

const Packed& Weights::matrix(int id) const {
  const Packed& m = weights_.at(id).packed;
  if (!m.k) throw std::invalid_argument("weight " + std::to_string(id) + " is a vector, not a matrix");
  return m;
}

Packed Weights::matrix(int id, int expert) const {
  Packed m = matrix(id);
  m.data += (size_t)expert * m.panels() * m.panel_bytes;
  return m;
}

const std::vector<float>& Weights::vector(int id) const {
  const Weight& w = weights_.at(id);
  if (w.packed.k) throw std::invalid_argument("weight " + std::to_string(id) + " is a matrix, not a vector");
  return w.values;
}

size_t Weights::bytes() const {
  size_t total = 0;
  for (size_t i = 0; i < sizes_.size(); i++)
    if (!weights_[i].shared) total += (size_t)sizes_[i];
  return total;
}

std::vector<std::pair<const void*, size_t>> Weights::memory() const {
  std::vector<std::pair<const void*, size_t>> all;
  for (const Weight& w : weights_)
    if (w.packed.k && !w.shared) all.emplace_back(w.packed.data, matrix_bytes(w.packed, w.experts));
  return all;
}

}  // namespace as
