// What a GPU does at most, measured: for benchmarks, to tell what part of it models reach.
#pragma once

namespace as {
namespace cuda {

struct Ceilings {
  double read = 0;  // bytes/s of the GPU's memory
  double bf16 = 0;  // multiplications and additions/s of a large product of bfloat16, by this backend's own kernel
};
// Takes 40 ms and half a gigabyte of the GPU's memory. Throws std::runtime_error where there is not that much.
Ceilings measure_ceilings(int device);

}  // namespace cuda
}  // namespace as
