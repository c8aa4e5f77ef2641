// What native/cuda/kernels.h wants of CUDA, where kernels are emulated.
#pragma once
using cudaStream_t = void*;
