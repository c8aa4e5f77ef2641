#include "cuda/weights/weights.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "common/bf16.h"
#include "common/row_hash.h"
#include "cuda/kernels/common/roofline.h"
#include "cuda/memory/host_threads.h"
#include "cuda/weights/dtype16.h"

namespace as::cuda {
namespace {

constexpr size_t kStagingBytes = 32 << 20;  // an upper bound; small matrices take less
constexpr size_t kCopyAlign = 4096;         // alignment in the host copy

size_t size_of(SourceType source) { return source == SourceType::f32 ? 4 : 2; }

constexpr int64_t kRowsTogether =
    64;  // rows staged at a time: a column of a transposed tensor is then a few cache lines

// Rows from `begin` on of a transposed tensor become rows of `columns` adjacent values, from column `first` on.
template <typename T>
void gather(const HostRows& r, int64_t begin, int64_t rows, int64_t first, int64_t columns, T* to) {
  const T* from = static_cast<const T*>(r.data) + begin * r.stride + first * r.step;
  for (int64_t k = 0; k < columns; k++, from += r.step)
    for (int64_t row = 0; row < rows; row++) to[row * columns + k] = from[row * r.stride];
}

// Copies rows into a staging buffer.
void stage(const HostRows& r, int64_t begin, int64_t rows, int64_t first, int64_t columns, char* to) {
  const size_t item = size_of(r.source), bytes = columns * item;
  if (r.step == 1)
    for (int64_t row = begin; row < begin + rows; row++, to += bytes)
      std::memcpy(to, static_cast<const char*>(r.data) + (row * r.stride + first) * item, bytes);
  else if (item == 4) gather(r, begin, rows, first, columns, reinterpret_cast<uint32_t*>(to));
  else gather(r, begin, rows, first, columns, reinterpret_cast<uint16_t*>(to));
}

}  // namespace

Matrix matrix_of(int rows, int k, const std::string& format, int group, int experts) {
  if (rows < 1 || k < 1)
    throw std::invalid_argument("matrix of " + std::to_string(rows) + " x " + std::to_string(k) +
                                ": both must be positive");
  if (experts < 1 || rows % experts)
    throw std::invalid_argument("a matrix of " + std::to_string(rows) + " rows is no stack of " +
                                std::to_string(experts) + " experts");
  Matrix m{rows / experts, k};
  m.experts = experts;
  if (format == "float32") return m;
  if (format == "bfloat16" || format == "float16") {
    m.kind = Kind::dtype16, m.dtype = dtype16_of(format), m.max_split_k = max_split_k(m.n);
    return m;
  }
  const bool floats = format == "float8", integers = format == "w8a8" || format == "w4a8",
             eight = format == "int8" || format == "w8a8" || floats, mx = format == "mxfp4",
             small = format == "e2m1" || format == "nf4";
  if (!integers && !eight && !mx && !small && format != "int4")
    throw std::invalid_argument("weights of type " + format +
                                " are not available on CUDA yet: float32, bfloat16, float16, int8, int4, w8a8, w4a8, "
                                "float8, mxfp4, e2m1 and nf4 are");
  if (mx) {
    if (group != kMxGroup || k % kMxGroup)
      throw std::invalid_argument("weights of type mxfp4 have groups of 32 columns: got groups of " +
                                  std::to_string(group) + " and rows of " + std::to_string(k) + " columns");
    m.kind = Kind::mxfp4;
    m.quants.bits = 4, m.quants.mx = true, m.quants.group = kMxGroup, m.quants.groups = k / kMxGroup;
    return m;
  }
  if (small) {
    const bool e2m1 = format == "e2m1";
    if (experts > 1 || (e2m1 ? group != 16 && group != kMxGroup : group < kBlock || group % kBlock))
      throw std::invalid_argument("weights of type " + format + (experts > 1 ? " are not for experts" : "") +
                                  " in groups of " + std::to_string(group) +
                                  " are not available on CUDA: groups may be " +
                                  (e2m1 ? "16 or 32 columns" : "a multiple of 64"));
    m.kind = Kind::quantized, m.quants.bits = 4;
    m.quants.codes = !e2m1 ? Codes::nf4 : group == 16 ? Codes::nvfp4 : Codes::mxfp4;
    m.quants.group = e2m1 ? 2 * group : group, m.quants.groups = (k + m.quants.group - 1) / m.quants.group;
    m.max_split_k = quant_split_k(m.n, k);
    return m;
  }
  if (floats && group && group != kFloatGroup)
    throw std::invalid_argument("weights of type float8 have a scale for each row or for groups of " +
                                std::to_string(kFloatGroup) + " columns: got groups of " + std::to_string(group));
  if (group < 0 || !has_group(group ? group : k, k) || (integers && group && group < k && group % kBlock))
    throw std::invalid_argument("weights of type " + format + " in groups of " + std::to_string(group) +
                                " are not available on CUDA: groups may be " + (integers ? "" : "16, 32, ") +
                                "a multiple of 64 or whole rows");
  if ((integers || floats) && k > kMaxIntegers)
    throw std::invalid_argument("matrix of " + std::to_string(k) +
                                " input features: sums of 8-bit products are exact up to " +
                                std::to_string(kMaxIntegers));
  m.kind = floats ? Kind::float8 : integers ? Kind::integers : Kind::quantized;
  m.quants.bits = eight ? 8 : 4, m.quants.floats = floats, m.quants.in_rows = floats || (integers && eight);
  m.quants.group = group && group < k ? group : k;
  m.quants.groups = (k + m.quants.group - 1) / m.quants.group;
  m.max_split_k = quant_split_k(m.n, k, m.quants.in_rows ? kMaxSplitK : kMaxQuantSplitK);
  return m;
}

namespace {

// Bytes of one matrix of a stack.
size_t one_bytes(const Matrix& m) {
  if (m.kind == Kind::f32) return (size_t)m.n * m.k * sizeof(float);
  if (m.kind == Kind::dtype16) return tiles_bytes(m.n, m.k);
  return quantized_bytes(m.quants, m.n, m.k);
}

template <typename T>
void advance(T*& pointer, size_t bytes) {
  if (pointer) pointer = reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(pointer) + bytes);
}

// One matrix of a stack.
Matrix one_of(Matrix m, int expert) {
  const size_t before = expert * one_bytes(m);
  advance(m.values, before), advance(m.tiles, before), advance(m.quants.words, before),
      advance(m.quants.scales, before);
  m.experts = 1;
  return m;
}

}  // namespace

