// The causal convolution: each channel's weighted sum over its last rows, in ascending order by FMA.
#include "cuda/kernels/common/device.cuh"
#include "cuda/kernels/recurrent/recurrent.h"

namespace as::cuda {
namespace {

constexpr int kThreads = 128, kKeepParts = 8;
constexpr int kSegment = 16, kFoursSegment = 32;  // rows of a CTA's turn in long items

// A channel of an item: its rows in the step, and before it in the slot's page.
struct Channel {
  const CausalConv& p;
  const StateItem& item;
  int c, ring;  // ring: rows of the page's second part

  __device__ float* before(int position, int at) const {
    return p.pages.state<float>(item.slot) + (size_t)(position - at + p.taps - 1) * p.channels + c;
  }
  __device__ float* recent(int position) const {
    return p.pages.recent<float>(item.slot) + (size_t)(position % ring) * p.channels + c;
  }
  __device__ const float* place(int position) const {
    if (position >= item.start) return p.x + (size_t)(item.row + position - item.start) * p.channels + c;
    return position < item.position ? before(position, item.position) : recent(position);
  }
  __device__ float row(int position) const { return position < 0 ? 0.0f : *place(position); }

  __device__ float activated(float sum) const {
    return p.activated ? __fmul_rn(sum, __frcp_rn(1.0f + expf(-sum))) : sum;
  }

  // Rows [first, last) of the item. kTaps: the number of taps, 0 for any. kAtOnce: rows that are loaded together.
  // kAwaits: waits for the previous kernel before it reads rows of the step; first is then 0.
  template <int kTaps, int kAtOnce, bool kAwaits = false>
  __device__ void compute(int first, int last) const {
    const float bias = p.bias ? p.bias[c] : 0.0f;
    const float* weights = p.weight + (size_t)c * p.taps;
    float window[kTaps ? kTaps : 1], weight[kTaps ? kTaps : 1];
#pragma unroll
    for (int t = 0; t < kTaps; t++) weight[t] = weights[t], window[t] = t ? row(item.start + first - kTaps + t) : 0;
    if (kAwaits) await_previous();
    const float* x = p.x + (size_t)(item.row + first) * p.channels + c;
    float* y = p.y + (size_t)(item.row + first) * p.channels + c;
    const auto put = [&](float sum) {
      *y = activated(sum);
      y += p.channels;
    };
    if constexpr (kTaps > 0) {
      for (int begin = first; begin < last; begin += kAtOnce) {
        float values[kAtOnce];  // loads are under way together
#pragma unroll
        for (int i = 0; i < kAtOnce; i++)
          if (begin + i < last) values[i] = x[(size_t)(begin + i - first) * p.channels];
#pragma unroll
        for (int i = 0; i < kAtOnce; i++) {
          if (begin + i >= last) break;
#pragma unroll
          for (int t = 0; t + 1 < kTaps; t++) window[t] = window[t + 1];
          window[kTaps - 1] = values[i];
          float sum = bias;
#pragma unroll
          for (int t = 0; t < kTaps; t++) sum = fmaf(window[t], weight[t], sum);
          put(sum);
        }
      }
    } else {
      for (int i = first; i < last; i++) {
        float sum = bias;
        for (int t = 0; t < p.taps; t++) sum = fmaf(row(item.start + i - (p.taps - 1 - t)), weights[t], sum);
        put(sum);
      }
    }
  }

