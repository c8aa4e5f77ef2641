// What kernels cost on a GPU (kernels/common/chip.h), measured.
#pragma once
#include <cstddef>
#include <string>

#include "cuda/kernels/common/chip.h"

namespace as::cuda {

// What the driver says of a GPU, which bounds what measuring may find. clock: the fastest, in GHz; memory: bytes a
// nanosecond; both 0 if unknown. capability: its own, whatever it pretends for tests.
struct ChipLimits {
  std::string name, uuid;
  int capability = 0, sms = 0, shared_bytes = 0;
  double clock = 0, memory = 0;
};
ChipLimits limits_of(int device);

struct MeasuredCosts {
  ChipCosts costs;
  std::string doubt;  // why they should not be kept; "" if they should
};
// Takes about a third of a second and kMeasuringBytes of the GPU's memory. Throws std::runtime_error if there is not
// enough memory.
constexpr size_t kMeasuringBytes = 448 << 20;
MeasuredCosts measure_costs(int device);

// Why the costs cannot be those of such a chip: a value is far from what the limits imply, for example because another
// process used the GPU meanwhile. "" if they can.
std::string why_implausible(const ChipCosts& costs, const ChipLimits& limits);

}  // namespace as::cuda
