// Kernels of 16-bit floats are compiled from one source for each type (setup.py). AS_DTYPE16 is the type's name and the
// C++ namespace of these kernels and of the device code they share. Sources that do not name it are compiled once, for
// bfloat16.
#pragma once
#include "cuda/kernels/common/types.h"

#ifndef AS_DTYPE16
#define AS_DTYPE16 bf16
#endif

namespace as::cuda {

namespace AS_DTYPE16 {
constexpr DType16 kDType16 = DType16::AS_DTYPE16;
// Whether all formats of weights and caches are compiled; otherwise only 16-bit ones. Templates test it to drop the
// rest.
constexpr bool kAllFormats = kDType16 == DType16::bf16;
}  // namespace AS_DTYPE16
using namespace AS_DTYPE16;

}  // namespace as::cuda
