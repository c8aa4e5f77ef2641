// Scratch memory of lora ops.
#pragma once
#include "cpu/adapters.h"

namespace as {

// Bytes for `rows` rows and `targets` targets of one linear.
size_t lora_bytes(const AdapterLimits& limits, int rows, int targets);

}  // namespace as
