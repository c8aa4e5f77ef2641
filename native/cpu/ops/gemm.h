// A matrix times rows of activations: how threads divide a GEMM, and how rows are converted for the kernels.
#pragma once
#include "cpu/core.h"
#include "cpu/ops/work_counter.h"

namespace as {

// With fewer rows, reading weights is the bottleneck: panels are read as one stream.
constexpr int kManyRows = 33;

// With few rows, this many panels of gate are read as one stream, then as many of up. Their results stay in the cache.
constexpr int kGatedPanels = 8;

// The panels and rows of a GEMM that one thread computes.
struct WorkUnit {
  int p0, p1, r0, r1;
  bool empty() const { return r0 >= r1 || p0 >= p1; }
};

// Divides panels and, if there are many rows, also rows, so that the parts are as equal as possible.
WorkUnit work_unit_of(int thread, int threads, int panels, int rows);

// From this many rows on, threads take units of GEMMs as they become free.
constexpr int kTakenRows = 64;
// From this many threads on, they take the last panels of fewer rows so, too. Among fewer threads, one that is slower
// than the others costs less than short units.
constexpr int kTakingThreads = 4;
// Fewest panels of a unit of many rows, unless the matrix is small.
constexpr int kFewestPanels = 3;

// Panels and rows in several units for each thread. Consecutive units have the same panels, which threads then read at
// about the same time.
class WorkUnits {
 public:
  WorkUnits(int threads, int panels, int rows);
  int size() const { return row_parts_ * panel_parts_; }
  WorkUnit operator[](int i) const;

 private:
  int panels_, rows_, row_parts_, panel_parts_;
};

// Bytes of scratch memory for `rows` converted rows of a GEMM's input, or for one row in a copy for each thread.
size_t converted_bytes(const Core& core, const Packed& m, int rows);

// Bytes of scratch memory that head_linear needs for `rows` rows: each thread converts the rows of its heads.
size_t head_linear_bytes(const Core& core, const Packed& m, int rows);

// Rows `range` of the `rows` of `x` in the kernels' format. A converted tensor is used as it is. Otherwise threads
// divide the range and convert it into `scratch`; a single row is converted by every thread, which takes less time than
// a barrier. Returns false if another thread has failed.
bool activations(const Core& core, int thread, const Packed& m, const Tensor& x, int rows, const RowRange& range,
                 const Buffer& scratch, Activations& a);

}  // namespace as
