#pragma once
#include <string>
#include <vector>

#include "cpu/kernels/kernels.h"

namespace as {

// Instruction sets that both this CPU and this build support, best first.
std::vector<std::string> supported_isas();

// Changes the kernels in use to those of another supported instruction set. Only before any model or shared memory
// exists. Throws std::runtime_error if it is not supported.
void use_isa(const std::string& name);

}  // namespace as
