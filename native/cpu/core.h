// What the ops of one rank share, and the tensors that they exchange.
#pragma once
#include <vector>

#include "batch/batch.h"
#include "comm/communicator.h"
#include "cpu/kernels/kernels.h"
#include "cpu/memory.h"
#include "cpu/pool.h"

namespace as {

struct Core {
  int rank, world;
  Communicator* peers;  // null: a single rank
  Pool& pool;
  const Kernels& k;
};

// A tensor has one row for each row of a step, for each of its outputs, or for each entry that a router makes of these.
struct Tensor {
  float* data = nullptr;
  int width = 0;
  bool of_outputs = false;
  int row_set = 0, times = 1;  // of the program; entries for each row
  // Not null if rows are stored in the format (ConvertedLayout) of the only linear that reads them: that linear's
  // matrix. A row takes `converted` bytes, in place of or besides its floats.
  const Packed* converted_for = nullptr;
  size_t converted = 0;
  char* converted_rows = nullptr;
  int converted_from = 1;  // with fewer rows, floats are stored and the linear converts them

  int rows(const Batch& batch) const { return times * (int)(of_outputs ? batch.outputs.size() : batch.rows.size()); }
  float* row(int r) const { return data + (size_t)r * width; }
  char* bytes(int r) const { return converted_rows + (size_t)r * converted; }
  bool is_converted(int rows) const { return converted_for && rows >= converted_from; }
};

// Temporary memory that ops use in turn.
struct Scratch {
  Buffer gated;      // gate and up of few rows; for experts, of each thread
  Buffer rows;       // floats: one row of each thread
  Buffer converted;  // converted rows of a GEMM's input, or one of each thread
  Buffer lora;       // A x of adapters (ops/lora.h)
  Buffer indexed;    // of indexers (ops/indexer.h)
  size_t row_bytes = 0;

  float* row(int thread) const { return reinterpret_cast<float*>(rows.as() + thread * row_bytes); }
};

// An op with its tensors and weights. All threads of a rank run it. When run() returns on a thread, that thread's part
// is complete, but not yet those of others.
class BoundOp {
 public:
  virtual ~BoundOp() = default;
  // Returns whether a step needs the op. If not, begin() and run() are not called.
  virtual bool needed(const Batch&) const { return true; }
  // Called by one thread before the ops of a step run.
  virtual void begin(const Batch&) {}
  virtual void run(const Batch& batch, int thread) = 0;
};

inline std::pair<int, int> my_rows(const Core& core, const Tensor& t, const Batch& batch, int thread) {
  return part(t.rows(batch), thread, core.pool.size());
}

}  // namespace as
