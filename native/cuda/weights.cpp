#include "cuda/weights.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "cpu/row_hash.h"

namespace as {
namespace cuda {
namespace {

constexpr size_t kStagingBytes = 32 << 20;

size_t size_of(Source source) { return source == Source::f32 ? 4 : 2; }

}  // namespace

bool is_bf16(const std::string& format) {
  if (format != "float32" && format != "bfloat16")
    throw std::invalid_argument("weights of type " + format +
                                " are not available on CUDA yet: float32 and bfloat16 are");
  return format == "bfloat16";
}

size_t matrix_bytes(int n, int k, bool bf16) { return bf16 ? tiles_bytes(n, k) : (size_t)n * k * sizeof(float); }

Weights::Staging::~Staging() {
  for (Turn& turn : turns)
    if (turn.packed) cudaEventDestroy(turn.packed);
}

void Weights::Staging::allocate() {
  if (turns[0].packed) return;
  for (Turn& turn : turns) {
    turn.host = Memory(kStagingBytes, "loading weights", Memory::Where::host);
    turn.device = Memory(kStagingBytes, "loading weights");
    check(cudaEventCreateWithFlags(&turn.packed, cudaEventDisableTiming), "making an event");
  }
}

int Weights::add_matrix(int n, int k, const std::string& format) {
  if (n < 1 || k < 1)
    throw std::invalid_argument("matrix of " + std::to_string(n) + " x " + std::to_string(k) +
                                ": both must be positive");
  device_.use();
  const bool bf16 = is_bf16(format);
  Weight w{{n, k, nullptr, nullptr}, Memory(matrix_bytes(n, k, bf16), "weights"), 0};
  if (bf16) w.matrix.tiles = w.memory.as<uint16_t>();
  else w.matrix.values = w.memory.as<float>();
  weights_.push_back(std::move(w));
  return (int)weights_.size() - 1;
}

std::vector<int64_t> Weights::fill_rows(int id, const std::vector<HostRows>& rows, int64_t row_offset) {
  const Matrix m = matrix(id);
  device_.use();
  staging_.allocate();
  Memory counts(rows.size() * sizeof(unsigned long long), "counters");
  int turn = 0;
  for (size_t i = 0; i < rows.size(); i++) {
    const HostRows& r = rows[i];
    if (r.count < 0 || row_offset < 0 || row_offset + r.count > m.n || r.column < 0 || r.column + m.k > r.columns)
      throw std::invalid_argument("rows " + std::to_string(row_offset) + "..." + std::to_string(row_offset + r.count) +
                                  " of columns " + std::to_string(r.column) + "... of " + std::to_string(r.columns) +
                                  " do not fit a matrix of " + std::to_string(m.n) + " x " + std::to_string(m.k));
    const size_t item = size_of(r.source), row_bytes = m.k * item;
    const int64_t most = kStagingBytes / row_bytes;
    if (!most) throw std::invalid_argument("rows of " + std::to_string(m.k) + " columns are too long");
    for (int64_t done = 0; done < r.count; done += most, turn ^= 1) {
      const int64_t some = std::min(most, r.count - done);
      const Staging::Turn& own = staging_.turns[turn];
      check(cudaEventSynchronize(own.packed), "loading weights");
      for (int64_t row = 0; row < some; row++) {
        const char* from = static_cast<const char*>(r.data) + ((done + row) * r.stride + r.column) * item;
        std::memcpy(own.host.as() + row * row_bytes, from, row_bytes);
        weights_[id].hash += row_hash(from, row_bytes, row_offset + done + row);
      }
      check(cudaMemcpyAsync(own.device.as(), own.host.as(), some * row_bytes, cudaMemcpyHostToDevice, device_.stream()),
            "loading weights");
      pack_rows(own.device.as(), r.source, m.k, (int)some, m, (int)(row_offset + done),
                counts.as<unsigned long long>() + i, device_.queue());
      check(cudaEventRecord(own.packed, device_.stream()), "loading weights");
    }
    row_offset += r.count;
  }
  std::vector<unsigned long long> bad(rows.size());
  device_.wait();
  check(cudaMemcpy(bad.data(), counts.as(), counts.size(), cudaMemcpyDeviceToHost), "loading weights");
  return {bad.begin(), bad.end()};
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

std::vector<float> Weights::read_row(int id, int64_t row) const {
  const Matrix& m = matrix(id);
  if (row < 0 || row >= m.n)
    throw std::invalid_argument("row " + std::to_string(row) + " is not in 0..." + std::to_string(m.n - 1));
  device_.use();
  Memory out(m.k * sizeof(float), "a row");
  cuda::read_row(m, (int)row, out.as<float>(), device_.queue());
  std::vector<float> values(m.k);
  device_.wait();
  check(cudaMemcpy(values.data(), out.as(), out.size(), cudaMemcpyDeviceToHost), "reading a row");
  return values;
}

void Weights::pair(int id) {
  Weight& w = weights_.at(id);
  const int n = paired_rows(w.matrix.n);
  Memory memory(matrix_bytes(n, w.matrix.k, true), "weights");
  const Matrix paired{n, w.matrix.k, nullptr, memory.as<uint16_t>()};
  pair_rows(w.matrix, paired, device_.queue());
  device_.wait();
  w.matrix = paired, w.memory = std::move(memory);
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

size_t Weights::bytes() const {
  size_t total = 0;
  for (const Weight& w : weights_) total += w.memory.size();
  return total;
}

}  // namespace cuda
}  // namespace as
