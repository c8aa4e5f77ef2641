// Clusters of CTAs that share work. A kernel that uses these functions runs on every chip with one CTA in each cluster,
// and on 9.0 with several, which are adjacent along x and fill the grid's x dimension.
#pragma once
#include <algorithm>

#include "cuda/kernels/common/device.cuh"

namespace as::cuda {

// How many clusters of `size` CTAs run at once. These may be fewer than SMs have room for, because the SMs of a cluster
// are neighbours.
template <typename Kernel>
int clusters_at_once(Kernel kernel, int size, int threads, size_t shared) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = size, attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(size), config.blockDim = dim3(threads), config.dynamicSmemBytes = shared;
  config.attrs = &attribute, config.numAttrs = 1;
  int found = 0;
  allow_shared(kernel, shared);
  if (cudaOccupancyMaxActiveClusters(&found, kernel, &config) != cudaSuccess) cudaGetLastError();
  return found > 0 ? found : std::max(1, sm_count() / size);
}

namespace AS_DTYPE16 {

// Synchronizes all threads of the cluster, and makes their writes visible to one another.
__device__ inline void meet_cluster() {
#if __CUDA_ARCH__ >= 900
  if (gridDim.x > 1) {
    asm volatile(
        "barrier.cluster.arrive.release.aligned;\n"
        "barrier.cluster.wait.acquire.aligned;" ::
            : "memory");
    return;
  }
#endif
  __syncthreads();
}

// The variable of another CTA of the cluster that corresponds to a shared variable of this one.
template <typename T>
__device__ inline const T& in_cta(const T& own, unsigned cta) {
#if __CUDA_ARCH__ >= 900
  if (gridDim.x > 1) {
    const T* there;
    asm volatile("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(&own), "r"(cta));
    return *there;
  }
#endif
  return own;
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
