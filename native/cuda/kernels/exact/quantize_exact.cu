// Rows of activations as integers of 8 or 16 bits (exact.h).
#include <stdexcept>

#include "cuda/kernels/exact/arithmetic.cuh"

namespace as::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kSummed = 256;

struct Quantized {
  ExactMatrix w;
  const float* x;
  ExactRows out;
  int step, steps_of_group, whole_steps;
};

// A CTA quantizes a row, a thread four columns at a time.
template <int kPlanes>
__global__ void __launch_bounds__(kThreads) quantize_exact_kernel(const __grid_constant__ Quantized p) {
  __shared__ uint32_t tops[kWarps];
  __shared__ int sums[kSummed];  // of as many groups at a time
  const ExactMatrix& w = p.w;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = blockIdx.x;
  const float* x = p.x + (size_t)row * w.inputs;
  after_previous();
  uint32_t largest = 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < w.inputs; i += kThreads) largest = max(largest, __float_as_uint(x[i]) & 0x7fffffffu);
  for (int step = 1; step < 32; step *= 2) largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, step));
  if (lane == 0) tops[warp] = largest;
  __syncthreads();
  for (int i = 0; i < kWarps; i++) largest = max(largest, tops[i]);
  const ExactScale scale =
      exact_scale(largest, kPlanes == 2 ? 32639.0f : 127.0f, w.format == ExactFormat::e2m1 ? 2.0f : 1.0f);
  if (threadIdx.x == 0) p.out.scales[row] = scale.scale;

  const int words = p.step / 4, group_words = p.steps_of_group * words;  // of a plane
  uint32_t* values = reinterpret_cast<uint32_t*>(p.out.values) + (size_t)row * p.whole_steps * kPlanes * words;
  const bool mixed = w.format == ExactFormat::e2m1, summed = p.out.sums;
  const int groups = summed ? kSummed : w.groups + p.whole_steps;  // at a time; the row ends in whole stages
  for (int first_group = 0; first_group * group_words < p.whole_steps * words; first_group += groups) {
    if (summed)
      for (int i = threadIdx.x; i < kSummed; i += kThreads) sums[i] = 0;
    __syncthreads();
    const int end = min(p.whole_steps * words, (first_group + groups) * group_words);
#pragma unroll 2
    for (int i = first_group * group_words + threadIdx.x; i < end; i += kThreads) {
      const int g = i / group_words, in_group = i % group_words, first = g * w.group,
                length = min(w.group, w.k - first);  // 0 or less behind the row
      uint32_t high = 0, low = 0;
      int sum = 0;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int place = in_group % 2 * 4 + j, at = in_group / 2 * 8 + (mixed ? place % 2 * 4 + place / 2 : place);
        float value = 0;
        if (at < length) {
          const int from = w.order ? w.order[first + at] : first + at;
          value = from < 0 ? 0.0f : x[from];
        }
        const int a = scale.inverse == 0 ? 0 : __float2int_rn(__fmul_rn(value, scale.inverse));
        const int upper = kPlanes == 2 ? (a + 128) >> 8 : a;
        high |= (uint32_t)(upper & 255) << 8 * j, low |= (uint32_t)(a & 255) << 8 * j;
        sum += a;
      }
      uint32_t* to = values + i / words * kPlanes * words + i % words;
      to[0] = high;
      if (kPlanes == 2) to[words] = low;
      if (summed && length > 0) atomicAdd(&sums[g - first_group], sum);
    }
    if (!summed) return;
    __syncthreads();
    for (int i = threadIdx.x; i < min(kSummed, w.groups - first_group); i += kThreads)
      p.out.sums[(size_t)row * w.groups + first_group + i] = (float)sums[i];
    __syncthreads();
  }
}

size_t row_bytes(const ExactMatrix& w) { return (size_t)w.whole_steps() * w.step() * exact_planes(w.format); }

}  // namespace

ExactMatrix exact_matrix(const Packed& w, const int* order) {
  ExactMatrix m;
  switch (w.format) {
    case Format::int8:
      m.format = ExactFormat::int8;
      break;
    case Format::int4:
      m.format = ExactFormat::int4;
      break;
    case Format::w8a8:
      m.format = ExactFormat::w8a8;
      break;
    case Format::w4a8:
      m.format = ExactFormat::w4a8;
      break;
    case Format::e2m1a16:
      m.format = ExactFormat::e2m1;
      break;
    default:
      throw std::invalid_argument("matrices of floats have no exact recipe");
  }
  m.n = w.n, m.k = w.k, m.panel = w.panel, m.group = w.group, m.groups = w.groups();
  if (w.planes == 2 && w.group > kExactLongest)
    throw std::invalid_argument("groups of " + std::to_string(w.group) +
                                " columns with 16-bit activations have no exact recipe: at most " +
                                std::to_string(kExactLongest));
  m.bytes = (size_t)w.panels() * w.panel_bytes;
  if (m.bytes > UINT32_MAX) throw std::invalid_argument("an expert's matrix of 4 GB or more");
  m.panel_bytes = (uint32_t)w.panel_bytes, m.group_bytes = (uint32_t)w.group_bytes(w.group);
  m.head_bytes = (uint32_t)w.head_bytes, m.first_group = (uint32_t)w.first_group;
  m.scales = w.scaling.scales, m.zeros = w.scaling.zeros, m.super_group = w.scaling.super_group;
  m.plain = w.plain_scales, m.lone = w.lone_scales;
  m.middle = (float)w.middle(), m.moved = (float)(w.middle() - w.bias - w.center());
  m.inputs = w.inputs, m.order = order;
  return m;
}

size_t exact_rows_bytes(const ExactMatrix& w, int rows) {
  return round_up_256(rows * row_bytes(w)) + round_up_256(rows * sizeof(float)) +
         (w.lone ? 0 : round_up_256(rows * sizeof(float) * (size_t)w.groups));
}

ExactRows exact_rows(char* memory, const ExactMatrix& w, int rows) {
  char *scales = memory + round_up_256(rows * row_bytes(w)), *sums = scales + round_up_256(rows * sizeof(float));
  return {reinterpret_cast<int8_t*>(memory), reinterpret_cast<float*>(scales),
          w.lone ? nullptr : reinterpret_cast<float*>(sums)};
}

void quantize_exact(const ExactMatrix& w, const float* x, int rows, const ExactRows& out, const Queue& queue) {
  if (!rows) return;
  const Quantized p{w, x, out, w.step(), w.steps_of_group(), w.whole_steps()};
  const auto kernel = exact_planes(w.format) == 2 ? quantize_exact_kernel<2> : quantize_exact_kernel<1>;
  start(queue, kernel, rows, kThreads, 0, p);
}

}  // namespace as::cuda
