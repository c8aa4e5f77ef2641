// Adapters (kernels/lora/lora.cu): they come and go while a model runs; kernels find those of a step's rows in a
// table.
#pragma once
#include <memory>
#include <vector>

#include "batch/batch.h"
#include "cuda/kernels/lora/lora.h"
#include "cuda/memory/device.h"
#include "cuda/weights/weights.h"
#include "program/program.h"

namespace as {
namespace cuda {

// What a compiled program has room for.
struct AdapterLimits {
  int count = 0;  // at once; 0: rows have none
  int max_rank = 0;
  bool is_dtype16 = false;  // their matrices are of 16 bits; else float32
  DType16 type = DType16::bf16;
};

// Bytes of one target's two matrices.
size_t adapter_bytes(int rank, int inputs, int columns, bool is_dtype16);

// One adapter's matrices, filled by whoever loads it, in the host's memory: steps go on meanwhile.
class Adapter {
 public:
  // A target's columns, and what the linear that makes them reads.
  struct Target {
    int inputs = 0, columns = 0;
  };
  Adapter(const AdapterLimits& limits, std::vector<Target> targets)
      : limits_(limits), targets_(std::move(targets)), pairs_(targets_.size()) {}

  // Gives a target its matrices, all columns of `a` [rank, in features] and `b` [columns, rank]. Returns how many
  // values are NaN or infinite, or would be as float16. Throws std::invalid_argument for a target or sizes that cannot
  // be.
  int64_t set(int target, const HostRows& a, const HostRows& b, float scale);
  // Copies all that was set to the GPU in use. Returns what the table has of each target.
  std::vector<LoraPair> upload();

 private:
  struct Pair {
    size_t a = 0, b = 0;  // offsets
    int rank = 0;
    float scale = 0;
  };
  // Returns where a matrix [rows, columns] is, in `whole_rows` rows of `stride` values, filled up with zeros;
  // value(row, column) gives them as floats.
  template <typename Value>
  size_t put(int rows, int columns, int whole_rows, int stride, const Value& value);

  const AdapterLimits limits_;
  const std::vector<Target> targets_;
  std::vector<Pair> pairs_;
  std::vector<char> bytes_;
  Memory memory_;
};

// The adapters that are loaded.
class Adapters {
 public:
  Adapters(const Device& device, const AdapterLimits& limits, const Program& program);

  // Between steps, or while none names the index. null: there is none of it any more.
  void set(int index, std::shared_ptr<Adapter> adapter);
  std::shared_ptr<Adapter> make() const { return std::make_shared<Adapter>(limits, targets_); }
  const LoraPair* table() const { return table_.as<LoraPair>(); }  // [adapters, targets]
  int targets() const { return (int)targets_.size(); }
  const AdapterLimits limits;

 private:
  const Device& device_;
  std::vector<Adapter::Target> targets_;
  std::vector<std::shared_ptr<Adapter>> loaded_;
  Memory table_;
};

}  // namespace cuda
}  // namespace as
