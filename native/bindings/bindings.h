// What the files of bindings share.
#pragma once
#include <string>

#include "cpu/kernels/span_layout.h"

namespace as {

// "float32", "bfloat16", "int8" or "uint4"; std::invalid_argument for anything else.
DType cache_dtype_of(const std::string& name);

}  // namespace as
