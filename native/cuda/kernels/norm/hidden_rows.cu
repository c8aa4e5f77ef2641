#include "cuda/kernels/norm/hidden_rows.h"

#include "cuda/kernels/common/device.cuh"

namespace as::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void keep_rows_kernel(const float* in, const int* places, int width, float* to) {
  after_previous();
  const int row = blockIdx.y, i = blockIdx.x * kThreads + threadIdx.x, place = places[row];
  if (place >= 0 && i < width) to[(size_t)place * width + i] = in[(size_t)row * width + i];
}

__global__ void concat_kernel(Columns first, Columns second, Columns third, float* out) {
  after_previous();
  const int row = blockIdx.y, i = blockIdx.x * kThreads + threadIdx.x, two = first.width + second.width;
  if (i >= two + third.width) return;
  const auto at = [&](const Columns& part, int column) { return part.values[(size_t)row * part.width + column]; };
  out[(size_t)row * (two + third.width) + i] = i < first.width ? at(first, i)
                                               : i < two       ? at(second, i - first.width)
                                                               : at(third, i - two);
}

__global__ void spread_columns_kernel(const float* in, int in_width, const float* columns, int width, float* out) {
  after_previous();
  const int row = blockIdx.y, i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= width) return;
  const int column = (int)columns[i];
  const bool there = column >= 0 && column < in_width;
  out[(size_t)row * width + i] = there ? in[(size_t)row * in_width + column] : -INFINITY;
}

}  // namespace

void keep_rows(const float* in, const int* places, int rows, int width, float* to, const Queue& queue) {
  start(queue, keep_rows_kernel, dim3(ceil_div(width, kThreads), rows), kThreads, 0, in, places, width, to);
}

void concat(const Columns& first, const Columns& second, const Columns& third, int rows, float* out,
            const Queue& queue) {
  start(queue, concat_kernel, dim3(ceil_div(first.width + second.width + third.width, kThreads), rows), kThreads, 0,
        first, second, third, out);
}

void spread_columns(const float* in, int in_width, const float* columns, int width, int rows, float* out,
                    const Queue& queue) {
  start(queue, spread_columns_kernel, dim3(ceil_div(width, kThreads), rows), kThreads, 0, in, in_width, columns, width,
        out);
}

}  // namespace as::cuda
