// Instead of native/cuda/kernels/common/cluster.cuh.
#pragma once
#include "cuda/kernels/common/device.cuh"

namespace as {
namespace cuda {

template <typename Kernel>
int clusters_at_once(Kernel, int size, int, size_t) {
  return sm_count() / size;
}

inline void meet_cluster() {
  __syncthreads();
  if (emulated::cluster) {
    if (threadIdx.x == 0) emulated::cluster->meet();
    __syncthreads();
  }
}

template <typename T>
const T& in_cta(const T& own, unsigned cta) {
  if (!emulated::cluster) return own;
  const ptrdiff_t distance = reinterpret_cast<const char*>(&own) - &emulated::anchor;
  return *reinterpret_cast<const T*>(emulated::cluster->anchors[cta] + distance);
}

}  // namespace cuda
}  // namespace as
