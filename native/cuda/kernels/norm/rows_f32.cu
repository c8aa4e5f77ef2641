// float32 ops on rows: sums, soft caps, norms and RoPE of heads.
#include <algorithm>

#include "cuda/kernels/attention/attention.h"
#include "cuda/kernels/common/device.cuh"

namespace as::cuda {
namespace {

constexpr int kThreads = 256;

enum class Each { add, multiply, scale, soft_cap };
template <Each kWhat>
__global__ void each_kernel(float* x, const float* y, float factor, size_t count) {
  after_previous();
  const size_t i = (size_t)blockIdx.x * kThreads + threadIdx.x;
  if (i >= count) return;
  if constexpr (kWhat == Each::add) x[i] += y[i];
  if constexpr (kWhat == Each::multiply) x[i] *= y[i];
  if constexpr (kWhat == Each::scale) x[i] *= y ? factor * *y : factor;
  if constexpr (kWhat == Each::soft_cap) x[i] = factor * tanhf(x[i] / factor);
}
template <Each kWhat>
void start_each(float* x, const float* y, float factor, size_t count, const Queue& queue) {
  start(queue, each_kernel<kWhat>, ceil_div(count, kThreads), kThreads, 0, x, y, factor, count);
}

// The second tensor has rows of y_width.
__global__ void multiply_columns_kernel(float* x, int width, const float* y, int y_width) {
  after_previous();
  const int row = blockIdx.y, i = blockIdx.x * kThreads + threadIdx.x;
  if (i < width) x[(size_t)row * width + i] *= y[(size_t)row * y_width + i];
}

// A sum over a CTA, returned in all of its threads.
__device__ float square_sum(const float* x, int count) {
  float sum = 0;
  for (int i = threadIdx.x; i < count; i += kThreads) sum = fmaf(x[i], x[i], sum);
  return block_sum<kThreads>(sum, kThreads);
}

__global__ void qk_square_sums_kernel(const float* x, int width, QkColumns columns, float* sums) {
  after_previous();
  const float* row = x + (size_t)blockIdx.x * width;
  const float q = square_sum(row, columns.q_columns), k = square_sum(row + columns.k_offset, columns.k_columns);
  if (threadIdx.x == 0) sums[2 * blockIdx.x] = q, sums[2 * blockIdx.x + 1] = k;
}

__global__ void qk_norm_kernel(float* x, int width, QkNorm norm, const float* sums) {
  after_previous();
  float* row = x + (size_t)blockIdx.x * width;
  const float q = 1.0f / sqrtf(sums[2 * blockIdx.x] / norm.q_width + norm.eps),
              k = 1.0f / sqrtf(sums[2 * blockIdx.x + 1] / norm.k_width + norm.eps);
  for (int i = threadIdx.x; i < norm.q_columns + norm.k_columns; i += kThreads)
    row[i] *= i < norm.q_columns ? q * norm.q_weight[i] : k * norm.k_weight[i - norm.q_columns];
}

// One warp for each head: those of `first`, then of `second`. Heads have up to kMost features. kRotates: and rotates
// pairs of adjacent features, from `skip` on.
template <int kMost, bool kRotates>
__global__ void head_norm_kernel(float* x, int width, HeadNorm first, HeadNorm second, int skip, RotaryTable t) {
  constexpr int kEach = kMost / 32;
  const int lane = threadIdx.x % 32, of_all = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  const bool is_first = of_all < first.heads.count;
  const int head = is_first ? of_all : of_all - first.heads.count,
            head_dim = is_first ? first.heads.head_dim : second.heads.head_dim;
  const float* weight = is_first ? first.norm.weight : second.norm.weight;
  const float eps = is_first ? first.norm.eps : second.norm.eps;
  const float one = (is_first ? first.norm.unit_offset : second.norm.unit_offset) ? 1.0f : 0.0f;
  const bool there = of_all < first.heads.count + second.heads.count;
  float* values =
      x + (size_t)blockIdx.y * width + (is_first ? first.heads.offset : second.heads.offset) + (size_t)head * head_dim;
  float weights[kEach], kept[kEach], sum = 0;
  const auto each = [&](auto work) {
#pragma unroll
    for (int i = 0; i < kEach; i++)
      if (const int feature = i * 32 + lane; there && feature < head_dim) work(i, feature);
  };
  let_next_begin();
  each([&](int i, int feature) { weights[i] = weight[feature]; });  // no kernel writes weights
  await_previous();
  each([&](int i, int feature) { kept[i] = values[feature]; });
  each([&](int i, int) { sum = fmaf(kept[i], kept[i], sum); });
  const float factor = 1.0f / sqrtf(warp_sum(sum) / head_dim + eps);
  if constexpr (!kRotates) {
    each([&](int i, int feature) { values[feature] = kept[i] * factor * (weights[i] + one); });
  } else {
    const size_t angles = (size_t)blockIdx.y * (t.dim / 2);
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      const int feature = i * 32 + lane, rotated = feature - skip;
      const float own = there && feature < head_dim ? kept[i] * factor * (weights[i] + one) : 0.0f;
      const float other = __shfl_xor_sync(0xffffffffu, own, 1);
      if (!there || feature >= head_dim) continue;
      if (rotated < 0 || rotated >= t.dim) {
        values[feature] = own;
        continue;
      }
      const float c = t.cosine[angles + rotated / 2], s = t.sine[angles + rotated / 2];
      values[feature] = rotated % 2 ? __fmul_rn(own, c) + __fmul_rn(other, s) : __fmul_rn(own, c) - __fmul_rn(other, s);
    }
  }
}

__global__ void rotary_table_kernel(RotaryTable t, const int* positions, const int* prompts) {
  after_previous();
  const int row = blockIdx.x, half = t.dim / 2,
            length = t.powers ? prompts[row] : max(prompts[row], positions[row] + 1);
  for (int i = threadIdx.x; i < half; i += blockDim.x) {
    float inverse = t.inverse[i];
    if ((t.dynamic || t.longer) && length > t.original_max) {
      if (t.longer) {
        inverse = t.longer[i];
      } else {
        double growth = t.factor * length / t.original_max - (t.factor - 1);
        if (t.powers) {  // 2^(ceil(log2 of the ratio) + 1) - 1
          growth = 2;
          while (growth * t.original_max < 2.0 * length) growth *= 2;
          growth -= 1;
        }
        const double base = t.base * pow(growth, (double)t.dim / (t.dim - 2));
        inverse = 1.0f / (float)pow(base, (double)((float)(2 * i) / (float)t.dim));
      }
    }
    double sine, cosine;
    sincos((double)((float)positions[row] * inverse), &sine, &cosine);
    t.cosine[(size_t)row * half + i] = (float)cosine * t.attention_factor;
    t.sine[(size_t)row * half + i] = (float)sine * t.attention_factor;
  }
}

__global__ void rope_kernel(float* x, int width, Heads heads, RotaryTable t, bool interleaved, bool inverse) {
  after_previous();
  const int row = blockIdx.x, half = t.dim / 2;
  for (int i = threadIdx.x; i < heads.count * half; i += blockDim.x) {
    const int pair = i % half;
    float* values = x + (size_t)row * width + heads.offset + (size_t)(i / half) * heads.head_dim;
    float &a = values[interleaved ? 2 * pair : pair], &b = values[interleaved ? 2 * pair + 1 : pair + half];
    const float c = t.cosine[(size_t)row * half + pair], first = a;
    const float sine = t.sine[(size_t)row * half + pair], s = inverse ? -sine : sine;
    a = __fmul_rn(a, c) - __fmul_rn(b, s), b = __fmul_rn(b, c) + __fmul_rn(first, s);
  }
}

__global__ void scale_queries_kernel(Attention a, const int* positions, double beyond) {
  after_previous();
  const int row = blockIdx.x, position = positions[row];
  if (position + 1 <= beyond) return;
  const float factor = (float)(log(position + 1.0) / log(beyond));
  float* queries = const_cast<float*>(a.qkv) + (size_t)row * a.width;
  for (int i = threadIdx.x; i < a.queries * a.cache.head_dim; i += blockDim.x)
    queries[i] = __fmul_rn(queries[i], factor);
}

}  // namespace

