// Memory that adapters' products take within a step.
#pragma once
#include "cpu/adapters.h"
#include "cpu/core.h"

namespace as {

struct LoraBytes {
  size_t rows = 0, inner = 0, prepared = 0, added = 0;  // of Scratch's buffers

  // As much as rows of this width need, with so many targets of one linear.
  void reserve(const Kernels& k, int threads, const AdapterLimits& limits, int rows, int width, int targets);
  size_t total() const { return rows + inner + prepared + added; }
};

}  // namespace as
