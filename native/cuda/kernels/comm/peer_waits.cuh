// How kernels of the ranks' GPUs wait for each other: flags in the memory of each GPU, and a bounded wait.
#pragma once
#include "cuda/kernels/comm/sum_ranks.h"
#include "cuda/kernels/common/device.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace {

constexpr int kLooks = 64;  // polls between two reads of the clock

__device__ inline uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

__device__ inline void tell(uint32_t* flag, uint32_t call) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(call) : "memory");
}

__device__ inline bool has_come(const uint32_t* flag, uint32_t call) {
  uint32_t seen;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
  return (int32_t)(seen - call) >= 0;
}

// Waits for other ranks, up to the time limit. The host's memory is only written: when all CTAs read it, the reads took
// a quarter of a millisecond, and this rank was late for the next sum.
class Wait {
 public:
  __device__ explicit Wait(const Peers& peers, PeerWait what)
      : peers_(peers), what_(what), given_up_(peers.own() + kMaxRanks) {}
  // Whether to go on waiting for rank r. Once a rank has missed the limit, all waits return false. The results are then
  // useless, and the host reports it (Exchange::check_waits).
  __device__ bool goes_on(int r) {
    if (++looks_ % kLooks) return true;
    const uint64_t now = nanoseconds();
    if (looks_ == kLooks) began_ = now;
    if (*given_up_) return false;
    if (now - began_ <= peers_.limit) return true;
    *given_up_ = 1;
    *const_cast<volatile int*>(peers_.failed) = failure_of(what_, r);
    __threadfence_system();
    return false;
  }

 private:
  const Peers& peers_;
  const PeerWait what_;
  volatile uint32_t* given_up_;
  int looks_ = 0;
  uint64_t began_ = 0;
};

}  // namespace
}  // namespace AS_DTYPE16
}  // namespace as::cuda
