// Memory that adapters' products take within a step.
#pragma once
#include "cpu/adapters.h"

namespace as {

// Of so many rows, and so many targets of one linear.
size_t lora_bytes(const AdapterLimits& limits, int rows, int targets);

}  // namespace as