size_t matrix_bytes(const Matrix& m) { return m.experts * one_bytes(m); }

Weights::Staging::~Staging() {
  for (Turn& turn : turns)
    if (turn.packed) cudaEventDestroy(turn.packed);
}

size_t Weights::Staging::allocate(size_t bytes) {
  bytes = std::min((bytes + kCopyAlign - 1) / kCopyAlign * kCopyAlign, kStagingBytes);
  for (Turn& turn : turns) {
    if (turn.device.size() >= bytes) continue;
    if (!turn.packed) check(cudaEventCreateWithFlags(&turn.packed, cudaEventDisableTiming), "making an event");
    check(cudaEventSynchronize(turn.packed), "loading weights");
    turn.host = Memory(bytes, "loading weights", Memory::Where::host);
    turn.device = Memory(bytes, "loading weights");
  }
  return turns[0].device.size();
}

int Weights::add_matrix(int rows, int k, const std::string& format, int group, int experts,
                        const std::vector<int>& order) {
  Weight w{matrix_of(rows, k, format, group, experts), {}, 0};
  if (!order.empty()) {
    if (w.matrix.kind != Kind::quantized || experts > 1)
      throw std::invalid_argument("columns in another order are available on CUDA for int8 and int4, not for " +
                                  std::string(experts > 1 ? "experts" : format));
    std::vector<bool> seen(k);
    for (const int from : order) {
      if (from < 0 || from >= k || seen[from])
        throw std::invalid_argument("order: must have each of " + std::to_string(k) + " input features once, got " +
                                    std::to_string(from));
      seen[from] = true;
    }
    if ((int)order.size() != k)
      throw std::invalid_argument("order: must have each of " + std::to_string(k) + " input features once, got " +
                                  std::to_string(order.size()) + " columns");
  }
  if (w.matrix.kind == Kind::float8 && device_.capability() != 90)
    throw std::invalid_argument(
        "weights of type float8 are for GPUs of compute capability 9.0 (Hopper): this one's is " +
        std::to_string(device_.capability() / 10) + "." + std::to_string(device_.capability() % 10));
  device_.use();
  w.memory = Memory(matrix_bytes(w.matrix), "weights", Memory::Where::lent);
  place(w.matrix, w.memory);
  if (!order.empty()) {
    w.order = Memory(order.size() * sizeof(int), "weights");
    check(cudaMemcpy(w.order.as(), order.data(), w.order.size(), cudaMemcpyHostToDevice), "loading weights");
    w.matrix.order = w.order.as<int>(), w.features = order;
  }
  weights_.push_back(std::move(w));
  return (int)weights_.size() - 1;
}

