// What the ops of one rank share, and the tensors that they exchange.
#pragma once
#include <vector>

#include "batch/batch.h"
#include "comm/communicator.h"
#include "cpu/kernels/kernels.h"
#include "cpu/memory.h"
#include "cpu/pool.h"

namespace as {

class ExpertExchange;

struct Core {
  int rank, world;
  Communicator* peers;  // null: a single rank
  Pool& pool;
  const Kernels& k;
  ExpertExchange* exchange = nullptr;  // of a mixed group
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

// A part of an op that runs by itself: [begin, end) in kOpPositions-ths of its rows, or of its work.
struct Share {
  int begin = 0, end = kOpPositions;
  bool ends() const { return end == kOpPositions; }
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
  // The same in shares, in order. After all of them the bits are those of run(). What cannot be divided runs with the
  // last share.
  virtual void run_share(const Batch& batch, const Share& share, int thread) {
    if (share.ends()) run(batch, thread);
  }
};

// Rows of an op.
struct RowRange {
  int begin = 0, end = 0;
  int size() const { return end - begin; }
  // The rows of a thread.
  RowRange of(int thread, int threads) const {
    const auto [r0, r1] = part(size(), thread, threads);
    return {begin + r0, begin + r1};
  }
};

// Shares end after a multiple of so many rows, which all ranks know.
constexpr int kShareRows = 32;

// An op that computes each row by itself, so that it can be divided by rows.
class RowOp : public BoundOp {
 public:
  void run(const Batch& batch, int thread) override { run_rows(batch, {0, rows(batch)}, thread); }
  void run_share(const Batch& batch, const Share& share, int thread) override {
    const RowRange own = rows_of(share, rows(batch));
    if (own.size()) run_rows(batch, own, thread);
  }

 protected:
  virtual int rows(const Batch& batch) const = 0;
  virtual void run_rows(const Batch& batch, const RowRange& rows, int thread) = 0;

  static RowRange rows_of(const Share& share, int rows) {
    const auto end = [&](int position) {
      return position == kOpPositions ? rows : (int)((int64_t)rows * position / kOpPositions / kShareRows * kShareRows);
    };
    return {end(share.begin), end(share.end)};
  }
};

inline std::pair<int, int> my_rows(const Core& core, const Tensor& t, const Batch& batch, int thread) {
  return part(t.rows(batch), thread, core.pool.size());
}

}  // namespace as
