// A model's weights on a GPU: matrices in the layout that GEMMs read (kernels/common/tiles.h), and vectors.
#pragma once
#include <string>
#include <thread>
#include <vector>

#include "cuda/kernels/quantize/quantize.h"
#include "cuda/memory/device.h"
#include "cuda/memory/host_copy.h"

namespace as::cuda {

// Adjacent quantized rows in host memory. 8-bit values take a byte each. 4-bit values share bytes; the even column is
// in the lower half. A row has `columns` columns in groups of `group`; the matrix takes those from `column` on. scales
// and offsets [count, groups] are bfloat16; for e4m3 they are the lower and upper half of float32 scales. Small floats
// in 4 bits have no offsets.
struct HostQuants {
  int bits;
  const uint8_t* quants;
  const uint16_t *scales, *offsets;
  int64_t count, columns, column, group;
};

// Adjacent rows of MXFP4 in host memory: `columns` columns, two to a byte (the even one in the lower half), and a scale
// for each 32, as e8m0. Rows of values and of scales are so many bytes apart. The matrix takes the columns from
// `column` on.
struct HostMxRows {
  const uint8_t *values, *scales;
  int64_t count, columns, column, value_stride, scale_stride;
};

// Rows of a checkpoint's tensor in host memory, with `columns` values each. Adjacent rows are `stride` values apart,
// adjacent columns `step` (1 unless the tensor is stored transposed). The matrix takes the columns from `column` on.
struct HostRows {
  const void* data;
  SourceType source;
  int64_t count, stride, columns, column, step;
};

// A matrix without memory. format: a name of weight_dtype. group: columns of a quantization group, 0 for whole rows.
// experts: `rows` are the rows of a stack of so many matrices. Throws std::invalid_argument for what the backend does
// not support.
Matrix matrix_of(int rows, int k, const std::string& format, int group, int experts = 1);
size_t matrix_bytes(const Matrix& matrix);  // bytes of the whole stack

class Weights {
 public:
  explicit Weights(const Device& device) : device_(device) {}
  ~Weights();

  // order: the input feature of each column, if columns are permuted; empty otherwise. Rows are filled in that order.
  int add_matrix(int rows, int k, const std::string& format, int group, int experts = 1,
                 const std::vector<int>& order = {});
  // Fills rows from row_offset on. Returns for each tensor how many values are NaN or infinite, or too large if the
  // matrix is float16. group: columns of a quantization group of the tensor's rows, 0 for whole rows.
  std::vector<int64_t> fill_rows(int id, const std::vector<HostRows>& rows, int64_t row_offset, int64_t group);
  // The same for rows that InstantQuant, or another program, has quantized. Returns how many scales of e2m1 values are
  // not below 4, which the format on GPUs does not hold.
  int64_t fill_quantized(int id, const HostQuants& rows, int64_t row_offset);
  // The same for MXFP4. Returns how many scales are NaN or above 2, which the format on GPUs does not hold. The copies
  // may still be under way.
  int64_t fill_mx(int id, const HostMxRows& rows, int64_t row_offset);
  // Fills a 16-bit matrix on the device with random values, uniform in [-size, size]. Its columns must be whole blocks.
  // For benchmarks of large models.
  void fill_noise(int id, float size);
  int add_vector(const std::vector<float>& values);
  // The matrix `id` of `other`, which must outlive its use.
  int share_matrix(const Weights& other, int id);

  // Matrices and vectors share ids. Throws std::invalid_argument for the other kind.
  const Matrix& matrix(int id) const;
  const float* vector(int id) const;
  uint64_t source_hash(int id) const { return matrix(id), weights_[id].hash; }
  std::vector<float> read_rows(int id, int64_t first, int64_t count) const;
  std::vector<float> read_vector(int id) const;
  // The type of 16-bit weights, and so of activations. Throws std::invalid_argument if weights of both types exist, or
  // float16 weights and quantized ones.
  DType16 dtype() const;
  size_t bytes() const;
  std::vector<double> sizes() const;  // bytes of each weight, also of those of another model
  // Interleaves a matrix's gate and up rows for gated GEMMs (pair_rows).
  void pair(int id);
  // After all weights are filled: frees the staging memory.
  void finish() { staging_ = {}; }
  // Moves the matrices to pinned host memory, and back to the same addresses. No work on the device may use them
  // meanwhile. Both throw std::runtime_error, and change nothing, if memory runs out.
  void unload();
  void load();

 private:
  struct Weight {
    Matrix matrix;  // k = 0: a vector
    Memory memory;
    uint64_t hash;
    size_t copy = 0;                 // offset in the host copy
    Memory order = {};               // of its columns
    std::vector<int> features = {};  // the same on the host
  };
  // Rows that wait to be packed. While the device packs the rows of one turn, the host fills the other.
  struct Staging {
    struct Turn {
      Memory host, device;
      cudaEvent_t packed = nullptr;
    };
    Turn turns[2];
    int next = 0;  // fill_mx(): the turn that was last used; other calls wait at their end, and begin with the first

    Staging() = default;
    ~Staging();
    Staging& operator=(Staging&& other) noexcept {
      std::swap(turns, other.turns), std::swap(next, other.next);
      return *this;
    }
    // Allocates room for `bytes` bytes per turn, at most kStagingBytes. Returns the room.
    size_t allocate(size_t bytes);
  };
  static void place(Matrix& m, const Memory& memory);
  // Throws std::invalid_argument unless columns [column, ...) of `count` rows, in groups of `group`, fit the matrix.
  static void check_rows(const Matrix& m, int64_t count, int64_t row_offset, int64_t column, int64_t columns,
                         int64_t group);
  const Device& device_;
  std::vector<Weight> weights_;
  Staging staging_;
  HostCopy copy_;        // of unloaded weights
  std::thread freeing_;  // frees the last copy
};

}  // namespace as::cuda