int Weights::share_matrix(const Weights& other, int id) {
  weights_.push_back({other.matrix(id), {}, other.weights_[id].hash});
  return (int)weights_.size() - 1;
}

// Sets the pointers of a matrix into its memory.
void Weights::place(Matrix& m, const Memory& memory) {
  if (m.kind == Kind::f32) m.values = memory.as<float>();
  else if (m.kind == Kind::dtype16) m.tiles = memory.as<uint16_t>();
  if (!m.quants.bits) return;
  m.quants.words = memory.as<uint32_t>();
  if (!m.quants.mx) m.quants.scales = m.quants.words + quants_bytes(m.n, m.k, m.quants.bits) / sizeof(uint32_t);
}

void Weights::check_rows(const Matrix& m, int64_t count, int64_t row_offset, int64_t column, int64_t columns,
                         int64_t group) {
  const int64_t rows = (int64_t)m.n * m.experts;
  if (count < 0 || row_offset < 0 || row_offset + count > rows || column < 0 || column + m.k > columns)
    throw std::invalid_argument("rows " + std::to_string(row_offset) + "..." + std::to_string(row_offset + count) +
                                " of columns " + std::to_string(column) + "... of " + std::to_string(columns) +
                                " do not fit a matrix of " + std::to_string(rows) + " x " + std::to_string(m.k));
  if (!m.quants.bits) return;
  const int own = is_e2m1(m.quants.codes) ? m.quants.half() : m.quants.group;  // columns that share a scale
  for (int64_t first = 0; first < m.k; first += own) {
    const int64_t last = std::min<int64_t>(first + own, m.k) - 1;
    if (group < 1 || (column + first) / group != (column + last) / group)
      throw std::invalid_argument("groups of " + std::to_string(own) + " from column " + std::to_string(column) +
                                  " on are not parts of groups of " + std::to_string(group));
  }
}

