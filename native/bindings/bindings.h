// Declarations that the bindings' files share.
#pragma once
#include <pybind11/pybind11.h>

#include <string>

#include "cpu/kernels/span_layout.h"
#include "program/scale_layout.h"

namespace as {

// "float32", "bfloat16", "int8" or "uint4". Throws std::invalid_argument for another name.
DType cache_dtype_of(const std::string& name);

// A ScaleLayout from keyword arguments. Throws TypeError for unknown names.
ScaleLayout scale_layout_of(const pybind11::kwargs& fields);
constexpr const char* kLayoutFields =
    "How the scales are laid out, by keywords (program/scale_layout.h): scales, zeros, group_rows, permuted, "
    "super_group, scale_bits, center.";

void bind_roofline(pybind11::module_& m);
void bind_executor(pybind11::module_& m);
void bind_kernels(pybind11::module_& m);
void bind_program(pybind11::module_& m);
void bind_sampler(pybind11::module_& m);
void bind_shared_memory(pybind11::module_& m);
void bind_token_ids(pybind11::module_& m);

}  // namespace as
