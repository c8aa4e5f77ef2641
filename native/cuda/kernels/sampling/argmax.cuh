// The argmax of a row from those of its parts.
#pragma once
#include "cuda/kernels/common/device.cuh"
#include "cuda/kernels/sampling/argmax.h"

namespace as::cuda {
namespace AS_DTYPE16 {

// A warp merges the parts of a row; all lanes get the result.
__device__ inline Argmax merged_by_warp(const Argmax* parts) {
  static_assert(kArgmaxParts == 32, "a lane has a part");
  Argmax best = parts[threadIdx.x % 32];
  for (int step = 1; step < 32; step *= 2) {  // on ties the lower id wins
    const Argmax later = {__shfl_down_sync(0xffffffffu, best.logit, step),
                          __shfl_down_sync(0xffffffffu, best.token, step),
                          __shfl_down_sync(0xffffffffu, best.not_finite, step)};
    add_part(best, later);
  }
  return {__shfl_sync(0xffffffffu, best.logit, 0), __shfl_sync(0xffffffffu, best.token, 0),
          __shfl_sync(0xffffffffu, best.not_finite, 0)};
}

// The token of a warp's argmax, or 0 if there is none.
__device__ inline int sampled_token(const Argmax* parts) {
  const Argmax best = merged_by_warp(parts);
  return best.not_finite ? 0 : max(best.token, 0);
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
