// The adjacent columns of a float32 row that a thread reads or writes at once.
#pragma once
#include "cuda/kernels/common/device.cuh"

namespace as::cuda {

constexpr int kThreadColumns = 4;

// kWhole: the row's length is a multiple of kThreadColumns. Otherwise columns from `width` on are zero.
template <bool kWhole>
__device__ inline void read_columns(const float* row, int column, int width, float (&x)[kThreadColumns]) {
  if constexpr (kWhole) {
    const float4 four = *reinterpret_cast<const float4*>(row + column);
    x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
  } else {
#pragma unroll
    for (int i = 0; i < kThreadColumns; i++) x[i] = column + i < width ? row[column + i] : 0.0f;
  }
}
template <bool kWhole>
__device__ inline void write_columns(float* row, int column, int width, const float (&x)[kThreadColumns]) {
  if constexpr (kWhole) {
    *reinterpret_cast<float4*>(row + column) = make_float4(x[0], x[1], x[2], x[3]);
  } else {
#pragma unroll
    for (int i = 0; i < kThreadColumns; i++)
      if (column + i < width) row[column + i] = x[i];
  }
}

}  // namespace as::cuda
