// The sampler's passes over all logits, compiled for one ISA.
#include "kernels.h"

#include <cstdint>
#include <cstring>
#include <limits>

#include "../sampler.h"

namespace as {
namespace AS_ISA {

namespace {
#include "../logit_passes.h"
}  // namespace

const LogitKernels& logit_kernels() {
  static const LogitKernels kernels{group_max, chunk_sum_exp, exp_values};
  return kernels;
}

}  // namespace AS_ISA
}  // namespace as
