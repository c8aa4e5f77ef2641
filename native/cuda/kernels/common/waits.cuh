// Flags by which the CTAs of a launch wait for each other. A CTA waits only for CTAs that run at the same time or have
// started before it, so waits are short. Each is bounded all the same: if another process takes SMs away, the kernel
// ends with an error that names it instead of hanging.
#pragma once
#include "cuda/kernels/common/device.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {

constexpr int kMaxLooks = 1 << 26;  // polls until a wait fails; at least half a minute

// Flags that publish a CTA's earlier writes to other CTAs.
__device__ inline void set_flag(int* flag, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}
__device__ inline int get_flag(const int* flag) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

// Waits until done(value) is true for the value of a flag. given_up: in host memory (errors.h).
template <typename Done>
__device__ inline void await_flag(const int* flag, Waiter waiter, int* given_up, const Done& done,
                                  int max_looks = kMaxLooks) {
  for (int looks = 0; !done(get_flag(flag)); looks++)
    if (looks == max_looks) {
      *static_cast<volatile int*>(given_up) = (int)waiter;
      __threadfence_system();
      __trap();
    }
}
__device__ inline void await_flag(const int* flag, Waiter waiter, int* given_up) {
  await_flag(flag, waiter, given_up, [](int value) { return value != 0; });
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
