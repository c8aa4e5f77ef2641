// The integer products of this instruction set, by format.
#pragma once
#include <type_traits>

#if defined(AS_ISA_ARM)
#include "cpu/kernels/integers_arm.h"
#else
#include "cpu/kernels/integers_x86.h"
#endif

namespace as {
namespace AS_ISA {
namespace {

// Calls work(kernels of w's format, number of planes as a constant).
template <typename Work>
AS_INLINE void with_format(const Packed& w, Work&& work) {
  constexpr std::integral_constant<int, 1> one;
  constexpr std::integral_constant<int, 2> two;
  switch (w.format) {
    case Format::int8:
      return work(WideBytes(), two);
    case Format::int4:
      return work(WideNibbles<PlainCodes>(), two);
    case Format::e2m1a16:
      return work(WideNibbles<E2M1Codes>(), two);
    case Format::w8a8:
      return work(Bytes(), one);
    default:
      return work(Nibbles(), one);
  }
}

}  // namespace
}  // namespace AS_ISA
}  // namespace as
