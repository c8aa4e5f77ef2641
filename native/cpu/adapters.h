// LoRA adapters (Hu et al., 2021): for rows with an adapter, scale * B (A x) is added to the output of linear layers.
// Adapters are loaded and unloaded while a model runs. A step's items say which adapter their rows use (batch/batch.h).
#pragma once
#include <memory>
#include <vector>

#include "batch/batch.h"
#include "cpu/kernels/kernels.h"
#include "cpu/memory.h"

namespace as {

// Bytes of one target's two matrices.
size_t adapter_bytes(int rank, int inputs, int columns, Format format);

// How many adapters of what size a compiled program has memory for.
struct AdapterLimits {
  int count = 0;  // at once; 0: rows have no adapters
  int max_rank = 0;
  Format format = Format::f32;  // of their matrices: float32 or bfloat16
};

// One adapter's matrices. The thread that loads it packs them while steps run.
class Adapter {
 public:
  // For a range of one linear's columns: A [rank, in features], B [columns, rank].
  struct Pair {
    Packed a, b;
    float scale;

    int rank() const { return a.n; }
  };

  // targets: the number of targets in the program's ops.
  Adapter(const AdapterLimits& limits, int targets);
  // Sets a target's matrices: `a` with rank rows and `b` with `columns` rows, of any type. Returns the number of NaN
  // and infinite values. Throws std::invalid_argument for an invalid target or rank.
  int64_t set(int target, const SourceRows& a, int rank, const SourceRows& b, int columns, float scale);
  // Null: the adapter does not change this target's columns.
  const Pair* pair(int target) const { return pairs_[target].a.k ? &pairs_[target] : nullptr; }
  int targets() const { return (int)pairs_.size(); }

 private:
  Packed packed(const SourceRows& source, int rows, int panel);

  const AdapterLimits limits_;
  Arena arena_;
  std::vector<Pair> pairs_;
};

// The rows of a step that have an adapter, grouped by adapter.
struct AdaptedRows {
  struct Group {
    const Adapter* adapter;
    int begin, count;  // of `rows`
  };
  std::vector<int> rows;
  std::vector<Group> groups;
  std::vector<const Adapter*> of_row;  // of each row of the step, null for none
};

// The loaded adapters, and a step's rows by adapter.
class Adapters {
 public:
  explicit Adapters(const AdapterLimits& limits) : limits(limits), loaded_(limits.count) {}

  // Called between steps. null: unloads the adapter with this index.
  void set(int index, std::shared_ptr<const Adapter> adapter) { loaded_.at(index) = std::move(adapter); }
  // Returns whether any row of the step has an adapter. Throws std::invalid_argument for one that is not loaded.
  bool begin(const Batch& batch);

  const AdapterLimits limits;
  AdaptedRows all, outputs;  // all rows of the step, and its rows with outputs

 private:
  std::vector<std::shared_ptr<const Adapter>> loaded_;
};

}  // namespace as
