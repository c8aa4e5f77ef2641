// For tests of bounded waits (waits.cuh).
#pragma once
#include "cuda/kernels/common/types.h"

namespace as::cuda {

// Waits for a flag that no one sets, as gemm_stream_k would, and soon gives up: the process loses the device.
void stall(const Queue& queue);

}  // namespace as::cuda
