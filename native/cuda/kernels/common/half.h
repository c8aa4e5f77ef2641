// Kernels of floats of 16 bits are compiled from one source once for each type (setup.py), as the CPU's are for each
// instruction set: AS_HALF is the type's name, which is also the C++ namespace of these kernels and of all that kernels
// share. Sources that do not name it are compiled once, for bfloat16.
#pragma once
#include "cuda/kernels/common/types.h"

#ifndef AS_HALF
#define AS_HALF bf16
#endif

namespace as {
namespace cuda {

namespace AS_HALF {
constexpr Half kHalf = Half::AS_HALF;
// Of weights and caches; else of 16 bits alone. (Templates that take it leave out what others name, for good.)
constexpr bool kAllFormats = kHalf == Half::bf16;
}  // namespace AS_HALF
using namespace AS_HALF;

}  // namespace cuda
}  // namespace as