std::vector<int64_t> Weights::fill_rows(int id, const std::vector<HostRows>& rows, int64_t row_offset,
                                        int64_t group_size) {
  const Matrix m = matrix(id);
  if (m.quants.mx) throw std::invalid_argument("weights of type mxfp4 come from a checkpoint in MXFP4: see fill_mx()");
  if (m.quants.codes != Codes::integers)
    throw std::invalid_argument("weights of type " + std::string(is_e2m1(m.quants.codes) ? "e2m1" : "nf4") +
                                " come from a quantized checkpoint: see fill_quantized()");
  device_.use();
  Memory counts(rows.size() * sizeof(unsigned long long), "counters");
  int turn = 0;
  for (size_t i = 0; i < rows.size(); i++) {
    const HostRows& r = rows[i];
    const int64_t group = group_size ? std::min(group_size, r.columns) : r.columns;
    check_rows(m, r.count, row_offset, r.column, r.columns, group);
    // Quantization computes the range of each group, so it needs whole groups of columns.
    int64_t first = r.column, last = r.column + m.k;
    if (m.quants.bits) first = first / group * group, last = std::min((last + group - 1) / group * group, r.columns);
    const size_t item = size_of(r.source), row_bytes = (last - first) * item,
                 range_bytes = m.quants.bits ? (last - first + group - 1) / group * 2 * sizeof(float) : 0;
    const size_t staged = staging_.allocate(r.count * (row_bytes + range_bytes));
    const int64_t most = staged / (row_bytes + range_bytes);
    if (!most && r.count)
      throw std::invalid_argument("rows of " + std::to_string(last - first) + " columns are too long");
    for (int64_t done = 0, some; done < r.count; done += some, turn ^= 1) {
      const int64_t at = row_offset + done, first_row = at % m.n;
      const Matrix one = one_of(m, (int)(at / m.n));
      some = std::min({most, r.count - done, m.n - first_row});
      const Staging::Turn& own = staging_.turns[turn];
      check(cudaEventSynchronize(own.packed), "loading weights");
      std::atomic<uint64_t> hash{0};
      share_work(some, some * row_bytes, [&](int64_t begin, int64_t end) {
        uint64_t own_hash = 0;
        char* to = own.host.as() + begin * row_bytes;
        for (int64_t row = begin; row < end;) {
          const int64_t rows = std::min(kRowsTogether, end - row);
          stage(r, done + row, rows, first, last - first, to);
          for (const int64_t after = row + rows; row < after; row++, to += row_bytes)
            own_hash += row_hash(to + (r.column - first) * item, m.k * item, at + row);
        }
        hash += own_hash;
      });
      weights_[id].hash += hash;
      check(cudaMemcpyAsync(own.device.as(), own.host.as(), some * row_bytes, cudaMemcpyHostToDevice, device_.stream()),
            "loading weights");
      unsigned long long* bad = counts.as<unsigned long long>() + i;
      if (m.quants.bits)
        quantize_rows(own.device.as(), r.source, last - first, (int)group, r.column - first, (int)some, one,
                      (int)first_row, reinterpret_cast<float*>(own.device.as() + staged - some * range_bytes), bad,
                      device_.queue());
      else pack_rows(own.device.as(), r.source, m.k, (int)some, one, (int)first_row, bad, device_.queue());
      check(cudaEventRecord(own.packed, device_.stream()), "loading weights");
    }
    row_offset += r.count;
  }
  std::vector<unsigned long long> bad(rows.size());
  device_.wait();
  check(cudaMemcpy(bad.data(), counts.as(), counts.size(), cudaMemcpyDeviceToHost), "loading weights");
  return {bad.begin(), bad.end()};
}

int64_t Weights::fill_mx(int id, const HostMxRows& r, int64_t row_offset) {
  const Matrix m = matrix(id);
  if (!m.quants.mx || r.column % kMxGroup)
    throw std::invalid_argument("rows of MXFP4 from column " + std::to_string(r.column) + " on do not fit a matrix " +
                                (m.quants.mx ? "in groups of 32" : "of another type"));
  check_rows(m, r.count, row_offset, r.column, r.columns, kMxGroup);
  device_.use();
  // A turn's memory holds packed values, then scales. They stay packed on the host.
  const int64_t value_bytes = m.k / 2, groups = m.quants.groups, row_bytes = value_bytes + groups;
  const int64_t most = staging_.allocate(r.count * row_bytes) / row_bytes;
  if (!most && r.count) throw std::invalid_argument("rows of " + std::to_string(m.k) + " columns are too long");
  std::atomic<int64_t> bad{0};
  for (int64_t done = 0, some; done < r.count; done += some) {
    const int64_t first_row = (row_offset + done) % m.n;
    some = std::min({most, r.count - done, m.n - first_row});
    const Staging::Turn& own = staging_.turns[staging_.next ^= 1];
    check(cudaEventSynchronize(own.packed), "loading weights");
    uint8_t *values = own.host.as<uint8_t>(), *scales = values + some * value_bytes;
    std::atomic<uint64_t> hash{0};
    // An expert's rows are few: more threads than otherwise.
    share_work(some, 3 * some * row_bytes, [&](int64_t begin, int64_t end) {
      uint64_t own_hash = 0;
      int64_t own_bad = 0;
      for (int64_t row = begin; row < end; row++) {
        const int64_t at = done + row;
        uint8_t *to = values + row * value_bytes, *its = scales + row * groups;
        std::memcpy(to, r.values + at * r.value_stride + r.column / 2, value_bytes);
        const uint8_t* from = r.scales + at * r.scale_stride + r.column / kMxGroup;
        for (int64_t g = 0; g < groups; g++) {
          own_bad += from[g] > kMxMost;
          its[g] = (uint8_t)(from[g] + kMxBias);
        }
        own_hash += row_hash(to, value_bytes, row_offset + at) + row_hash(its, groups, ~(row_offset + at));
      }
      hash += own_hash, bad += own_bad;
    });
    weights_[id].hash += hash;
    check(cudaMemcpyAsync(own.device.as(), own.host.as(), some * row_bytes, cudaMemcpyHostToDevice, device_.stream()),
          "loading weights");
    const uint8_t* placed = own.device.as<uint8_t>();
    place_mx_rows(placed, placed + some * value_bytes, (int)some, one_of(m, (int)((row_offset + done) / m.n)),
                  (int)first_row, device_.queue());
    check(cudaEventRecord(own.packed, device_.stream()), "loading weights");
  }
  return bad;
}

