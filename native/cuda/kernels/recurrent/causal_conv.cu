// The causal convolution: each channel's weighted sum over its last rows, in ascending order by FMA.
#include "cuda/kernels/common/device.cuh"
#include "cuda/kernels/recurrent/recurrent.h"

namespace as::cuda {
namespace {

constexpr int kThreads = 128, kSegment = 16;  // kSegment: rows of a CTA's turn in long items

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
  __device__ float row(int position) const {
    if (position < 0) return 0.0f;
    if (position >= item.start) return p.x[(size_t)(item.row + position - item.start) * p.channels + c];
    return position < item.position ? *before(position, item.position) : *recent(position);
  }

  // Rows [first, last) of the item. kTaps: the number of taps, 0 for any.
  template <int kTaps>
  __device__ void compute(int first, int last) const {
    const float bias = p.bias ? p.bias[c] : 0.0f;
    const float* weights = p.weight + (size_t)c * p.taps;
    float window[kTaps ? kTaps : 1], weight[kTaps ? kTaps : 1];
#pragma unroll
    for (int t = 0; t < kTaps; t++) weight[t] = weights[t], window[t] = t ? row(item.start + first - kTaps + t) : 0;
#pragma unroll 4
    for (int i = first; i < last; i++) {
      float sum = bias;
      if constexpr (kTaps > 0) {
#pragma unroll
        for (int t = 0; t + 1 < kTaps; t++) window[t] = window[t + 1];
        window[kTaps - 1] = p.x[(size_t)(item.row + i) * p.channels + c];
#pragma unroll
        for (int t = 0; t < kTaps; t++) sum = fmaf(window[t], weight[t], sum);
      } else {
        for (int t = 0; t < p.taps; t++) sum = fmaf(row(item.start + i - (p.taps - 1 - t)), weights[t], sum);
      }
      p.y[(size_t)(item.row + i) * p.channels + c] =
          p.activated ? __fmul_rn(sum, __fdiv_rn(1.0f, 1.0f + expf(-sum))) : sum;
    }
  }

  // The page after the step.
  __device__ void keep() const {
    const int end = item.start + item.count, last = (end - item.drafts) / kChunkRows * kChunkRows;
    if (last > item.position)
      for (int position = last - (p.taps - 1); position < last; position++) *before(position, last) = row(position);
    for (int position = max(item.start, end - ring); position < end; position++) *recent(position) = row(position);
  }
};

// Short items. The channel's thread does all, so nothing that it reads has been overwritten.
template <int kTaps>
__global__ void __launch_bounds__(kThreads) short_kernel(CausalConv p, const StateItem* items) {
  after_previous();
  const StateItem item = items[blockIdx.y];
  const int c = blockIdx.x * kThreads + threadIdx.x;
  if (item.slot < 0 || c >= p.channels) return;
  const Channel channel{p, item, c, p.taps - 1 + kChunkRows};
  channel.compute<kTaps>(0, item.count);
  channel.keep();
}

template <int kTaps>
__global__ void __launch_bounds__(kThreads) chunks_kernel(CausalConv p, StateRows rows) {
  after_previous();
  const StateChunk chunk = rows.chunks[blockIdx.y];
  const StateItem item = rows.items[chunk.item];
  const int c = blockIdx.x * kThreads + threadIdx.x;
  if (c >= p.channels) return;
  const int first = max(chunk.at, item.start) + blockIdx.z * kSegment - item.start,
            last = min(chunk.at + kChunkRows - item.start, item.count);
  if (first < last) Channel{p, item, c, p.taps - 1 + kChunkRows}.compute<kTaps>(first, min(first + kSegment, last));
}

__global__ void __launch_bounds__(kThreads) keep_kernel(CausalConv p, const StateItem* items) {
  after_previous();
  const StateItem item = items[blockIdx.y];
  const int c = blockIdx.x * kThreads + threadIdx.x;
  if (c < p.channels) Channel{p, item, c, p.taps - 1 + kChunkRows}.keep();
}

template <int kTaps>
void launch(const CausalConv& p, const StateRows& rows, const Queue& queue) {
  const int parts = ceil_div(p.channels, kThreads);
  if (rows.short_items) start(queue, short_kernel<kTaps>, dim3(parts, rows.short_items), kThreads, 0, p, rows.items);
  if (rows.long_items) {
    start(queue, chunks_kernel<kTaps>, dim3(parts, rows.chunk_count, kChunkRows / kSegment), kThreads, 0, p, rows);
    start(queue, keep_kernel, dim3(parts, rows.long_items), kThreads, 0, p, rows.items + rows.short_items);
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
