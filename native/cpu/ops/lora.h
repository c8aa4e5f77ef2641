// Scratch memory of lora and expert_lora ops.
#pragma once
#include "cpu/adapters.h"

namespace as {

// Rows that are multiplied together.
constexpr int kLoraRows = 32;

// Floats of A x for one target.
int inner_width(const AdapterLimits& limits);
// Bytes for `rows` rows and `targets` targets of one linear.
size_t lora_bytes(const AdapterLimits& limits, int rows, int targets);

}  // namespace as
