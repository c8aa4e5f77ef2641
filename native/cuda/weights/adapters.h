// LoRA adapters (kernels/lora/lora.cu). They can be loaded and unloaded while a model runs. Kernels find a row's
// adapter in a table.
#pragma once
#include <memory>
#include <vector>

#include "batch/batch.h"
#include "cuda/kernels/lora/lora.h"
#include "cuda/memory/device.h"
#include "cuda/weights/weights.h"
#include "program/program.h"

namespace as::cuda {

// How many adapters a compiled program has room for, and of which size and type.
struct AdapterLimits {
  int count = 0;  // loaded at once; 0: rows have no adapters
  int max_rank = 0;
  bool is_dtype16 = false;  // their matrices have 16 bits, otherwise float32
  DType16 type = DType16::bf16;
};

// Bytes of one target's two matrices.
size_t adapter_bytes(int rank, int inputs, int columns, bool is_dtype16);

// One adapter's matrices in host memory. Any thread may fill them while steps run.
class Adapter {
 public:
  // The columns of a target, and the input features of its linear.
  struct Target {
    int inputs = 0, columns = 0;
  };
  Adapter(const AdapterLimits& limits, std::vector<Target> targets)
      : limits_(limits), targets_(std::move(targets)), pairs_(targets_.size()) {}

  // Sets a target's matrices, `a` [rank, in features] and `b` [columns, rank]. Returns how many values are NaN or
  // infinite, or too large if matrices are float16. Throws std::invalid_argument for an unknown target or wrong sizes.
  int64_t set(int target, const HostRows& a, const HostRows& b, float scale);
  // Copies all matrices to the current GPU. Returns the table's row: an entry for each target.
  std::vector<LoraPair> upload();

 private:
  struct Pair {
    size_t a = 0, b = 0;  // offsets
    int rank = 0;
    float scale = 0;
  };
  // Appends a matrix [rows, columns], padded with zeros to whole_rows rows of `stride` values; value(row, column)
  // returns floats. Returns its offset in bytes.
  template <typename Value>
  size_t put(int rows, int columns, int whole_rows, int stride, const Value& value);

  const AdapterLimits limits_;
  const std::vector<Target> targets_;
  std::vector<Pair> pairs_;
  std::vector<char> bytes_;
  Memory memory_;
};

// The loaded adapters.
class Adapters {
 public:
  Adapters(const Device& device, const AdapterLimits& limits, const Program& program);

  // Only between steps, or while no plan refers to the index. null: removes the adapter.
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

}  // namespace as::cuda
