#pragma once
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>

namespace as::cuda {

// Bytes of shared memory that a CTA may have on a GPU, by default the current one: 227 KiB on Hopper, 163 on the A100,
// 99 on many others.
inline int max_shared(int device) {
  int bytes = 0;
  cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  // For tests that pretend to run on a chip of capability 8.6 or 8.9 (Device).
  static const char* const pretended = std::getenv("ALLSPARK_TEST_CAPABILITY");
  return pretended && std::atoi(pretended) % 10 ? std::min(bytes, 99 << 10) : bytes;
}
inline int max_shared() {
  int device = 0;
  cudaGetDevice(&device);
  return max_shared(device);
}

}  // namespace as::cuda
