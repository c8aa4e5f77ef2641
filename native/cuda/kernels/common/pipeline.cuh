// Barriers in shared memory that signal when copies have arrived and when their stage may be overwritten; on all
// supported chips.
#pragma once
#include "cuda/kernels/common/device.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {

__device__ inline void init_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ inline void arrive(uint32_t barrier) {
  asm volatile("{ .reg .b64 state;\n mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(barrier) : "memory");
}
// Arrives when all earlier copies of this thread (copy_16()) have arrived.
__device__ inline void arrive_with_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
// Lets the barrier wait for earlier copies of this thread (copy_16()), beside the arrivals that it expects.
__device__ inline void arrive_too_with_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void wait_barrier(uint32_t barrier, int parity) {
  asm volatile(
      "{ .reg .pred done;\n"
      "again: "
#if __CUDA_ARCH__ >= 900
      "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
#else
      "mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
#endif
      "@!done bra again; }" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// A position in a pipeline whose number of stages is known at launch.
struct PipelineStage {
  int stage = 0, parity = 0;

  __device__ void advance(int by, int stages) {
    for (stage += by; stage >= stages; stage -= stages) parity ^= 1;
  }
  __device__ PipelineStage after(int by, int stages) const {
    PipelineStage place = *this;
    place.advance(by, stages);
    return place;
  }
};

}  // namespace AS_DTYPE16
}  // namespace as::cuda
