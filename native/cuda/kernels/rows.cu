// Ops on rows one by one: embedding, norms, sums, gates.
#include "cuda/kernels/device.cuh"

namespace as {
namespace cuda {
namespace {

constexpr int kThreads = 256;

__device__ float value_of(const Matrix& m, int row, int column) {
  if (m.tiles) return from_bf16(m.tiles[tile_offset(row, column, blocks_of(m.k))]);
  return m.values[(size_t)row * m.k + column];
}

__global__ void embed_kernel(Matrix table, const int* tokens, int vocab_begin, float scale, Rows out) {
  after_previous();
  const int row = blockIdx.x, id = tokens[row] - vocab_begin;
  for (int i = threadIdx.x; i < table.k; i += kThreads)
    put(out, row, i, id >= 0 && id < table.n ? value_of(table, id, i) * scale : 0.0f);
}

__global__ void read_row_kernel(Matrix m, int row, float* out) {
  after_previous();
  for (int i = threadIdx.x; i < m.k; i += kThreads) out[i] = value_of(m, row, i);
}

// Sum over a block of threads, the same in all of them: over each warp's lanes, then over warps in ascending order.
template <int kSize>
__device__ float block_sum(float x) {
  __shared__ float sums[kSize / 32];
  x = warp_sum(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
  __syncthreads();
  float total = 0;
  for (int i = 0; i < kSize / 32; i++) total += sums[i];
  return total;
}

constexpr int kNormThreads = 512, kNormKept = 16;  // values of a row that a thread keeps in registers

__global__ void __launch_bounds__(kNormThreads)
    rms_norm_kernel(const float* x, Norm norm, int rows, Rows out, Ahead ahead) {
  if (blockIdx.x >= rows) {
    let_next_begin();
    return ask_for(ahead, blockIdx.x - rows, gridDim.x - rows);
  }
  const int row = blockIdx.x, width = out.width;
  const float* in = x + (size_t)row * width;
  float kept[kNormKept], weights[kNormKept];
  float sum = 0;
  let_next_begin();
#pragma unroll
  for (int i = 0; i < kNormKept; i++) {  // nobody makes these: no need to wait for the kernel before
    const int at = i * kNormThreads + threadIdx.x;
    weights[i] = at < width ? norm.weight[at] : 0.0f;
  }
  await_previous();
#pragma unroll
  for (int i = 0; i < kNormKept; i++) {
    const int at = i * kNormThreads + threadIdx.x;
    kept[i] = at < width ? in[at] : 0.0f;
  }
#pragma unroll
  for (int i = 0; i < kNormKept; i++) sum = fmaf(kept[i], kept[i], sum);
  for (int at = kNormKept * kNormThreads + threadIdx.x; at < width; at += kNormThreads) sum = fmaf(in[at], in[at], sum);
  const float factor = 1.0f / sqrtf(block_sum<kNormThreads>(sum) / width + norm.eps);
  const float one = norm.unit_offset ? 1.0f : 0.0f;
#pragma unroll
  for (int i = 0; i < kNormKept; i++) {
    const int at = i * kNormThreads + threadIdx.x;
    if (at < width) put(out, row, at, kept[i] * factor * (weights[i] + one));
  }
  for (int at = kNormKept * kNormThreads + threadIdx.x; at < width; at += kNormThreads)
    put(out, row, at, in[at] * factor * (norm.weight[at] + one));
}

__global__ void add_kernel(float* x, const float* y, size_t count) {
  after_previous();
  const size_t i = (size_t)blockIdx.x * kThreads + threadIdx.x;
  if (i < count) x[i] += y[i];
}

__global__ void scale_kernel(float* x, float factor, size_t count) {
  after_previous();
  const size_t i = (size_t)blockIdx.x * kThreads + threadIdx.x;
  if (i < count) x[i] *= factor;
}

__global__ void silu_mul_kernel(const float* in, Rows out) {
  after_previous();
  const int row = blockIdx.y, i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= out.width) return;
  const float gate = in[(size_t)row * 2 * out.width + i], up = in[(size_t)row * 2 * out.width + out.width + i];
  put(out, row, i, silu_times(gate, up));
}

// chosen: which row; null for the same.
__global__ void copy_kernel(const float* in, const int* chosen, Rows out) {
  after_previous();
  const int row = blockIdx.y, i = blockIdx.x * kThreads + threadIdx.x;
  if (i < out.width) put(out, row, i, in[(size_t)(chosen ? chosen[row] : row) * out.width + i]);
}

// A warp for each head.
__global__ void head_norm_kernel(float* x, int width, Heads heads, Norm norm) {
  after_previous();
  const int lane = threadIdx.x, head = blockIdx.x;
  float* values = x + (size_t)blockIdx.y * width + heads.offset + (size_t)head * heads.head_dim;
  float sum = 0;
  for (int i = lane; i < heads.head_dim; i += 32) sum = fmaf(values[i], values[i], sum);
  const float factor = 1.0f / sqrtf(warp_sum(sum) / heads.head_dim + norm.eps), one = norm.unit_offset ? 1.0f : 0.0f;
  for (int i = lane; i < heads.head_dim; i += 32) values[i] = values[i] * factor * (norm.weight[i] + one);
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

__global__ void rope_kernel(float* x, int width, Heads heads, RotaryTable t, bool interleaved) {
  after_previous();
  const int row = blockIdx.x, half = t.dim / 2;
  for (int i = threadIdx.x; i < heads.count * half; i += blockDim.x) {
    const int pair = i % half;
    float* values = x + (size_t)row * width + heads.offset + (size_t)(i / half) * heads.head_dim;
    float &a = values[interleaved ? 2 * pair : pair], &b = values[interleaved ? 2 * pair + 1 : pair + half];
    const float c = t.cosine[(size_t)row * half + pair], s = t.sine[(size_t)row * half + pair], first = a;
    a = __fmul_rn(a, c) - __fmul_rn(b, s), b = __fmul_rn(b, c) + __fmul_rn(first, s);
  }
}

}  // namespace

void embed(const Matrix& table, const int* tokens, int rows, int vocab_begin, float scale, const Rows& out,
           const Queue& queue) {
  start(queue, embed_kernel, rows, kThreads, 0, table, tokens, vocab_begin, scale, out);
  launched("embedding");
}

void read_row(const Matrix& matrix, int row, float* out, const Queue& queue) {
  start(queue, read_row_kernel, 1, kThreads, 0, matrix, row, out);
  launched("read_row");
}

void rms_norm(const float* x, const Norm& norm, int rows, const Rows& out, const Ahead& ahead, const Queue& queue) {
  constexpr int kAsking = 64;  // blocks of threads that ask for what comes next
  start(queue, rms_norm_kernel, rows + (ahead.bytes ? kAsking : 0), kNormThreads, 0, x, norm, rows, out, ahead);
  launched("rms_norm");
}

void add(float* x, const float* y, size_t count, const Queue& queue) {
  start(queue, add_kernel, ceil_div(count, kThreads), kThreads, 0, x, y, count);
  launched("add");
}

void scale(float* x, float factor, size_t count, const Queue& queue) {
  start(queue, scale_kernel, ceil_div(count, kThreads), kThreads, 0, x, factor, count);
  launched("scale");
}

void silu_mul(const float* in, int rows, const Rows& out, const Queue& queue) {
  start(queue, silu_mul_kernel, dim3(ceil_div(out.width, kThreads), rows), kThreads, 0, in, out);
  launched("silu_mul");
}

void select_rows(const float* in, const int* chosen, int rows, const Rows& out, const Queue& queue) {
  start(queue, copy_kernel, dim3(ceil_div(out.width, kThreads), rows), kThreads, 0, in, chosen, out);
  launched("select_rows");
}

void to_tiles(const float* in, int rows, const Rows& out, const Queue& queue) {
  start(queue, copy_kernel, dim3(ceil_div(out.width, kThreads), rows), kThreads, 0, in, nullptr, out);
  launched("to_tiles");
}

void head_norm(float* x, int width, const Heads& heads, const Norm& norm, int rows, const Queue& queue) {
  start(queue, head_norm_kernel, dim3(heads.count, rows), 32, 0, x, width, heads, norm);
  launched("head_norm");
}

void rotary_table(const RotaryTable& table, const int* positions, const int* prompts, int rows, const Queue& queue) {
  start(queue, rotary_table_kernel, rows, 64, 0, table, positions, prompts);
  launched("rotary_table");
}

void rope(float* x, int width, const Heads& heads, const RotaryTable& table, bool interleaved, int rows,
          const Queue& queue) {
  start(queue, rope_kernel, rows, kThreads, 0, x, width, heads, table, interleaved);
  launched("rope");
}

}  // namespace cuda
}  // namespace as
