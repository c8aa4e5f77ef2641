#pragma once
#include <string>
#include <vector>

#include "cpu/kernels/kernels.h"

namespace as {

// Instruction sets that both this CPU and this build support, best first.
std::vector<std::string> supported_isas();

}  // namespace as
