// A model's weights on a GPU: matrices as products read them (tiles.h), and vectors.
#pragma once
#include <string>
#include <thread>
#include <vector>

#include "cuda/kernels/quantize/quantize.h"
#include "cuda/memory/device.h"
#include "cuda/memory/host_copy.h"

namespace as {
namespace cuda {

// Quantized rows in the host's memory, one after the other: codes of 8 bits a byte each, of 4 two in a byte, the even
// column in the lower half; of `columns` columns, of which the matrix takes those from `column` on, in groups of
// `group`; scales and offsets [count, groups] in bfloat16, or of e4m3 the lower and the upper half of a row's float32.
struct HostCodes {
  int bits;
  const uint8_t* codes;
  const uint16_t *scales, *offsets;
  int64_t count, columns, column, group;
};

// Rows of a checkpoint's tensor in the host's memory, of `columns` values each: `stride` values from a row to the next,
// `step` from a column to the next (1 but of tensors that are stored transposed); the matrix takes columns from
// `column` on.
struct HostRows {
  const void* data;
  SourceType source;
  int64_t count, stride, columns, column, step;
};

// A matrix that there is no memory for yet. format: as weight_dtype names it; group: of integers, 0 for whole rows.
// experts: `rows` are those of a stack of so many matrices. std::invalid_argument for what the backend does not have.
Matrix matrix_of(int rows, int k, const std::string& format, int group, int experts = 1);
size_t matrix_bytes(const Matrix& matrix);  // of all in a stack

class Weights {
 public:
  explicit Weights(const Device& device) : device_(device) {}
  ~Weights();

  int add_matrix(int rows, int k, const std::string& format, int group, int experts = 1);
  // Fills rows from row_offset on. Returns how many values of each are NaN or infinite, or too large for float16 if the
  // matrix is that. group: by which whole rows are quantized, 0 for all of them.
  std::vector<int64_t> fill_rows(int id, const std::vector<HostRows>& rows, int64_t row_offset, int64_t group);
  // The same of rows that InstantQuant has quantized.
  void fill_quantized(int id, const HostCodes& rows, int64_t row_offset);
  // Random values, made on the device, evenly between -size and size: for benchmarks of large models. Of a matrix of
  // 16 bits with whole blocks of columns.
  void fill_noise(int id, float size);
  int add_vector(const std::vector<float>& values);

  // Ids count matrices and vectors together. std::invalid_argument for the other kind.
  const Matrix& matrix(int id) const;
  const float* vector(int id) const;
  uint64_t source_hash(int id) const { return matrix(id), weights_[id].hash; }
  std::vector<float> read_rows(int id, int64_t first, int64_t count) const;
  // The type of those that are of 16 bits, and so of activations. std::invalid_argument where they are not of one, or
  // float16 beside codes.
  DType16 dtype() const;
  size_t bytes() const;
  std::vector<double> sizes() const;  // bytes of each
  // Of a matrix of gates and what they gate: as gated products take it (pair_rows), from now on.
  void pair(int id);
  // All is filled: gives back what only filling needs.
  void finish() { staging_ = {}; }
  // Matrices go to pinned memory of the host, and back. Nothing on the device may use them; addresses stay. Both throw
  // std::runtime_error, and change nothing, where there is not enough memory.
  void unload();
  void load();

 private:
  struct Weight {
    Matrix matrix;  // k = 0: none, but a vector
    Memory memory;
    uint64_t hash;
    size_t copy = 0;  // where it is in the host's copy
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
    // Has room for so many bytes a turn, if they are not too many; returns for how many.
    size_t allocate(size_t bytes);
  };
  static void place(Matrix& m, const Memory& memory);
  // std::invalid_argument unless columns [column, ...) of `count` rows, in groups of `group`, can be the matrix' rows.
  static void check_rows(const Matrix& m, int64_t count, int64_t row_offset, int64_t column, int64_t columns,
                         int64_t group);
  const Device& device_;
  std::vector<Weight> weights_;
  Staging staging_;
  HostCopy copy_;        // of what is not on the GPU
  std::thread freeing_;  // the last one
};

}  // namespace cuda
}  // namespace as
