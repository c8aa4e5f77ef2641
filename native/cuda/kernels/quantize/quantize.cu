// Quantization of weights, bit for bit as the CPU backend (cpu/kernels/quantize.cpp), and placement of values that are
// already quantized.
#include <algorithm>
#include <type_traits>

#include "cuda/kernels/gemm/gemm_float8.h"
#include "cuda/kernels/quantize/quantized.cuh"

namespace as::cuda {
namespace {

constexpr int kMaxRows = 65535;  // rows of a grid

// A quantized value is (x / 2 - half_offset) * factor + middle. Values are halved because their range may pass the
// largest float.
struct Range {
  float half_offset, factor;
};

// The range of values between `low` and `high`. scales: receives the matrix' scale and offset.
__device__ Range range_of(float low, float high, int bits, uint32_t& scales) {
  const float levels = (float)((1 << bits) - 1), middle = (float)(1 << (bits - 1));
  const float half_min = __fadd_rn(__fmul_rn(low, 0.5f), 0.0f), half_max = __fmul_rn(high, 0.5f);
  const float half_middle = __fadd_rn(half_min, __fmul_rn(middle, __fdiv_rn(__fsub_rn(half_max, half_min), levels)));
  constexpr uint32_t kMost = 0x7eff0000, kSign = 0x80000000;  // largest bfloat16 whose double is finite
  const uint32_t exact = __float_as_uint(half_middle), rounded = (exact + 0x7fff + (exact >> 16 & 1)) & 0xffff0000;
  const float half_offset = __uint_as_float((rounded & kSign) | min(rounded & ~kSign, kMost));
  const float below = __fdiv_rn(__fsub_rn(half_offset, half_min), middle),
              above = __fdiv_rn(__fsub_rn(half_max, half_offset), levels - middle);
  const float half_scale = __uint_as_float((__float_as_uint(fmaxf(below, above)) + 0xffff) & 0xffff0000);
  scales = __float_as_uint(2 * half_offset) & 0xffff0000;
  if (half_scale < 0x1p-120f) return {0, 0};  // practically no range
  scales |= __float_as_uint(2 * half_scale) >> 16;
  return {half_offset, __fdiv_rn(1.0f, half_scale)};
}

constexpr uint32_t kNanOffset = 0x7fc00000;

// A warp for each row and group.
template <typename T>
__global__ void range_kernel(const T* rows, int columns, int group, int column, int count, Matrix m, int first,
                             Range* ranges, unsigned long long* bad) {
  after_previous();
  const int groups = (columns + group - 1) / group, lane = threadIdx.x % 32;
  const long long i = (long long)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (i >= (long long)count * groups) return;
  const int row = (int)(i / groups), g = (int)(i % groups), begin = g * group, end = min(columns, begin + group);
  float low = INFINITY, high = -INFINITY;
  int wrong = 0;
  for (int c = begin + lane; c < end; c += 32) {
    const float x = widened(rows[(size_t)row * columns + c]);
    wrong += !isfinite(x), low = fminf(low, x), high = fmaxf(high, x);
  }
  for (int step = 1; step < 32; step *= 2) wrong += __shfl_xor_sync(0xffffffffu, wrong, step);
  low = -warp_max(-low), high = warp_max(high);
  uint32_t scales = kNanOffset;  // an offset with a scale of zero; for floats a scale
  Range range = {0, 0};
  if (!wrong && m.quants.floats) {
    const float top = fmaxf(-low, high);
    const bool none = !(top > 1e-34f);
    range.factor = none ? 0 : __fdiv_rn(kLargestFloat8, top);
    scales = __float_as_uint(none ? 0 : __fdiv_rn(top, kLargestFloat8));
  } else if (!wrong) {
    range = range_of(low, high, m.quants.bits, scales);
  }
  // The matrix' columns that belong to this group.
  const int from = max(0, begin - column), to = min(m.k, end - column);
  if (lane == 0) {
    ranges[i] = range;
    if (wrong && from < to) atomicAdd(bad, (unsigned long long)wrong);
  }
  if (from < to)
    for (int own = from / m.quants.group + lane; own * m.quants.group < to; own += 32)
      m.quants.scales[scale_of(first + row, own, m.quants.groups)] = scales;
}

// A thread for each word of a row's quantized values.
template <typename T>
__global__ void quant_kernel(const T* rows, int columns, int group, int column, Matrix m, int first,
                             const Range* ranges) {
  after_previous();
  const int bits = m.quants.bits, each = 32 / bits, words = blocks_of(m.k) * kBlock / each;
  const int row = blockIdx.y, i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= words) return;
  // The word's columns: pairs of columns from `begin` on, each eight columns after the previous one.
  const int begin = i / 4 * 4 * each + i % 4 * 2, groups = (columns + group - 1) / group;
  const float levels = (float)((1 << bits) - 1), middle = (float)(1 << (bits - 1));
  uint32_t word = 0;
  for (int j = 0; j < each; j++) {
    const int own = begin + j / 2 * 8 + j % 2;
    if (own >= m.k) continue;
    const float x = widened(rows[(size_t)row * columns + column + own]);
    const Range range = ranges[(size_t)row * groups + (column + own) / group];
    if (m.quants.floats) {
      word |= (range.factor ? (uint32_t)to_e4m3(__fmul_rn(x, range.factor)) : 0) << bit_of(bits, own);
      continue;
    }
    const float scaled =
        __fadd_rn(rintf(__fmul_rn(__fsub_rn(__fmul_rn(x, 0.5f), range.half_offset), range.factor)), middle);
    word |= (uint32_t)fmaxf(0.0f, fminf(levels, scaled)) << bit_of(bits, own);
  }
  m.quants.words[word_of(m.quants, first + row, begin, blocks_of(m.k))] = word;
}

template <typename T>
void quantize(const void* source, int columns, int group, int column, int count, const Matrix& m, int first,
              float* ranges, unsigned long long* bad, const Queue& queue) {
  const T* rows = static_cast<const T*>(source);
  Range* own = reinterpret_cast<Range*>(ranges);
  constexpr int kWarps = 8;
  const size_t groups = (size_t)((columns + group - 1) / group);
  start(queue, range_kernel<T>, dim3(ceil_div(count * groups, kWarps)), 32 * kWarps, 0, rows, columns, group, column,
        count, m, first, own, bad);
  const int words = blocks_of(m.k) * kBlock * m.quants.bits / 32;
  for (int done = 0; done < count; done += kMaxRows) {
    start(queue, quant_kernel<T>, dim3(ceil_div(words, 128), std::min(count - done, kMaxRows)), 128, 0,
          rows + (size_t)done * columns, columns, group, column, m, first + done, own + (size_t)done * groups);
  }
}

// A thread for each word of a row, and further ones for each group.
__global__ void place_kernel(const uint8_t* quants, const uint16_t* scales, const uint16_t* offsets, Matrix m,
                             int first) {
  after_previous();
  const int bits = m.quants.bits, each = 32 / bits, words = blocks_of(m.k) * kBlock / each;
  const int row = blockIdx.y, i = blockIdx.x * blockDim.x + threadIdx.x, group = i - words;
  if (group >= m.quants.groups) return;
  if (group >= 0) {
    const size_t at = (size_t)row * m.quants.groups + group;
    m.quants.scales[scale_of(first + row, group, m.quants.groups)] = scales[at] | (uint32_t)offsets[at] << 16;
    return;
  }
  const int begin = i / 4 * 4 * each + i % 4 * 2;
  uint32_t word = 0;
  for (int j = 0; j < each; j++)
    if (const int own = begin + j / 2 * 8 + j % 2; own < m.k)
      word |= bits_of_value(m.quants, own, quants[(size_t)row * m.k + own]);
  m.quants.words[word_of(m.quants, first + row, begin, blocks_of(m.k))] = word;
}

// A thread for each word of a row, and further ones for each scale.
__global__ void place_mx_kernel(const uint8_t* values, const uint8_t* scales, Matrix m, int first) {
  after_previous();
  const int blocks = blocks_of(m.k), words = blocks * 8, i = blockIdx.x * blockDim.x + threadIdx.x, group = i - words;
  const int row = blockIdx.y, groups = m.quants.groups;
  if (group >= groups) return;
  if (group >= 0) {
    const int column = group * kMxGroup;
    reinterpret_cast<uint8_t*>(m.quants.words)[mx_tile(first + row, column, blocks) + mx_scale(first + row, column)] =
        scales[(size_t)row * groups + group];
    return;
  }
  const int begin = i / 4 * kMxGroup + i % 4 * 2;  // the first of the word's pairs, which are eight columns apart
  uint32_t word = 0;
#pragma unroll
  for (int pair = 0; pair < 4; pair++)
    if (const int own = begin + pair * 8; own < m.k) {
      const uint32_t both = values[((size_t)row * m.k + own) / 2];
      word |= mx_bits(pair, both & 15) | (own + 1 < m.k ? mx_bits(pair, both >> 4) << 16 : 0);
    }
  m.quants.words[word_of(m.quants, first + row, begin, blocks)] = word;
}

}  // namespace

