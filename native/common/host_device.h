// Marks functions that GPU kernels call, too.
#pragma once

#ifdef __CUDACC__
#define AS_BOTH __host__ __device__
#else
#define AS_BOTH
#endif
