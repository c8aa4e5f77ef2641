// Kernels that measure what the GPU does at most (cuda/memory/roofline.h).
#pragma once
#include "cuda/kernels/common/types.h"

namespace as::cuda {

// Reads so many bytes, a multiple of 16; sink: a place that is hardly ever written.
void read_memory(const void* data, size_t bytes, uint32_t* sink, const Queue& queue);
// Values of both signs and several sizes.
void fill_bf16(void* data, size_t bytes, const Queue& queue);
// Random ones, evenly between -size and size.
void fill_noise(void* data, size_t bytes, DType16 dtype, float size, uint64_t seed, const Queue& queue);

}  // namespace as::cuda
