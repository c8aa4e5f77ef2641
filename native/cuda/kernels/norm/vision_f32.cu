// Ops of vision towers, and of models that take their rows, in float32.
#include "cuda/kernels/common/device.cuh"
#include "cuda/kernels/norm/vision.h"

namespace as::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) add_given_kernel(GivenRows given, int offset, float* x, int width) {
  after_previous();
  const int row = blockIdx.y, i = blockIdx.x * kThreads + threadIdx.x, number = given.numbers[row];
  if (number >= 0 && i < width) x[(size_t)row * width + i] += given.rows[(size_t)number * given.width + offset + i];
}

// The part of a row's place that turns a pair: 0 for the time, 1 for the height, 2 for the width.
__device__ int part_of(const Sections& s, int pair) {
  if (!s.interleaved)
    return pair < s.time ? 0 : pair < s.time + s.height ? 1 : pair < s.time + s.height + s.width ? 2 : 0;
  const int part = pair % 3;
  return part && pair < 3 * (part == 1 ? s.height : s.width) ? part : 0;
}

__global__ void rotary_places_kernel(RotaryTable t, Sections sections, Places places, const int* positions,
                                     const int* prompts) {
  after_previous();
  const int row = blockIdx.x, half = t.dim / 2, length = max(prompts[row], positions[row] + 1);
  const float place[3] = {(float)places.time[row], (float)places.height[row], (float)places.width[row]};
  for (int i = threadIdx.x; i < half; i += blockDim.x) {
    const int part = part_of(sections, i);
    const float* const frequencies = t.longer && length > t.original_max ? t.longer : t.inverse;
    double sine, cosine;
    sincos((double)((part == 0 ? place[0] : part == 1 ? place[1] : place[2]) * frequencies[i]), &sine, &cosine);
    t.cosine[(size_t)row * half + i] = (float)cosine * t.attention_factor;
    t.sine[(size_t)row * half + i] = (float)sine * t.attention_factor;
  }
}

// Between two rows or columns of a table: how far beyond the lower one.
struct Between {
  int low, high;
  float part;
};

// As torch.linspace(0, side - 1, count)[i] in single precision, which counts from the nearer end.
__device__ Between between(int i, int count, int side) {
  const float last = (float)(side - 1), step = count > 1 ? __fdiv_rn(last, (float)(count - 1)) : 0.0f;
  const float at = i < count / 2 || count == 1 ? __fmul_rn(step, (float)i)
                                               : __fsub_rn(last, __fmul_rn(step, (float)(count - 1 - i)));
  const int low = min(max((int)at, 0), side - 1);
  return {low, min(low + 1, side - 1), at - (float)low};
}

__global__ void __launch_bounds__(kThreads) add_grid_kernel(GridTable grid, Places places, float* x, int width) {
  after_previous();
  const int row = blockIdx.y, i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= width) return;
  if (grid.axes) {
    const auto of = [&](int axis, int place) {
      return grid.table[((size_t)axis * grid.side + min(place, grid.side - 1)) * width + i];
    };
    x[(size_t)row * width + i] += of(0, places.width[row]) + of(1, places.height[row]);
    return;
  }
  const Between y = between(places.height[row], grid.heights[row], grid.side),
                z = between(places.width[row], grid.widths[row], grid.side);
  const auto at = [&](int down, int across) { return grid.table[((size_t)down * grid.side + across) * width + i]; };
  const float a = __fmul_rn(1 - y.part, 1 - z.part), b = __fmul_rn(1 - y.part, z.part),
              c = __fmul_rn(y.part, 1 - z.part), d = __fmul_rn(y.part, z.part);
  const float first = __fadd_rn(__fmul_rn(at(y.low, z.low), a), __fmul_rn(at(y.low, z.high), b));
  const float all = __fadd_rn(__fadd_rn(first, __fmul_rn(at(y.high, z.low), c)), __fmul_rn(at(y.high, z.high), d));
  x[(size_t)row * width + i] += all;
}

__global__ void __launch_bounds__(kThreads)
    add_positions_kernel(PositionTable t, const int* positions, const int* segments, float* x, int width) {
  after_previous();
  const int row = blockIdx.y, i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= width) return;
  float sum = x[(size_t)row * width + i] + t.table[(size_t)min(positions[row] + t.offset, t.positions - 1) * width + i];
  if (t.segments) sum += t.segments[segments[row] * width + i];
  x[(size_t)row * width + i] = sum;
}

__global__ void __launch_bounds__(kThreads) clamp_kernel(float* x, const float* low, const float* high, size_t count) {
  after_previous();
  const size_t i = (size_t)blockIdx.x * kThreads + threadIdx.x;
  if (i < count) x[i] = x[i] < *low ? *low : x[i] > *high ? *high : x[i];
}

__global__ void __launch_bounds__(kThreads)
    standardize_kernel(float* x, int width, const float* shift, const float* factor) {
  after_previous();
  const int row = blockIdx.y, i = blockIdx.x * kThreads + threadIdx.x;
  if (i < width) x[(size_t)row * width + i] = __fmul_rn(x[(size_t)row * width + i] - shift[i], factor[i]);
}

}  // namespace

void add_given(const GivenRows& given, int offset, float* x, int width, int rows, const Queue& queue) {
  start(queue, add_given_kernel, dim3(ceil_div(width, kThreads), rows), kThreads, 0, given, offset, x, width);
}

void rotary_table(const RotaryTable& table, const Sections& sections, const Places& places, const int* positions,
                  const int* prompts, int rows, const Queue& queue) {
  start(queue, rotary_places_kernel, rows, 64, 0, table, sections, places, positions, prompts);
}

void add_grid(const GridTable& grid, const Places& places, float* x, int width, int rows, const Queue& queue) {
  start(queue, add_grid_kernel, dim3(ceil_div(width, kThreads), rows), kThreads, 0, grid, places, x, width);
}

void add_positions(const PositionTable& table, const int* positions, const int* segments, float* x, int width, int rows,
                   const Queue& queue) {
  start(queue, add_positions_kernel, dim3(ceil_div(width, kThreads), rows), kThreads, 0, table, positions, segments, x,
        width);
}

void clamp(float* x, const float* low, const float* high, size_t count, const Queue& queue) {
  start(queue, clamp_kernel, ceil_div(count, kThreads), kThreads, 0, x, low, high, count);
}

void standardize(float* x, int width, const float* shift, const float* factor, int rows, const Queue& queue) {
  start(queue, standardize_kernel, dim3(ceil_div(width, kThreads), rows), kThreads, 0, x, width, shift, factor);
}

}  // namespace as::cuda
