// Entries of compressed positions: a CTA makes one, and a thread has some of its channels.
#include "cuda/kernels/attention/compress.h"

#include "cuda/kernels/attention/entries.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace {

constexpr int kThreads = 512;

// Calls visit(row, position) for what the cache keeps of positions [begin, end), in ascending order.
template <typename Visit>
__device__ void visit_rows(const Compressor& p, const int* table, int begin, int end, const Visit& visit) {
  const int size = p.rows.span_size;
  for (int at = begin; at < end;) {
    const int count = min(end, (at / size + 1) * size) - at;
    const char* first = head_of(p.rows, table[at / size], 0) + at % size * p.rows.row_bytes();
#pragma unroll 8
    for (int i = 0; i < count; i++) visit(reinterpret_cast<const float*>(first + i * p.rows.row_bytes()), at + i);
    at += count;
  }
}

// A CTA for each row of the step. Most end at once: they are not the last of an entry's positions.
__global__ void __launch_bounds__(kThreads) compress_kernel(const __grid_constant__ Compressor p) {
  extern __shared__ float entry[];
  after_previous();  // in every CTA: the next kernel waits for this one alone
  const int row = blockIdx.x, end = p.positions[row] + 1, rate = p.entries.rate;
  if (p.where[row] < 0 || end % rate) return;
  const int first = end - rate, begin = max(0, end - p.parts * rate), dim = p.entries.cache.head_dim,
            width = p.parts * dim;
  const int* table = p.tables + p.row_tables[row];
  float squares = 0;
  for (int i = threadIdx.x; i < dim; i += kThreads) {
    const auto column = [&](int position) { return position < first ? i : i + (p.parts - 1) * dim; };
    const auto gate = [&](const float* kept, int position) {
      const int c = column(position);
      return kept[width + c] + p.bias[(size_t)(position % rate) * width + c];
    };
    float most = -INFINITY, total = 0, sum = 0;
    visit_rows(p, table, begin, end,
               [&](const float* kept, int position) { most = fmaxf(most, gate(kept, position)); });
    visit_rows(p, table, begin, end, [&](const float* kept, int position) {
      const float weight = expf(gate(kept, position) - most);
      total += weight, sum = fmaf(kept[column(position)], weight, sum);
    });
    entry[i] = sum / total, squares = fmaf(entry[i], entry[i], squares);
  }
  const float factor = 1.0f / sqrtf(block_sum<kThreads>(squares, kThreads) / dim + p.norm.eps);
  for (int i = threadIdx.x; i < dim; i += kThreads) entry[i] = entry[i] * factor * p.norm.weight[i];
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
  Attention stored;
  stored.cache = p.rows, stored.kept = p.x;
  cuda::store_latent(stored, p.where, rows, queue);
  start(queue, compress_kernel, rows, kThreads, p.entries.cache.head_dim * sizeof(float), p);
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
