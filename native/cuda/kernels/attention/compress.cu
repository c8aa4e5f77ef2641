// Rows and entries of compressed positions. A thread has some channels of an entry.
#include "cuda/kernels/attention/compress.h"

#include "cuda/kernels/attention/entries.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace {

constexpr int kThreads = 512;

// The first position of a row's sequence that the step has, not before `begin`. Its rows are adjacent.
__device__ int first_in_step(const Compressor& p, int row, int begin) {
  const int position = p.positions[row];
  int least = 0, most = min(position - begin, row);  // of rows before this one
  while (least < most) {
    const int back = (least + most + 1) / 2, other = row - back;
    const bool same = p.row_tables[other] == p.row_tables[row] && p.positions[other] == position - back;
    if (same) least = back;
    else most = back - 1;
  }
  return position - least;
}

// Calls visit(row, position) for rows of positions [begin, end) in ascending order: those before `here` are in the
// cache, the others in the step, where position `end` - 1 is row `last`.
template <typename Visit>
__device__ void visit_rows(const Compressor& p, const int* table, int begin, int here, int end, int last,
                           const Visit& visit) {
  const int size = p.rows.span_size, width = p.rows.head_dim;
  for (int at = begin; at < here;) {
    const int count = min(here, (at / size + 1) * size) - at;
    const char* first = head_of(p.rows, table[at / size], 0) + at % size * p.rows.row_bytes();
#pragma unroll 8
    for (int i = 0; i < count; i++) visit(reinterpret_cast<const float*>(first + i * p.rows.row_bytes()), at + i);
    at += count;
  }
#pragma unroll 8
  for (int at = here; at < end; at++) visit(p.x + (size_t)(last + 1 - end + at) * width, at);
}

// A CTA stores a row of the step, and makes the entry of which it is the last position.
__global__ void __launch_bounds__(kThreads) compress_kernel(const __grid_constant__ Compressor p) {
  extern __shared__ float entry[];
  after_previous();  // in every CTA: the next kernel waits for this one alone
  const int row = blockIdx.x, end = p.positions[row] + 1, rate = p.entries.rate, where = p.where[row];
  if (where < 0) return;
  const int size = p.rows.span_size, both = p.rows.head_dim;
  float* kept =
      reinterpret_cast<float*>(const_cast<char*>(head_of(p.rows, where / size, 0)) + where % size * p.rows.row_bytes());
  for (int i = threadIdx.x; i < both; i += kThreads) kept[i] = p.x[(size_t)row * both + i];
  if (end % rate) return;
  const int first = end - rate, begin = max(0, end - p.parts * rate), dim = p.entries.cache.head_dim,
            width = p.parts * dim, here = first_in_step(p, row, begin);
  const int* table = p.tables + p.row_tables[row];
  float squares = 0;
  for (int i = threadIdx.x; i < dim; i += kThreads) {
    const auto column = [&](int position) { return position < first ? i : i + (p.parts - 1) * dim; };
    const auto gate = [&](const float* kept, int position) {
      const int c = column(position);
      return kept[width + c] + p.bias[(size_t)(position % rate) * width + c];
    };
    float most = -INFINITY, total = 0, sum = 0;
    visit_rows(p, table, begin, here, end, row,
               [&](const float* kept, int position) { most = fmaxf(most, gate(kept, position)); });
    visit_rows(p, table, begin, here, end, row, [&](const float* kept, int position) {
      const float weight = expf(gate(kept, position) - most);
      total += weight, sum = fmaf(kept[column(position)], weight, sum);
    });
    entry[i] = sum / total, squares = fmaf(entry[i], entry[i], squares);
  }
  if (p.norm.weight) {
    const float factor = 1.0f / sqrtf(block_sum<kThreads>(squares, kThreads) / dim + p.norm.eps);
    for (int i = threadIdx.x; i < dim; i += kThreads) entry[i] = entry[i] * factor * p.norm.weight[i];
  }
  __syncthreads();
  for (int pair = threadIdx.x; pair < p.table.dim / 2; pair += kThreads) {
    double sine, cosine;
    sincos((double)((float)first * p.table.inverse[pair]), &sine, &cosine);
    const float c = (float)cosine * p.table.attention_factor, s = (float)sine * p.table.attention_factor;
    float &a = entry[dim - p.table.dim + 2 * pair], &b = entry[dim - p.table.dim + 2 * pair + 1];
    const float was = a;
    a = __fmul_rn(a, c) - __fmul_rn(b, s), b = __fmul_rn(b, c) + __fmul_rn(was, s);
  }
  __syncthreads();
  char* to = const_cast<char*>(entry_row(p.entries, p.entry_tables + p.row_tables[row], first / rate));
  for (int i = threadIdx.x; i < p.entries.cache.padded_dim; i += kThreads) {
    const float value = i < dim ? entry[i] : 0.0f;
    if (p.entries.cache.type == CacheType::f32) reinterpret_cast<float*>(to)[i] = value;
    else reinterpret_cast<uint16_t*>(to)[i] = to_dtype16(value);
  }
}

}  // namespace

void compress(const Compressor& p, int rows, const Queue& queue) {
  start(queue, compress_kernel, rows, kThreads, p.entries.cache.head_dim * sizeof(float), p);
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