int64_t Weights::fill_quantized(int id, const HostQuants& r, int64_t row_offset) {
  const Matrix m = matrix(id);
  if (m.quants.mx) throw std::invalid_argument("a matrix of type mxfp4 is filled by fill_mx()");
  check_rows(m, r.count, row_offset, r.column, r.columns, r.group);
  if (m.quants.bits != r.bits)
    throw std::invalid_argument("values of " + std::to_string(r.bits) + " bits do not fit the matrix");
  const bool integers = m.quants.codes == Codes::integers, enlarges = is_e2m1(m.quants.codes);
  if (integers != (r.offsets != nullptr))
    throw std::invalid_argument(integers ? "integers have offsets beside their scales"
                                         : "small floats have no offsets");
  device_.use();
  const int64_t groups = (r.columns + r.group - 1) / r.group, own_groups = m.quants.groups,
                stride = r.bits == 8 ? r.columns : (r.columns + 1) / 2;
  // A turn's memory holds quantized values, then scales and offsets.
  const size_t row_bytes = (m.k + 3) / 4 * 4 + 2 * own_groups * sizeof(uint16_t);
  const int64_t most = staging_.allocate(r.count * row_bytes) / row_bytes;
  if (!most && r.count) throw std::invalid_argument("rows of " + std::to_string(m.k) + " columns are too long");
  std::atomic<int64_t> bad{0};
  // A stored scale of a group's first columns, or of those after its half, in the matrix' form.
  const auto scale_at = [&](const uint16_t* its, int64_t column, int64_t& too_large) {
    if (column >= r.columns) return (uint16_t)0;
    const uint16_t bits = its[column / r.group];
    if (!enlarges) return bits;
    const float scale = bf16_to_float(bits);
    too_large += !(std::fabs(scale) < kMxTooLarge);
    return float_to_bf16(scale * kMxLarger);
  };
  int turn = 0;
  for (int64_t done = 0, some; done < r.count; done += some, turn ^= 1) {
    const int64_t first_row = (row_offset + done) % m.n;
    some = std::min({most, r.count - done, m.n - first_row});
    const Staging::Turn& own = staging_.turns[turn];
    check(cudaEventSynchronize(own.packed), "loading weights");
    const size_t quants_end = (some * m.k + 3) / 4 * 4;
    uint8_t* quants = own.host.as<uint8_t>();
    uint16_t *scales = reinterpret_cast<uint16_t*>(quants + quants_end), *offsets = scales + some * own_groups;
    std::atomic<uint64_t> hash{0};
    share_work(some, some * m.k, [&](int64_t begin, int64_t end) {
      uint64_t own_hash = 0;
      int64_t own_bad = 0;
      for (int64_t row = begin; row < end; row++) {
        const int64_t at = done + row;
        const uint8_t* from = r.quants + at * stride;
        const uint16_t *its_scales = r.scales + at * groups,
                       *its_offsets = integers ? r.offsets + at * groups : its_scales;
        uint8_t* to = quants + row * m.k;
        if (r.bits == 8) std::memcpy(to, from + r.column, m.k);
        else
          for (int64_t i = 0; i < m.k; i++) to[i] = from[(r.column + i) / 2] >> (r.column + i) % 2 * 4 & 15;
        for (int64_t g = 0; g < own_groups; g++) {
          const int64_t column = r.column + g * m.quants.group;
          scales[row * own_groups + g] = scale_at(its_scales, column, own_bad);
          offsets[row * own_groups + g] = scale_at(its_offsets, column + m.quants.half(), own_bad);
        }
        own_hash += row_hash(from, stride, row_offset + at) +
                    row_hash(its_scales, groups * sizeof(uint16_t), ~(row_offset + at)) +
                    (integers ? row_hash(its_offsets, groups * sizeof(uint16_t), row_offset + at) : 0);
      }
      hash += own_hash, bad += own_bad;
    });
    weights_[id].hash += hash;
    const size_t bytes = quants_end + 2 * some * own_groups * sizeof(uint16_t);
    check(cudaMemcpyAsync(own.device.as(), own.host.as(), bytes, cudaMemcpyHostToDevice, device_.stream()),
          "loading weights");
    const uint16_t* placed = reinterpret_cast<const uint16_t*>(own.device.as() + quants_end);
    place_rows(own.device.as<uint8_t>(), placed, placed + some * own_groups, (int)some,
               one_of(m, (int)((row_offset + done) / m.n)), (int)first_row, device_.queue());
    check(cudaEventRecord(own.packed, device_.stream()), "loading weights");
  }
  device_.wait();
  return bad;
}

