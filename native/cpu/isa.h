#pragma once
#include <string>
#include <vector>

#include "cpu/kernels/kernels.h"

namespace as {

// Instruction sets that this CPU has and this build has kernels for, best first.
std::vector<std::string> supported_isas();

}  // namespace as
