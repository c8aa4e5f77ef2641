// Kernels that measure the GPU's roofline (cuda/memory/roofline.h).
#pragma once
#include "cuda/kernels/common/types.h"

namespace as::cuda {

// Reads `bytes` bytes, a multiple of 16. sink: written only if an unlikely value is read.
void read_memory(const void* data, size_t bytes, uint32_t* sink, const Queue& queue);
// A kernel that does nothing; one that takes this long.
void do_nothing(const Queue& queue);
void pass_time(double nanoseconds, const Queue& queue);
// Fills memory with bfloat16 values of both signs and several magnitudes.
void fill_bf16(void* data, size_t bytes, const Queue& queue);
// Fills memory with uniform random values between -size and size.
void fill_noise(void* data, size_t bytes, DType16 dtype, float size, uint64_t seed, const Queue& queue);

}  // namespace as::cuda