void Weights::fill_noise(int id, float size) {
  const Matrix& m = matrix(id);
  if (m.kind != Kind::dtype16 || m.k % kBlock)
    throw std::invalid_argument("fill_noise: the matrix must be of 16 bits, its columns a multiple of " +
                                std::to_string(kBlock));
  device_.use();
  cuda::fill_noise(weights_[id].memory.as(), weights_[id].memory.size(), m.dtype, size, id, device_.queue());
}

int Weights::add_vector(const std::vector<float>& values) {
  device_.use();
  Weight w{{}, Memory(std::max<size_t>(values.size(), 1) * sizeof(float), "weights"), 0};
  w.matrix.n = (int)values.size();
  check(cudaMemcpy(w.memory.as(), values.data(), values.size() * sizeof(float), cudaMemcpyHostToDevice),
        "loading weights");
  weights_.push_back(std::move(w));
  return (int)weights_.size() - 1;
}

std::vector<float> Weights::read_rows(int id, int64_t first, int64_t count) const {
  const Matrix& m = matrix(id);
  const int64_t rows = (int64_t)m.n * m.experts;
  if (count < 1 || first < 0 || first > rows - count)
    throw std::invalid_argument("row " + std::to_string(first) + " is not in 0..." + std::to_string(rows - count));
  device_.use();
  Memory out(count * m.k * sizeof(float), "rows");
  for (int64_t row = first; row < first + count; row++)
    cuda::read_row(one_of(m, (int)(row / m.n)), (int)(row % m.n), out.as<float>() + (row - first) * m.k,
                   device_.queue());
  std::vector<float> values(count * m.k);
  device_.wait();
  check(cudaMemcpy(values.data(), out.as(), out.size(), cudaMemcpyDeviceToHost), "reading rows");
  const std::vector<int>& features = weights_[id].features;
  if (features.empty()) return values;
  std::vector<float> ordered(values.size());
  for (int64_t row = 0; row < count; row++)
    for (int i = 0; i < m.k; i++) ordered[row * m.k + features[i]] = values[row * m.k + i];
  return ordered;
}

std::vector<float> Weights::read_vector(int id) const {
  std::vector<float> values(weights_.at(id).matrix.n);
  device_.use();
  check(cudaMemcpy(values.data(), vector(id), values.size() * sizeof(float), cudaMemcpyDeviceToHost),
        "reading weights");
  return values;
}

