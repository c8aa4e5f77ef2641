// What native/cuda/kernels/common/types.h wants of CUDA, where kernels are emulated.
#pragma once
using cudaStream_t = void*;
