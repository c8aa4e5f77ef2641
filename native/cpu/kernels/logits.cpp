// The sampler's passes over all logits, compiled for one ISA.
#include "cpu/kernels/kernels.h"

#include <cstdint>
#include <cstring>
#include <limits>

#include "sampling/sampler_blob.h"

namespace as {
namespace AS_ISA {

namespace {
using namespace sampling;
#include "sampling/logit_passes.h"
}  // namespace

const LogitKernels& logit_kernels() {
  static const LogitKernels kernels = logit_passes();
  return kernels;
}

}  // namespace AS_ISA
}  // namespace as