void Weights::pair(int id) {
  Weight& w = weights_.at(id);
  Matrix paired = one_of(w.matrix, 0);
  paired.n = paired_rows(w.matrix.n);  // the number of 64-row blocks is unchanged
  const size_t bytes = one_bytes(paired);
  const Memory made(bytes, "weights");
  place(paired, made);
  for (int expert = 0; expert < w.matrix.experts; expert++) {
    pair_rows(one_of(w.matrix, expert), paired, device_.queue());
    check(cudaMemcpyAsync(w.memory.as() + expert * bytes, made.as(), bytes, cudaMemcpyDeviceToDevice, device_.stream()),
          "pairing weights");
  }
  device_.wait();
  w.matrix.n = paired.n;
}

void Weights::unload() {
  if (freeing_.joinable()) freeing_.join();
  if (copy_.size()) return;
  size_t bytes = 0;
  for (Weight& w : weights_)
    if (w.memory.lent()) w.copy = bytes, bytes += (w.memory.size() + kCopyAlign - 1) / kCopyAlign * kCopyAlign;
  HostCopy copy(bytes, "weights that the GPU has not", [&](char* data, size_t begin, size_t end) {
    for (const Weight& w : weights_) {
      if (!w.memory.lent()) continue;
      const size_t first = std::max(begin, w.copy), last = std::min(end, w.copy + w.memory.size());
      if (first < last)
        check(cudaMemcpyAsync(data + first, w.memory.as() + (first - w.copy), last - first, cudaMemcpyDeviceToHost,
                              device_.stream()),
              "unloading weights");
    }
  });
  device_.wait();
  for (Weight& w : weights_) w.memory.give_back();
  copy_ = std::move(copy);
}

void Weights::load() {
  if (!copy_.size()) return;
  try {
    for (Weight& w : weights_) w.memory.take_again();
  } catch (...) {
    for (Weight& w : weights_) w.memory.give_back();
    throw;
  }
  for (const Weight& w : weights_)
    if (w.memory.lent())
      HostCopy::each_part(w.copy, w.copy + w.memory.size(), [&](size_t at, size_t some) {
        check(cudaMemcpyAsync(w.memory.as() + (at - w.copy), copy_.as() + at, some, cudaMemcpyHostToDevice,
                              device_.stream()),
              "loading weights");
      });
  device_.wait();
  freeing_ = std::thread([copy = std::move(copy_), device = device_.index()]() mutable {  // takes seconds
    cudaSetDevice(device);
    HostCopy gone(std::move(copy));
  });
}

Weights::~Weights() {
  if (freeing_.joinable()) freeing_.join();
}

const Matrix& Weights::matrix(int id) const {
  const Matrix& m = weights_.at(id).matrix;
  if (!m.k) throw std::invalid_argument("weight " + std::to_string(id) + " is a vector, not a matrix");
  return m;
}

const float* Weights::vector(int id) const {
  const Weight& w = weights_.at(id);
  if (w.matrix.k) throw std::invalid_argument("weight " + std::to_string(id) + " is a matrix, not a vector");
  return w.memory.as<float>();
}

std::vector<double> Weights::sizes() const {
  std::vector<double> found;
  for (const Weight& w : weights_) found.push_back((double)(w.matrix.k ? matrix_bytes(w.matrix) : w.memory.size()));
  return found;
}

DType16 Weights::dtype() const {
  bool are_dtype16[2] = {}, others = false;
  for (const Weight& w : weights_) {
    if (!w.matrix.k) continue;
    if (w.matrix.kind == Kind::dtype16) are_dtype16[(int)w.matrix.dtype] = true;
    else if (w.matrix.kind != Kind::f32) others = true;
  }
  const bool f16 = are_dtype16[(int)DType16::f16];
  if (f16 && (are_dtype16[(int)DType16::bf16] || others))
    throw std::invalid_argument(
        "weights of type float16 with others of type " +
        std::string(others ? "int8, int4, w8a8, w4a8, float8, mxfp4, e2m1 or nf4" : "bfloat16") +
        ": the CUDA backend allows only float32 beside float16");
  return f16 ? DType16::f16 : DType16::bf16;
}

size_t Weights::bytes() const {
  size_t total = 0;
  for (const Weight& w : weights_) total += w.memory.size();
  return total;
}

}  // namespace as::cuda
