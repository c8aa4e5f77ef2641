// Ops on rows with results in float32 or 16 bits: embedding, norms, activation functions. float32 only: rows_f32.cu.
#include <algorithm>

#include "cuda/kernels/norm/norm.h"
#include "cuda/kernels/quantize/quantized.cuh"
#include "cuda/kernels/sampling/argmax.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace {

constexpr int kThreads = 256;

__device__ float value_of(const Matrix& m, int row, int column) {
  if (m.tiles) return from_dtype16(m.tiles[tile_offset(row, column, blocks_of(m.k))]);
  if (m.quants.bits) return AS_DTYPE16::value_of(m.quants, row, column, m.k);
  return m.values[(size_t)row * m.k + column];
}

// If there are few rows, several CTAs share one: each thread then waits for memory only once.
__global__ void __launch_bounds__(kThreads)
    embed_kernel(Matrix table, TokenRows tokens, int vocab_begin, float scale, Rows out) {
  after_previous();
  const int row = blockIdx.x;
  int id = tokens.numbers && tokens.numbers[row] >= 0 ? tokens.given_id : tokens.tokens[row];
  if (id < 0) id = sampled_token(tokens.sampled + (size_t)~id * kArgmaxParts);
  id -= vocab_begin;
  const bool there = id >= 0 && id < table.n;
  const int own = blockIdx.y * kThreads + threadIdx.x, step = gridDim.y * kThreads;
  if (table.tiles) {  // eight columns are adjacent
    for (int i = own * 8; i < table.k; i += step * 8) {
      const uint4 eight = there ? *reinterpret_cast<const uint4*>(table.tiles + tile_offset(id, i, blocks_of(table.k)))
                                : make_uint4(0, 0, 0, 0);
      const uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
      float values[8];
#pragma unroll
      for (int j = 0; j < 8; j++) values[j] = from_dtype16((uint16_t)(words[j / 2] >> j % 2 * 16)) * scale;
      put_eight(out, row, i, table.k, values);
    }
  } else {
    for (int i = own; i < table.k; i += step) put(out, row, i, there ? value_of(table, id, i) * scale : 0.0f);
  }
}

__global__ void read_row_kernel(Matrix m, int row, float* out) {
  after_previous();
  for (int i = threadIdx.x; i < m.k; i += kThreads) out[i] = value_of(m, row, i);
}

