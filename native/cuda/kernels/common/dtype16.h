// Kernels of floats of 16 bits are compiled from one source once for each type (setup.py), as the CPU's are for each
// instruction set: AS_DTYPE16 is the type's name, which is also the C++ namespace of these kernels and of all that
// kernels share. Sources that do not name it are compiled once, for bfloat16.
#pragma once
#include "cuda/kernels/common/types.h"

#ifndef AS_DTYPE16
#define AS_DTYPE16 bf16
#endif

namespace as::cuda {

namespace AS_DTYPE16 {
constexpr DType16 kDType16 = DType16::AS_DTYPE16;
// Of weights and caches; else of 16 bits alone. (Templates that take it leave out what others name, for good.)
constexpr bool kAllFormats = kDType16 == DType16::bf16;
}  // namespace AS_DTYPE16
using namespace AS_DTYPE16;

}  // namespace as::cuda