void add(float* x, const float* y, size_t count, const Queue& queue) { start_each<Each::add>(x, y, 0, count, queue); }
void multiply(float* x, int width, const float* y, int y_width, int rows, const Queue& queue) {
  if (width == y_width) return start_each<Each::multiply>(x, y, 0, (size_t)rows * width, queue);
  start(queue, multiply_columns_kernel, dim3(ceil_div(width, kThreads), rows), kThreads, 0, x, width, y, y_width);
}
void scale(float* x, float factor, const float* weight, size_t count, const Queue& queue) {
  start_each<Each::scale>(x, weight, factor, count, queue);
}
void soft_cap(float* x, float cap, size_t count, const Queue& queue) {
  start_each<Each::soft_cap>(x, nullptr, cap, count, queue);
}

void qk_square_sums(const float* x, int width, const QkColumns& columns, int rows, float* sums, const Queue& queue) {
  start(queue, qk_square_sums_kernel, rows, kThreads, 0, x, width, columns, sums);
}

void qk_norm(float* x, int width, const QkNorm& norm, const float* sums, int rows, const Queue& queue) {
  start(queue, qk_norm_kernel, rows, kThreads, 0, x, width, norm, sums);
}

constexpr int kNormedHeads = 4, kUsualHead = 256;  // heads of a CTA; features of all heads but a few models'

void head_norm(float* x, int width, const HeadNorm& first, const HeadNorm& second, int rows, const Queue& queue) {
  const bool large = std::max(first.heads.head_dim, second.heads.head_dim) > kUsualHead;
  start(queue, large ? head_norm_kernel<kLatentDim, false> : head_norm_kernel<kUsualHead, false>,
        dim3(ceil_div(first.heads.count + second.heads.count, kNormedHeads), rows), 32 * kNormedHeads, 0, x, width,
        first, second, 0, RotaryTable());
}

void head_norm_and_rope(float* x, int width, const HeadNorm& norm, int skip, const RotaryTable& table, int rows,
                        const Queue& queue) {
  const bool large = norm.heads.head_dim > kUsualHead;
  start(queue, large ? head_norm_kernel<kLatentDim, true> : head_norm_kernel<kUsualHead, true>,
        dim3(ceil_div(norm.heads.count, kNormedHeads), rows), 32 * kNormedHeads, 0, x, width, norm, HeadNorm(), skip,
        table);
}

void rotary_table(const RotaryTable& table, const int* positions, const int* prompts, int rows, const Queue& queue) {
  start(queue, rotary_table_kernel, rows, 64, 0, table, positions, prompts);
}

void rope(float* x, int width, const Heads& heads, const RotaryTable& table, bool interleaved, bool inverse, int rows,
          const Queue& queue) {
  start(queue, rope_kernel, rows, kThreads, 0, x, width, heads, table, interleaved, inverse);
}

void scale_queries(const Attention& a, const int* positions, double beyond, int rows, const Queue& queue) {
  start(queue, scale_queries_kernel, rows, 256, 0, a, positions, beyond);
}

}  // namespace as::cuda
