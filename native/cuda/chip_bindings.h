// Python's view of chips and of what kernels cost on them.
#pragma once
#include <pybind11/pybind11.h>

#include "cuda/kernels/common/chip.h"

namespace as::cuda {

// From a dict with the fields of ChipCosts; {}: the defaults. Throws std::invalid_argument for another one.
ChipCosts costs_of(const pybind11::dict& fields);
void bind_chips(pybind11::module_& m);

}  // namespace as::cuda
