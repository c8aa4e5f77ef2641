// A kernel that waits in vain, for tests of bounded waits.
#include "cuda/kernels/common/stall.h"
#include "cuda/kernels/common/waits.cuh"

namespace as::cuda {
namespace {

__global__ void stall_kernel(const int* flag, int* given_up) {
  after_previous();
  await_flag(flag, Waiter::gemm_stream_k, given_up, [](int value) { return value < 0; }, 1 << 10);
}

}  // namespace

void stall(const Queue& queue) {
  start(queue, stall_kernel, 1, 32, 0, static_cast<const int*>(queue.scratch.given_up), queue.scratch.given_up);
}

}  // namespace as::cuda
