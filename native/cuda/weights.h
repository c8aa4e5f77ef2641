// A model's weights on a GPU: matrices as products read them (tiles.h), and vectors.
#pragma once
#include <string>
#include <vector>

#include "cuda/device.h"
#include "cuda/kernels.h"

namespace as {
namespace cuda {

// Rows of a checkpoint's tensor in the host's memory: `columns` adjacent values each, `stride` values from one to the
// next; the matrix takes those from `column` on.
struct HostRows {
  const void* data;
  Source source;
  int64_t count, stride, columns, column;
};

// "float32" or "bfloat16"; std::invalid_argument for anything else.
bool is_bf16(const std::string& format);
size_t matrix_bytes(int n, int k, bool bf16);

class Weights {
 public:
  explicit Weights(const Device& device) : device_(device) {}

  int add_matrix(int n, int k, const std::string& format);
  // Fills rows from row_offset on. Returns how many values of each are NaN or infinite.
  std::vector<int64_t> fill_rows(int id, const std::vector<HostRows>& rows, int64_t row_offset);
  int add_vector(const std::vector<float>& values);

  // Ids count matrices and vectors together. std::invalid_argument for the other kind.
  const Matrix& matrix(int id) const;
  const float* vector(int id) const;
  uint64_t source_hash(int id) const { return matrix(id), weights_[id].hash; }
  std::vector<float> read_row(int id, int64_t row) const;
  size_t bytes() const;
  // Of a matrix of gates and what they gate: as gated products take it (pair_rows), from now on.
  void pair(int id);
  // All is filled: gives back what only filling needs.
  void finish() { staging_ = {}; }

 private:
  struct Weight {
    Matrix matrix;  // k = 0: none, but a vector
    Memory memory;
    uint64_t hash;
  };
  // Where rows wait to be packed: while the device packs those of one turn, the next is filled.
  struct Staging {
    struct Turn {
      Memory host, device;
      cudaEvent_t packed = nullptr;
    };
    Turn turns[2];

    Staging() = default;
    ~Staging();
    Staging& operator=(Staging&& other) noexcept {
      std::swap(turns, other.turns);
      return *this;
    }
    void allocate();
  };
  const Device& device_;
  std::vector<Weight> weights_;
  Staging staging_;
};

}  // namespace cuda
}  // namespace as
