// The gated delta rule with a decay for each channel (Kimi Linear's KDA; docs/decisions/recurrent.md).
//
// What is left of row j's key at row i is the key times the factors e^decay of the rows between, for each channel.
// Within a block of 16 rows they are multiplied row by row, from i backwards. Between blocks they come in three parts:
// of row i's block up to it, of the blocks between, and of row j's block behind it, so that tensor cores can multiply
// keys. All are at most 1, so nothing overflows. None depends on other rows than these, so bits do not depend on how
// many rows a call computes.
#include <algorithm>

#include "cuda/kernels/recurrent/channel_delta.cuh"

namespace as::cuda {
namespace recurrent {
namespace {

// A CTA computes kC values of a head, of all rows of short items other than single rows, chunk by chunk. It keeps their
// rows, which no other CTA reads.
template <int kC>
__global__ void __launch_bounds__(ChannelWork<kC>::kThreads, 1) channel_kernel(DeltaArgs a, StateRows rows) {
  extern __shared__ __align__(16) float memory[];
  using Work = ChannelWork<kC>;
  let_next_begin();
  const DeltaShape& s = a.p.shape;
  const int head = blockIdx.y, begin = blockIdx.x * kC, width = min(kC, s.value - begin);
  const auto compute = [&](const StateItem& item) {
    Work work(memory, a, item, head, begin);
    const HeadState<kC, Work::kStride> state{work.m.state,
                                             a.p.pages.state<float>(item.slot) + (size_t)head * s.key * s.value + begin,
                                             s.key, s.value, width};
    const int end = item.start + item.count, kept = kept_of(item);
    int at = item.position;
    state.load(item.start == 0, a.padded, a.aligned);
    const auto advance = [&] {
      work.advance();
      at += kChunkRows;
      if (at == kept) state.store();
      __syncthreads();
    };

    while (at < item.start / kChunkRows * kChunkRows) {  // accepted drafts had reached beyond a multiple
      work.load(at, kChunkRows, 0);
      work.weigh();
      advance();
    }
    for (int position = item.start; position < end;) {
      const int first = position - at, count = min(at + kChunkRows, end) - position;
      work.load(at, first, count);
      work.weigh();
      work.answer();
      work.substitute();
      if (at >= kept) work.keep_deltas(at);
      position += count;
      __syncthreads();
      if (first + count == kChunkRows && (position < end || at + kChunkRows <= kept)) advance();
    }
    if (item.start == 0 && kept == 0) state.clear();
    if (begin == 0) keep_channel_rows(a, item, head);
    __syncthreads();
  };
  for (int z0 = blockIdx.z; z0 < rows.short_items; z0 += 32 * gridDim.z) {
    const int own = z0 + threadIdx.x % 32 * gridDim.z;  // a lane's item
    const StateItem item = own < rows.short_items ? rows.items[own] : StateItem{-1, 0, 0, 0, 0, 0, 0};
    for (unsigned left = __ballot_sync(~0u, item.slot >= 0 && !is_one_row(item)); left; left &= left - 1)
      await_previous(), compute(rows.items[z0 + (__ffs(left) - 1) * gridDim.z]);
  }
  await_previous();  // also without items: the next kernel may not begin before the previous one has ended
}

// The more values a CTA has, the more warps it has, and the fewer CTAs weigh the same rows.
void launch(const DeltaArgs& a, const StateRows& rows, const Queue& queue) {
  constexpr int kMostItems = 2;  // at a time: few items are left, and CTAs that find none take time, too
  const auto start_with = [&](auto kernel, int values, int threads, size_t bytes) {
    start(queue, kernel,
          dim3(ceil_div(a.p.shape.value, values), a.p.shape.heads, std::min(rows.short_items, kMostItems)), threads,
          bytes, a, rows);
  };
  if (const size_t bytes = ChannelMemory<64>::bytes(a.padded); a.p.shape.value > 32 && (int)bytes <= max_shared())
    start_with(channel_kernel<64>, 64, ChannelWork<64>::kThreads, bytes);
  else start_with(channel_kernel<32>, 32, ChannelWork<32>::kThreads, ChannelMemory<32>::bytes(a.padded));
}

}  // namespace

void channel_delta(const DeltaArgs& a, const StateRows& rows, const Queue& queue) {
  if (rows.short_items) single_channel_rows(a, rows, queue), launch(a, rows, queue);
  if (rows.long_items) channel_chunks(a, rows, queue);
}

}  // namespace recurrent

size_t channel_delta_shared(const DeltaShape& shape) {
  return recurrent::ChannelMemory<32>::bytes((shape.key + 7) / 8 * 8);
}
}  // namespace as::cuda