// A thread writes eight adjacent columns. Reads are scattered over a row, which the L1 cache holds.
__global__ void __launch_bounds__(kThreads) gather_kernel(Rows in, const int* order, Rows out) {
  let_next_begin();
  const int row = blockIdx.y, eight = blockIdx.x * kThreads + threadIdx.x, first = eight * 8;
  const int blocks = blocks_of(out.width), from_blocks = blocks_of(in.width);
  if (eight >= blocks * 8) return;
  int from[8];
#pragma unroll
  for (int i = 0; i < 8; i++) from[i] = first + i < out.width ? order[first + i] : 0;  // no kernel writes the order
  await_previous();
  uint32_t pairs[4] = {};
#pragma unroll
  for (int i = 0; i < 8; i++) {
    if (first + i >= out.width) break;
    const uint32_t value = in.tiles ? in.tiles[tile_offset(row, from[i], from_blocks)]
                                    : to_dtype16(in.values[(size_t)row * in.width + from[i]]);
    pairs[i / 2] |= value << i % 2 * 16;
  }
  *reinterpret_cast<uint4*>(out.tiles + tile_offset(row, first, blocks)) =
      make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// kNormThreads: threads of a row; more threads would add only zeros, so sums do not depend on their number. kEights:
// groups of eight values that a thread keeps in registers. kMany: a CTA has several rows and prefetches the next one
// while it sums one.
template <int kNormThreads, int kEights, bool kMany>
__global__ void __launch_bounds__(kNormThreads) rms_norm_kernel(const float* x, Norm norm, int rows, Rows out) {
  const int width = out.width;
  float kept[kEights][8], weights[kEights][8];
  const auto at = [](int i) { return (i * kNormThreads + (int)threadIdx.x) * 8; };
  let_next_begin();
#pragma unroll
  for (int i = 0; i < kEights; i++)  // no kernel writes weights, so they are read before the wait
    read_eight(norm.weight, at(i), width, weights[i]);
  await_previous();
  const auto read = [&](int row) {
#pragma unroll
    for (int i = 0; i < kEights; i++) read_eight(x + (size_t)row * width, at(i), width, kept[i]);
  };
  read(blockIdx.x);
  for (int row = blockIdx.x; row < rows; row += gridDim.x) {
    const float* in = x + (size_t)row * width;
    float sum = 0, now[kEights][8];
#pragma unroll
    for (int i = 0; i < kEights; i++)
#pragma unroll
      for (int j = 0; j < 8; j++) now[i][j] = kept[i][j], sum = fmaf(now[i][j], now[i][j], sum);
    if (const int next = row + gridDim.x; kMany && next < rows) read(next);
    constexpr int kAll = kEights * kNormThreads * 8;
    for (int i = kAll + threadIdx.x; i < width; i += kNormThreads) sum = fmaf(in[i], in[i], sum);
    const float factor = 1.0f / sqrtf(block_sum<kNormThreads>(sum, kNormThreads) / width + norm.eps);
    const float one = norm.unit_offset ? 1.0f : 0.0f;
#pragma unroll
    for (int i = 0; i < kEights; i++) {
#pragma unroll
      for (int j = 0; j < 8; j++) now[i][j] = now[i][j] * factor * (weights[i][j] + one);
      put_eight(out, row, at(i), width, now[i]);
    }
    for (int i = kAll + threadIdx.x; i < width; i += kNormThreads)
      put(out, row, i, in[i] * factor * (norm.weight[i] + one));
    if (!kMany) break;
  }
}

__device__ float gelu_tanh(float x) {
  constexpr float kRoot = 0.7978845608028654f;  // square root of 2 / pi
  return 0.5f * x * (1.0f + tanhf(kRoot * (x + 0.044715f * x * x * x)));
}

template <bool kGelu>
__global__ void gate_kernel(const float* in, Gating gating, Rows out) {
  after_previous();
  const int row = blockIdx.y, i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= out.width) return;
  const float gate = in[(size_t)row * 2 * out.width + i], up = in[(size_t)row * 2 * out.width + out.width + i];
  put(out, row, i, kGelu ? gelu_tanh(gate) * up : gated_by(gating, gate, up));
}

// Copies column i of row `from` to row `row`. Padding of tiles becomes zero: the memory may hold NaNs of rows of
// another width, and products with zero weights would keep them.
__device__ void copy_value(const Rows& in, int from, const Rows& out, int row, int i) {
  const int blocks = blocks_of(out.width);
  if (i < out.width)
    put(out, row, i,
        in.values ? in.values[(size_t)from * out.width + i] : from_dtype16(in.tiles[tile_offset(from, i, blocks)]));
  else if (out.tiles && i < blocks * kBlock) out.tiles[tile_offset(row, i, blocks)] = 0;
}

// chosen: the source of each row; null: the same row.
__global__ void copy_kernel(Rows in, const int* chosen, Rows out) {
  after_previous();
  const int row = blockIdx.y;
  copy_value(in, chosen ? chosen[row] : row, out, row, blockIdx.x * kThreads + threadIdx.x);
}

__global__ void keep_and_select_kernel(Rows in, const int* places, int rows, float* kept, const int* chosen, Rows out) {
  after_previous();
  const int row = blockIdx.y, i = blockIdx.x * kThreads + threadIdx.x;
  if (row >= rows) return copy_value(in, chosen[row - rows], out, row - rows, i);
  if (const int place = places[row]; place >= 0 && i < in.width)
    kept[(size_t)place * in.width + i] = in.values[(size_t)row * in.width + i];
}

// The same into tiles; a thread converts eight adjacent columns.
__global__ void __launch_bounds__(kThreads) to_tiles_kernel(const float* in, Rows out) {
  after_previous();
  const int row = blockIdx.y, first = (blockIdx.x * kThreads + threadIdx.x) * 8, blocks = blocks_of(out.width);
  if (first >= blocks * kBlock) return;
  float x[8];
  read_eight(in + (size_t)row * out.width, first, out.width, x);
  *reinterpret_cast<uint4*>(out.tiles + tile_offset(row, first, blocks)) = make_uint4(
      to_dtype16x2(x[0], x[1]), to_dtype16x2(x[2], x[3]), to_dtype16x2(x[4], x[5]), to_dtype16x2(x[6], x[7]));
}

}  // namespace

