// What the files of bindings share.
#pragma once
#include <pybind11/pybind11.h>

#include <string>

#include "cpu/kernels/span_layout.h"

namespace as {

// "float32", "bfloat16", "int8" or "uint4"; std::invalid_argument for anything else.
DType cache_dtype_of(const std::string& name);

void bind_ceilings(pybind11::module_& m);
void bind_executor(pybind11::module_& m);
void bind_kernels(pybind11::module_& m);
void bind_program(pybind11::module_& m);
void bind_sampler(pybind11::module_& m);
void bind_window(pybind11::module_& m);

}  // namespace as
