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

// Whether kernels that can multiply one row with several panels of weights in turn (kernels/tile.h) do so. The bits are
// the same. At first by the processor; use_streams() is for tests and benchmarks, while nothing computes.
bool uses_streams();
void use_streams(bool several);

}  // namespace as
