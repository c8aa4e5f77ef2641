// Copies of matrices as the CPU's kernels read them, which the CUDA module takes.
#pragma once
#include <cstdint>
#include <vector>

#include "cpu/kernels/format.h"

namespace as {

struct Panels {
  Packed layout;  // without the weights' address
  std::vector<std::vector<uint8_t>> experts;
  std::vector<int> order;  // layout.order's
};

}  // namespace as