void embed(const Matrix& table, const TokenRows& tokens, int rows, int vocab_begin, float scale, const Rows& out,
           const Queue& queue) {
  const int parts = ceil_div(table.k, kThreads * (table.tiles ? 8 : 1)), most = ceil_div(sm_count(), std::max(rows, 1));
  start(queue, embed_kernel, dim3(rows, std::max(std::min(parts, most), 1)), kThreads, 0, table, tokens, vocab_begin,
        scale, out);
}

void read_row(const Matrix& matrix, int row, float* out, const Queue& queue) {
  start(queue, read_row_kernel, 1, kThreads, 0, matrix, row, out);
}

void rms_norm(const float* x, const Norm& norm, int rows, const Rows& out, const Queue& queue) {
  const auto start_threads = [&](auto kernel, auto many, int threads) {
    const int most = sm_count() * (1024 / threads);  // CTAs that run at once
    if (rows <= most) start(queue, kernel, rows, threads, 0, x, norm, rows, out);
    else start(queue, many, most, threads, 0, x, norm, rows, out);
  };
  const auto wide = rms_norm_kernel<512, 2, false>;  // has enough loads in flight without kMany
  if (out.width <= 8 * 128) start_threads(rms_norm_kernel<128, 1, false>, rms_norm_kernel<128, 1, true>, 128);
  else if (out.width <= 8 * 256) start_threads(rms_norm_kernel<256, 1, false>, rms_norm_kernel<256, 1, true>, 256);
  else if (out.width <= 8 * 512) start_threads(rms_norm_kernel<512, 1, false>, rms_norm_kernel<512, 1, true>, 512);
  else start(queue, wide, rows, 512, 0, x, norm, rows, out);
}

void silu_mul(const float* in, const Gating& gating, int rows, const Rows& out, const Queue& queue) {
  start(queue, gate_kernel<false>, dim3(ceil_div(out.width, kThreads), rows), kThreads, 0, in, gating, out);
}

void gelu_tanh_mul(const float* in, int rows, const Rows& out, const Queue& queue) {
  start(queue, gate_kernel<true>, dim3(ceil_div(out.width, kThreads), rows), kThreads, 0, in, Gating(), out);
}

void select_rows(const Rows& in, const int* chosen, int rows, const Rows& out, const Queue& queue) {
  start(queue, copy_kernel, dim3(ceil_div(out.width, kThreads), rows), kThreads, 0, in, chosen, out);
}

void keep_and_select(const float* in, const int* places, int rows, float* kept, const int* chosen, int outputs,
                     const Rows& out, const Queue& queue) {
  start(queue, keep_and_select_kernel, dim3(ceil_div(out.width, kThreads), rows + outputs), kThreads, 0,
        Rows{const_cast<float*>(in), nullptr, out.width}, places, rows, kept, chosen, out);
}

void to_tiles(const float* in, int rows, const Rows& out, const Queue& queue) {
  const int eights = blocks_of(out.width) * 8;
  if (out.tiles) start(queue, to_tiles_kernel, dim3(ceil_div(eights, kThreads), rows), kThreads, 0, in, out);
  else
    start(queue, copy_kernel, dim3(ceil_div(out.width, kThreads), rows), kThreads, 0,
          Rows{const_cast<float*>(in), nullptr, out.width}, nullptr, out);
}

void gather_columns(const Rows& in, const int* order, int rows, const Rows& out, const Queue& queue) {
  constexpr int kMaxRows = 65535;  // rows of a grid
  for (int done = 0; done < rows; done += kMaxRows / kBlock * kBlock) {
    Rows from = in, to = out;
    if (from.tiles) from.tiles += (size_t)done / kBlock * blocks_of(in.width) * kBlockValues;
    else from.values += (size_t)done * in.width;
    to.tiles += (size_t)done / kBlock * blocks_of(out.width) * kBlockValues;
    start(queue, gather_kernel,
          dim3(ceil_div(blocks_of(out.width) * 8, kThreads), std::min(rows - done, kMaxRows / kBlock * kBlock)),
          kThreads, 0, from, order, to);
  }
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
