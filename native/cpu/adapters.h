// Adapters by low-rank matrices (LoRA, Hu et al., 2021): a row with one has scale * B (A x) added to what linear layers
// make of it. They come and go while a model runs; which one a row has is its item's affair (batch/batch.h).
#pragma once
#include <memory>
#include <vector>

#include "batch/batch.h"
#include "cpu/kernels/kernels.h"
#include "cpu/memory.h"

namespace as {

// Bytes of one target's two matrices.
size_t adapter_bytes(int rank, int inputs, int columns, Format format);

// What a compiled program has room for.
struct AdapterLimits {
  int count = 0;  // at once; 0: rows have none
  int max_rank = 0;
  Format format = Format::f32;  // of their matrices: float32 or bfloat16
};

// One adapter's matrices, packed by whoever loads it: steps go on meanwhile.
class Adapter {
 public:
  // Of one linear's columns: A [rank, in features], B [columns, rank].
  struct Pair {
    Packed a, b;
    float scale;

    int rank() const { return a.n; }
  };

  // targets: how many the program's ops name.
  Adapter(const AdapterLimits& limits, int targets);
  // Gives a target its matrices: `a` with rank rows, `b` with as many columns, of any type. Returns how many values are
  // NaN or infinite. Throws std::invalid_argument for a target or a rank that cannot be.
  int64_t set(int target, const SourceRows& a, int rank, const SourceRows& b, int columns, float scale);
  // Null: the adapter leaves this target's columns as they are.
  const Pair* pair(int target) const { return pairs_[target].a.k ? &pairs_[target] : nullptr; }
  int targets() const { return (int)pairs_.size(); }

 private:
  Packed packed(const SourceRows& source, int rows, int panel);

  const AdapterLimits limits_;
  Arena arena_;
  std::vector<Pair> pairs_;
};

// The rows of a step that have an adapter, those of one adapter next to each other.
struct AdaptedRows {
  struct Group {
    const Adapter* adapter;
    int begin, count;  // of `rows`
  };
  std::vector<int> rows;
  std::vector<Group> groups;
};

// The adapters that are loaded, and a step's rows by adapter.
class Adapters {
 public:
  explicit Adapters(const AdapterLimits& limits) : limits(limits), loaded_(limits.count) {}

  // Between steps. null: there is none of this index any more.
  void set(int index, std::shared_ptr<const Adapter> adapter) { loaded_.at(index) = std::move(adapter); }
  // Whether any row of the step has one. Throws std::invalid_argument for one that is not loaded.
  bool begin(const Batch& batch);

  const AdapterLimits limits;
  AdaptedRows all, outputs;  // of the step's rows, and of its rows with outputs

 private:
  std::vector<std::shared_ptr<const Adapter>> loaded_;
};

}  // namespace as
