// Conversion of checkpoint weights to the layouts of GEMMs, and random matrices for measurements.
#include "cuda/kernels/common/device.cuh"
#include "cuda/kernels/quantize/quantize.h"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace {

template <typename T>
__global__ void pack_kernel(const T* rows, int64_t stride, Matrix m, int first, unsigned long long* bad) {
  after_previous();
  const int row = blockIdx.y, column = blockIdx.x * blockDim.x + threadIdx.x;
  bool wrong = false;
  if (column < m.k) {
    const float x = widened(rows[row * stride + column]);
    wrong = !isfinite(x) || (m.tiles && kDType16 == DType16::f16 && fabsf(x) >= kTooLarge);
    if (m.tiles) const_cast<uint16_t*>(m.tiles)[tile_offset(first + row, column, blocks_of(m.k))] = to_dtype16(x);
    else const_cast<float*>(m.values)[(size_t)(first + row) * m.k + column] = x;
  }
  const unsigned lanes = __ballot_sync(0xffffffffu, wrong);
  if (lanes && threadIdx.x % 32 == 0) atomicAdd(bad, (unsigned long long)__popc(lanes));
}

template <typename T>
void pack(const void* rows, int64_t stride, int count, const Matrix& m, int first, unsigned long long* bad,
          const Queue& queue) {
  constexpr int kThreads = 256, kMaxRows = 65535;  // rows of a grid
  for (int done = 0; done < count; done += kMaxRows) {
    const int some = count - done < kMaxRows ? count - done : kMaxRows;
    start(queue, pack_kernel<T>, dim3(ceil_div(m.k, kThreads), some), kThreads, 0,
          static_cast<const T*>(rows) + done * stride, stride, m, first + done, bad);
  }
}

// A thread for each eight columns of a row. Rows are the grid's first dimension, which has the highest limit.
__global__ void pair_kernel(Matrix from, Matrix to) {
  after_previous();
  const int blocks = blocks_of(from.k), eight = blockIdx.y * blockDim.x + threadIdx.x, row = blockIdx.x;
  const int half = from.n / 2, source = row / 16 * 8 + row % 8;
  if (eight >= blocks * 8 || source >= half) return;
  const size_t at = tile_offset(source + (row % 16 < 8 ? 0 : half), eight * 8, blocks);
  reinterpret_cast<uint4*>(const_cast<uint16_t*>(to.tiles))[tile_offset(row, eight * 8, blocks) / 8] =
      reinterpret_cast<const uint4*>(from.tiles)[at / 8];
}

// A thread for each word of a row's quantized values, and further ones for each group. A word belongs to one row, and
// its columns have the same places in all rows.
__global__ void pair_quants_kernel(Matrix from, Matrix to) {
  after_previous();
  const int bits = to.quants.bits, each = 32 / bits, blocks = blocks_of(to.k), words = blocks * kBlock / each;
  const int i = blockIdx.y * blockDim.x + threadIdx.x, row = blockIdx.x, group = i - words;
  const int half = from.n / 2, source = row / 16 * 8 + row % 8, other = source + (row % 16 < 8 ? 0 : half);
  if (group >= to.quants.groups || source >= half) return;
  if (group >= 0 && to.quants.mx) {
    const int column = group * kMxGroup;
    reinterpret_cast<uint8_t*>(to.quants.words)[mx_tile(row, column, blocks) + mx_scale(row, column)] =
        reinterpret_cast<const uint8_t*>(from.quants.words)[mx_tile(other, column, blocks) + mx_scale(other, column)];
    return;
  }
  if (group >= 0) {
    to.quants.scales[scale_of(row, group, to.quants.groups)] =
        from.quants.scales[scale_of(other, group, to.quants.groups)];
    return;
  }
  const int column = i / 4 * 4 * each + i % 4 * 2;  // the word's first column
  to.quants.words[word_of(to.quants, row, column, blocks)] =
      from.quants.words[word_of(from.quants, other, column, blocks)];
}

// Uniform between -size and size.
__global__ void noise_kernel(uint32_t* data, size_t count, float size, uint64_t seed) {
  after_previous();
  const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  uint64_t x = (i + 1 + (seed << 40)) * 0x9e3779b97f4a7c15ull;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull, x = (x ^ x >> 27) * 0x94d049bb133111ebull, x ^= x >> 31;
  const auto value = [&](uint32_t bits) { return size * ((float)(int32_t)bits * 0x1p-31f); };
  if (i < count) data[i] = to_dtype16x2(value((uint32_t)x), value((uint32_t)(x >> 32)));
}

}  // namespace

void pair_rows(const Matrix& from, const Matrix& to, const Queue& queue) {
  if (to.quants.bits) {
    const int items = blocks_of(to.k) * kBlock * to.quants.bits / 32 + to.quants.groups;
    start(queue, pair_quants_kernel, dim3(to.n, ceil_div(items, 128)), 128, 0, from, to);
    return;
  }
  start(queue, pair_kernel, dim3(to.n, ceil_div(blocks_of(from.k) * 8, 128)), 128, 0, from, to);
}

void pack_rows(const void* rows, SourceType source, int64_t stride, int count, const Matrix& matrix, int first,
               unsigned long long* bad, const Queue& queue) {
  if (source == SourceType::f32) pack<float>(rows, stride, count, matrix, first, bad, queue);
  else if (source == SourceType::f16) pack<__half>(rows, stride, count, matrix, first, bad, queue);
  else pack<__nv_bfloat16>(rows, stride, count, matrix, first, bad, queue);
}

void fill_noise(void* data, size_t bytes, DType16, float size, uint64_t seed, const Queue& queue) {
  constexpr int kThreads = 256;
  start(queue, noise_kernel, ceil_div(bytes / 4, kThreads), kThreads, 0, static_cast<uint32_t*>(data), bytes / 4, size,
        seed);
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
