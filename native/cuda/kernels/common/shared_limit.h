#pragma once
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>

namespace as::cuda {

// Bytes of shared memory that a CTA may have on the current GPU: 227 KiB on Hopper, 163 on the A100, 99 on many others.
inline int max_shared() {
  int device = 0, bytes = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  // For tests that pretend to run on a chip of capability 8.6 or 8.9 (Device).
  static const char* const pretended = std::getenv("ALLSPARK_TEST_CAPABILITY");
  return pretended && std::atoi(pretended) % 10 ? std::min(bytes, 99 << 10) : bytes;
}

}  // namespace as::cuda