  // The page after the step, or a part of it.
  __device__ void keep(int part = 0, int parts = 1) const {
    const int end = item.start + item.count, last = (end - item.drafts) / kChunkRows * kChunkRows;
    if (last > item.position && !part)
      for (int position = last - (p.taps - 1); position < last; position++) *before(position, last) = row(position);
    for (int position = max(item.start, end - ring) + part; position < end; position += parts)
      *recent(position) = row(position);
  }
};

// Short items. The channel's thread does all, so nothing that it reads has been overwritten. Items, weights and pages
// were written before the step's first kernel, so they are read before the previous kernel has ended. A kernel that
// ended without waiting for it would let the next one begin too early.
template <int kTaps>
__global__ void __launch_bounds__(kThreads) short_kernel(CausalConv p, const StateItem* items) {
  let_next_begin();
  const StateItem item = items[blockIdx.y];
  const int c = blockIdx.x * kThreads + threadIdx.x;
  if (item.slot < 0 || c >= p.channels) return await_previous();
  const Channel channel{p, item, c, p.taps - 1 + kChunkRows};
  channel.compute<kTaps, 4, true>(0, item.count);
  channel.keep();
}

template <int kTaps>
__global__ void __launch_bounds__(kThreads, 8) chunks_kernel(CausalConv p, StateRows rows) {
  after_previous();
  const StateChunk chunk = rows.chunks[blockIdx.z];
  const StateItem item = rows.items[chunk.item];
  const int c = blockIdx.x * kThreads + threadIdx.x;
  if (c >= p.channels) return;
  const int first = max(chunk.at, item.start) + blockIdx.y * kSegment - item.start,
            last = min(chunk.at + kChunkRows - item.start, item.count);
  if (first < last)
    Channel{p, item, c, p.taps - 1 + kChunkRows}.compute<kTaps, kSegment>(first, min(first + kSegment, last));
}

// The same for four taps, with four adjacent channels a thread. All memory is aligned to four values.
__global__ void __launch_bounds__(kThreads, 5) chunks_of_fours_kernel(CausalConv p, StateRows rows) {
  constexpr int kTaps = 4, kAtOnce = 4;
  after_previous();
  const StateChunk chunk = rows.chunks[blockIdx.z];
  const StateItem item = rows.items[chunk.item];
  const int c = 4 * (blockIdx.x * kThreads + threadIdx.x);
  const int first = max(chunk.at, item.start) + blockIdx.y * kFoursSegment - item.start,
            count = min(min(chunk.at + kChunkRows - item.start, item.count) - first, kFoursSegment);
  if (c >= p.channels || count <= 0) return;
  const Channel channel{p, item, c, kTaps - 1 + kChunkRows};
  const auto read = [](float(&to)[4], const float* from) {
    const float4 four = *reinterpret_cast<const float4*>(from);
    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
  };
  float bias[4] = {}, weights[4][kTaps], window[kTaps][4] = {}, loaded[kAtOnce][4];
  if (p.bias) read(bias, p.bias + c);
#pragma unroll
  for (int u = 0; u < 4; u++) read(weights[u], p.weight + (size_t)(c + u) * kTaps);
#pragma unroll
  for (int t = 1; t < kTaps; t++)
    if (const int position = item.start + first - kTaps + t; position >= 0) read(window[t], channel.place(position));
  const size_t at = (size_t)(item.row + first) * p.channels + c;
  const auto load = [&](int begin) {
#pragma unroll
    for (int i = 0; i < kAtOnce; i++)
      if (begin + i < count) read(loaded[i], p.x + at + (size_t)(begin + i) * p.channels);
  };
  load(0);
  for (int begin = 0; begin < count; begin += kAtOnce) {
    float values[kAtOnce][4];
#pragma unroll
    for (int i = 0; i < kAtOnce; i++)
#pragma unroll
      for (int u = 0; u < 4; u++) values[i][u] = loaded[i][u];
    load(begin + kAtOnce);  // on their way while these are computed
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) {
      if (begin + i >= count) break;
      float sums[4];
#pragma unroll
      for (int u = 0; u < 4; u++) {
#pragma unroll
        for (int t = 0; t + 1 < kTaps; t++) window[t][u] = window[t + 1][u];
        window[kTaps - 1][u] = values[i][u];
        sums[u] = bias[u];
#pragma unroll
        for (int t = 0; t < kTaps; t++) sums[u] = fmaf(window[t][u], weights[u][t], sums[u]);
        sums[u] = channel.activated(sums[u]);
      }
      *reinterpret_cast<float4*>(p.y + at + (size_t)(begin + i) * p.channels) =
          make_float4(sums[0], sums[1], sums[2], sums[3]);
    }
  }
}

__global__ void __launch_bounds__(kThreads) keep_kernel(CausalConv p, const StateItem* items) {
  after_previous();
  const StateItem item = items[blockIdx.y];
  const int c = blockIdx.x * kThreads + threadIdx.x;
  // With drafts, rows of the ring that one part writes could be those that another one reads.
  const int parts = item.drafts ? 1 : gridDim.z;
  if (c < p.channels && blockIdx.z < parts) Channel{p, item, c, p.taps - 1 + kChunkRows}.keep(blockIdx.z, parts);
}

template <int kTaps>
void launch(const CausalConv& p, const StateRows& rows, const Queue& queue) {
  const int parts = ceil_div(p.channels, kThreads);
  if (rows.short_items) start(queue, short_kernel<kTaps>, dim3(parts, rows.short_items), kThreads, 0, p, rows.items);
  if (rows.long_items) {
    const auto aligned = [](const void* pointer) { return (uintptr_t)pointer % 16 == 0; };
    if (kTaps == 4 && p.channels % 4 == 0 && aligned(p.x) && aligned(p.y) && aligned(p.weight) && aligned(p.bias) &&
        ceil_div(parts, 4) * rows.chunk_count >= sm_count())
      start(queue, chunks_of_fours_kernel, dim3(ceil_div(parts, 4), kChunkRows / kFoursSegment, rows.chunk_count),
            kThreads, 0, p, rows);
    else start(queue, chunks_kernel<kTaps>, dim3(parts, kChunkRows / kSegment, rows.chunk_count), kThreads, 0, p, rows);
    start(queue, keep_kernel, dim3(parts, rows.long_items, kKeepParts), kThreads, 0, p, rows.items + rows.short_items);
  }
}

}  // namespace

PageBytes causal_conv_bytes(int channels, int taps) {
  const size_t row = sizeof(float) * channels;
  return {round_up_256((taps - 1) * row), round_up_256((taps - 1 + kChunkRows) * row)};
}

void causal_conv(const CausalConv& p, const StateRows& rows, const Queue& queue) {
  p.taps == 4 ? launch<4>(p, rows, queue) : launch<0>(p, rows, queue);
}

}  // namespace as::cuda
