// A GPU's measured roofline. Benchmarks and profiles report how much of it models reach.
#pragma once

namespace as::cuda {

struct Roofline {
  double read = 0;  // bytes/s read from the GPU's memory
  double bf16 = 0;  // operations/s (a multiply-add is two) of a large bfloat16 GEMM by this backend's own kernel
};
// Takes 40 ms and half a gigabyte of the GPU's memory. Throws std::runtime_error if there is not enough memory.
Roofline measure_roofline(int device);

}  // namespace as::cuda
