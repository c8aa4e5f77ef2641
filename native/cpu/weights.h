// A model's weights on one rank: matrices packed for the kernels (kernels/format.h), and vectors.
#pragma once
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "cpu/kernels/kernels.h"
#include "cpu/memory.h"
#include "cpu/pool.h"
#include "cpu/quantized.h"

namespace as {

// Bytes of `experts` matrices of this layout, including what is prefetched past their end.
inline size_t matrix_bytes(const Packed& m, int experts = 1) {
  return (size_t)experts * m.panels() * m.panel_bytes + 4096;
}

// "float32", "bfloat16", "int8", "int4", "w8a8", "w4a8", "e4m3", "nf4", "e2m1" or "e2m1a16". Throws
// std::invalid_argument for another name.
Format format_of(const std::string& name);

// The layout of a matrix for this instruction set's kernels. Throws std::invalid_argument if they cannot have it.
Packed packed_of(const Rules& rules, int out_features, int in_features, const std::string& dtype, int group_size,
                 const ScaleLayout& scaling = {}, int gathered = 0);

// Copies rows [r0, r1) of a source into a matrix of floats. Threads must not share a panel. Returns the number of NaN
// and infinite values.
int64_t pack_floats(const Packed& m, const SourceRows& source, int64_t r0, int64_t r1);

// Whether shared memory can be in huge pages, as private memory is.
bool shares_huge_pages();

class Weights {
 public:
  // The threads of `pool` divide the rows, so that pages are placed where they are read.
  Weights(Pool& pool, const Kernels& kernels) : pool_(pool), k_(kernels) {}

  // Before add_matrix(): matrices are in memory that other processes can map, as far as `bytes` bytes suffice.
  void share(size_t bytes) { arena_.share(bytes); }
  const SharedBlock* shared() const { return arena_.shared(); }
  size_t shared_bytes() const { return arena_.shared_bytes(); }
  // Of parts of this memory in which some pages are small, which makes reading slower.
  size_t small_bytes() const { return small_bytes_; }

  // group_size: of quantized formats, along in_features; 0: one group a row. experts: a stack of this many matrices
  // with equal shares of the rows, each packed separately. order: the input feature of each column, -1 for none; empty:
  // all of them in order.
  int add_matrix(int out_features, int in_features, const std::string& dtype, int group_size, int experts = 1,
                 const ScaleLayout& scaling = {}, std::vector<int> order = {});
  // Copies rows[i] rows of each source (from its column on) into consecutive rows from row_offset on. Returns the
  // number of NaN and infinite values of each.
  std::vector<int64_t> fill_matrix(int id, const std::vector<SourceRows>& sources, const std::vector<int64_t>& rows);
  // The same from `column` on for rows that are already quantized. A matrix of floats takes e4m3, which is dequantized.
  // Returns of each source the number of e4m3 NaN plus the number of block scales that are NaN or infinite.
  std::vector<int64_t> fill_quantized(int id, const std::vector<StoredRows>& sources, const std::vector<int64_t>& rows,
                                      int64_t row_offset, int64_t column);
  // A hash of all bytes that fill_matrix() has read. Independent of threads and instruction set.
  uint64_t source_hash(int id) const { return matrix(id), weights_[id].source_hash; }
  // Quantizes rows into plain arrays. Returns the number of NaN and infinite values.
  int64_t quantize(const SourceRows& source, const QuantizedRows& out, int64_t rows) const;
  int add_vector(std::vector<float> values);
  // A matrix of another model whose threads are the same and which must outlive its use.
  int share_matrix(const Weights& other, int id);

  // Ids number matrices and vectors together. Throw std::invalid_argument for the other kind.
  const Packed& matrix(int id) const;  // of a stack, the first one
  Packed matrix(int id, int expert) const;
  int experts(int id) const { return weights_.at(id).experts; }
  const std::vector<float>& vector(int id) const;
  // out [in features]: a row of a matrix, dequantized.
  void read_row(int id, int64_t row, float* out) const;

  size_t bytes() const;                                        // without shared matrices
  const std::vector<double>& sizes() const { return sizes_; }  // bytes of each
  std::vector<std::pair<const void*, size_t>> memory() const;  // of matrices, to check on which node their pages are

 private:
  struct Weight {
    Packed packed;  // k = 0: a vector
    uint64_t source_hash;
    std::vector<float> values;
    int experts = 1;              // matrices like `packed`, one after the other
    std::vector<int> order = {};  // packed.order's
    bool shared = false;          // another model's
  };
  // Calls part(matrix, rows, row offset in it, rows before) for each matrix of a stack that contains any of the rows
  // [row_offset, row_offset + rows).
  template <typename Part>
  void each_expert(int id, int64_t rows, int64_t row_offset, Part part) const {
    const int64_t n = matrix(id).n;
    for (int64_t done = 0; done < rows;) {
      const int64_t row = row_offset + done, count = std::min(rows - done, n - row % n);
      part(matrix(id, (int)(row / n)), count, row % n, done);
      done += count;
    }
  }
  void make_huge_pages();
  int64_t fill_rows(const Packed& m, const SourceRows& source, int64_t r0, int64_t r1) const;
  void check_quantized(int id, const StoredRows& source, int64_t rows, int64_t row_offset, int64_t column) const;
  const Packed& checked_part(int id, int64_t rows, int64_t row_offset, int64_t column, int64_t columns,
                             int64_t group) const;

  Pool& pool_;
  const Kernels& k_;
  Arena arena_;
  size_t huge_bytes_ = 0;   // of arena_.shared(), for which huge pages were asked
  size_t small_bytes_ = 0;  // of parts of it that are not all in huge pages
  std::vector<Weight> weights_;
  std::vector<double> sizes_;
};

}  // namespace as
