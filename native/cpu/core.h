// What the ops of one rank share, and the tensors that they pass rows in.
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
  Communicator* peers;  // null: one rank
  Pool& pool;
  const Kernels& k;
};

// Rows of which there is one for each row of a step or for each of its outputs, or entries of these that a router has
// formed.
struct Tensor {
  float* data = nullptr;
  int width = 0;
  bool of_outputs = false;
  int row_set = 0, times = 1;  // the program's; entries for each row
  // Rows as the linear with this matrix wants them, which alone reads the tensor: so many bytes each (PreparedLayout)
  // instead of floats, or made of them.
  const Packed* prepared_for = nullptr;
  size_t prepared = 0;
  char* prepared_rows = nullptr;
  int prepared_from = 1;  // of fewer rows floats are left, which the linear prepares

  int rows(const Batch& batch) const { return times * (int)(of_outputs ? batch.outputs.size() : batch.rows.size()); }
  float* row(int r) const { return data + (size_t)r * width; }
  char* bytes(int r) const { return prepared_rows + (size_t)r * prepared; }
  bool is_prepared(int rows) const { return prepared_for && rows >= prepared_from; }
};

// Memory that ops need within their run, each in turn.
struct Scratch {
  Buffer gated;     // gate and up of few rows; of experts, of each thread
  Buffer rows;      // floats: one row of each thread
  Buffer prepared;  // prepared rows of a product's input, or one of each thread
  Buffer lora;      // of adapters, A x (ops/lora.h)
  size_t row_bytes = 0;

  float* row(int thread) const { return reinterpret_cast<float*>(rows.as() + thread * row_bytes); }
};

// An op with its tensors and weights. All threads of a rank run it; when it returns on one, that thread's part is done,
// not yet that of others.
class BoundOp {
 public:
  virtual ~BoundOp() = default;
  // Whether a step has anything to do for it. If not, neither of the others is called.
  virtual bool needed(const Batch&) const { return true; }
  // Before the ops of a step run, by one thread.
  virtual void begin(const Batch&) {}
  virtual void run(const Batch& batch, int thread) = 0;
};

inline std::pair<int, int> my_rows(const Core& core, const Tensor& t, const Batch& batch, int thread) {
  return part(t.rows(batch), thread, core.pool.size());
}

}  // namespace as