void quantize_rows(const void* rows, SourceType source, int64_t columns, int group, int64_t column, int count,
                   const Matrix& matrix, int first, float* ranges, unsigned long long* bad, const Queue& queue) {
  const auto part = [&](auto type) {
    quantize<decltype(type)>(rows, (int)columns, group, (int)column, count, matrix, first, ranges, bad, queue);
  };
  if (source == SourceType::f32) part(float());
  else if (source == SourceType::f16) part(__half());
  else part(__nv_bfloat16());
}

void place_rows(const uint8_t* quants, const uint16_t* scales, const uint16_t* offsets, int count, const Matrix& matrix,
                int first, const Queue& queue) {
  const int items = blocks_of(matrix.k) * kBlock * matrix.quants.bits / 32 + matrix.quants.groups;
  for (int done = 0; done < count; done += kMaxRows) {
    start(queue, place_kernel, dim3(ceil_div(items, 128), std::min(count - done, kMaxRows)), 128, 0,
          quants + (size_t)done * matrix.k, scales + (size_t)done * matrix.quants.groups,
          offsets + (size_t)done * matrix.quants.groups, matrix, first + done);
  }
}

void place_mx_rows(const uint8_t* values, const uint8_t* scales, int count, const Matrix& matrix, int first,
                   const Queue& queue) {
  const int items = blocks_of(matrix.k) * 8 + matrix.quants.groups;
  for (int done = 0; done < count; done += kMaxRows) {
    start(queue, place_mx_kernel, dim3(ceil_div(items, 128), std::min(count - done, kMaxRows)), 128, 0,
          values + (size_t)done * matrix.k / 2, scales + (size_t)done * matrix.quants.groups, matrix, first + done);
  }
}

}  // namespace as::cuda
