// Long items (prompts) of the gated delta rule with a decay for each channel (channel_delta.cu), in three kernels: what
// rows take of each other, and keys and queries times their decays, of all chunks in parallel; then each head's chunks
// in turn, as with a decay for each head (gated_delta_chunks.cu); then the ring's keys and decays, which both still
// read.
#include "cuda/kernels/recurrent/channel_delta.cuh"
#include "cuda/kernels/recurrent/delta_chunk.cuh"

namespace as::cuda {
namespace recurrent {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

// A row's key (part 0) or query, times the factors of its chunk's rows up to it.
__device__ float* weighed_row(const DeltaArgs& a, int row, int head, int part) {
  return a.weighed + (((size_t)row * a.p.shape.heads + head) * 2 + part) * a.padded;
}
// What a row's key or query takes of the deltas of its chunk's rows.
__device__ float* pairs_row(const DeltaArgs& a, int row, int head, int part) {
  return a.weights + (((size_t)row * a.p.shape.heads + head) * 2 + part) * kChunkRows;
}
// Row j of a chunk's keys times the factors of the rows behind them; row kChunkRows: the decay of the whole chunk.
__device__ float* chunk_row(const DeltaArgs& a, const StateItem& item, int at, int head, int j) {
  const size_t chunk = item.chunks + (at - item.position) / kChunkRows;
  return a.chunks + ((chunk * a.p.shape.heads + head) * (kChunkRows + 1) + j) * a.padded;
}

// Shared memory of weigh_kernel().
struct WeighMemory {
  float *keys,
      *queries;   // [64, stride]: the rows' keys and queries, then these times the factors of their block up to them
  float* behind;  // [64, stride]: factors, then keys times the factors of their block behind them
  float* chains;  // [(kBlocks + 1) (kBlocks + 2) / 2, stride]
  double* sums;   // [padded]: decays of the first half of the chunk
  int stride;

  static size_t bytes(int padded) {
    return sizeof(float) * (3 * kChunkRows + (kBlocks + 1) * (kBlocks + 2) / 2) * (padded + 4) +
           sizeof(double) * padded;
  }
  __device__ WeighMemory(float* memory, int padded) : stride(padded + 4) {
    sums = reinterpret_cast<double*>(memory), keys = memory + 2 * padded, queries = keys + kChunkRows * stride;
    behind = queries + kChunkRows * stride, chains = behind + kChunkRows * stride;
  }
  // The factors of all rows of blocks [from, to), for each channel: those of the last block first.
  __device__ float* chain(int to, int from) const { return chains + (to * (to + 1) / 2 + from) * stride; }
};

// A CTA weighs the rows of a head in the chunk from position `at` on: `count` of the step, from `first` on. kMost: keys
// have the most channels, so that places in shared memory are known.
template <bool kMost>
__device__ void weigh_chunk(const DeltaArgs& a, const StateItem& item, int head, int at, const WeighMemory& m) {
  const DeltaShape& s = a.p.shape;
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4;
  const int padded = kMost ? kMostKeyDim : a.padded, stride = padded + 4, key_head = head / a.group, place = at % kRing;
  const int first = min(max(item.start - at, 0), kChunkRows), end = min(item.start + item.count - at, kChunkRows);
  const int count = max(end - first, 0), row = item.row + at + first - item.start;
  const bool whole = end == kChunkRows;
  const ChannelRing ring(a, item.slot, head);
  const float* x = a.p.x + (size_t)row * a.width + key_head * s.key;
  load_rows(m.keys, stride, ring.keys + (size_t)place * s.key, s.key, first, s.key, padded, a.aligned);
  load_rows(m.behind, stride, ring.factors + (size_t)place * s.key, s.key, first, s.key, padded, a.aligned);
  load_rows(m.keys + first * stride, stride, x + a.k_at, a.width, count, s.key, padded, a.aligned);
  load_rows(m.queries + first * stride, stride, x + a.q_at, a.width, count, s.key, padded, a.aligned);
  const int gates = s.heads * (s.key + 1);  // columns
  load_rows(m.behind + first * stride, stride, ChannelDecay::gates_of(a.p, row) + head * s.key, gates, count, s.key,
            padded, a.aligned && s.heads % 4 == 0);
  if (tid < count)
    a.betas[(size_t)(row + tid) * s.heads + head] =
        1.0f / (1.0f + expf(-a.p.gates[(size_t)(row + tid) * gates + s.heads * s.key + head]));
  wait_rows();

  // A thread has a channel of half of the rows.
  const int c = tid % kMostKeyDim, half = tid / kMostKeyDim, from = half * kChunkRows / 2;
  double sum = 0;
  if (c < padded) {
    const float bias = c < s.key ? a.p.dt_bias[head * s.key + c] : 0.0f, rate = ChannelDecay::rate_of(a.p, head);
    for (int r = from; c < s.key && r < min(from + kChunkRows / 2, first); r++)
      sum += ring.decays[(size_t)(place + r) * s.key + c];
#pragma unroll 4
    for (int r = max(from, first); r < min(from + kChunkRows / 2, first + count); r++) {
      const ChannelDecay decay(m.behind[r * stride + c], bias, rate, a.p.lower_bound);
      sum += decay.log, m.behind[r * stride + c] = decay.factor;
    }
    if (half == 1) m.sums[c] = sum;
  }
  const float scale = __fdiv_rn(1.0f, sqrtf((float)s.key));
  constexpr int kTogether = 4;  // heads of a warp whose sums are under way together
  for (int i0 = warp * kTogether; i0 < 2 * count; i0 += kWarps * kTogether) {
    LoadedHead heads[kTogether];
#pragma unroll
    for (int u = 0; u < kTogether; u++) {
      const int i = i0 + u < 2 * count ? i0 + u : i0, part = i % 2;
      heads[u].load((part ? m.queries : m.keys) + (first + i / 2) * stride, s.key);
      heads[u].normalize(part ? scale : 1.0f, s.key);
    }
#pragma unroll
    for (int u = 0; u < kTogether; u++)
      if (const int i = i0 + u; i < 2 * count)
        heads[u].store((i % 2 ? m.queries : m.keys) + (first + i / 2) * stride, padded);
  }
  __syncthreads();
  if (whole && half == 0 && c < padded)
    chunk_row(a, item, at, head, kChunkRows)[c] = expf((float)__dadd_rn(sum, m.sums[c]));

  // Within blocks, from their ends on, since later rows read earlier ones: a warp weighs four rows of the latter half
  // of a block, and then four of the former half. Two of them have a block; what they do adds up to the same.
  const int own = warp / 2 * kBlock;
  float left[kBlocks / 2];  // of the thread's channel, in two blocks: the factors of the rows behind
#pragma unroll
  for (float& each : left) each = 1;
#pragma unroll 1
  for (int turn = 0; turn < 2; turn++) {
    const int four = turn ? warp % 2 * 4 : 12 - warp % 2 * 4,
              i = own + four + lane / 8;  // the first of the rows; a lane's
    const bool there = own + four + 4 > first && own + four < first + count, is_new = i >= first && i < first + count;
    LaneChannels key, query;
    if (there) {
      key.load(m.keys + i * stride, padded), query.load(m.queries + i * stride, padded);
      const float4 taken = weigh_in_block(m.keys + own * stride, m.behind + own * stride, stride, padded, i % kBlock,
                                          four + 3, key, query);
      if (is_new) put_four(pairs_row(a, row + i - first, head, lane / 4 % 2) + own + lane % 4 * 4, taken);
    }
    __syncthreads();
    if (c < padded)
#pragma unroll
      for (int n = 0; n < kBlocks / 2; n++)
        if (const int b = 2 * n + half; (b + 1) * kBlock <= first + count) {  // a whole block
          const int end = b * kBlock + (turn ? kBlock / 2 : kBlock);
#pragma unroll
          for (int j = end - 1; j >= end - kBlock / 2; j--) {
            const float factor = m.behind[j * stride + c];
            m.behind[j * stride + c] = __fmul_rn(m.keys[j * stride + c], left[n]);
            left[n] = __fmul_rn(left[n], factor);
          }
          if (turn) m.chain(b + 1, b)[c] = left[n];
        }
    __syncthreads();
    if (there && is_new) key.store(m.keys + i * stride, padded), query.store(m.queries + i * stride, padded);
  }
  __syncthreads();
  if (tid < padded) {
    for (int to = 0; to <= kBlocks; to++) m.chain(to, to)[tid] = 1;
    for (int to = 2; to <= (first + count) / kBlock; to++)
      for (int b = to - 2; b >= 0; b--)
        m.chain(to, b)[tid] = __fmul_rn(m.chain(to, b + 1)[tid], m.chain(b + 1, b)[tid]);
  }
  __syncthreads();

  // Between blocks: what the rows of block i take of those of block j.
  int task = 0;
  for (int i = first / kBlock; count && i <= (first + count - 1) / kBlock; i++)
    for (int j = 0; j < i; j++, task++) {
      if (task % kWarps != warp) continue;
      float products[4][1][4] = {};  // tiles of 8 rows: keys', keys', queries', queries'
      const float *of_rows = m.keys + (i * kBlock + g) * stride + t, *between = m.chain(i, j + 1) + t;
      const int queries = m.queries - m.keys;
#pragma unroll 2
      for (int k = 0; k < padded; k += 8)
        multiply_keys(products, m.behind + j * kBlock * stride + k, stride, [&](int n, int half) {
          return __fmul_rn(of_rows[n / 2 * queries + n % 2 * 8 * stride + k + half * 4], between[k + half * 4]);
        });
#pragma unroll
      for (int n = 0; n < 4; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
          if (const int r = i * kBlock + n % 2 * 8 + 2 * t + e % 2; r >= first && r < first + count)
            pairs_row(a, row + r - first, head, n / 2)[j * kBlock + g + e / 2 * 8] = products[n][0][e];
    }

  // For the products with the state: a warp has a row at a time, a lane four channels.
  const int own_channel = 4 * lane;
  if (own_channel >= padded) return;
  const auto put_times = [&](float* to, const float* x, const float* y) {
    const float4 of_x = four_at(x + own_channel), of_y = four_at(y + own_channel);
    put_four(to + own_channel, make_float4(__fmul_rn(of_x.x, of_y.x), __fmul_rn(of_x.y, of_y.y),
                                           __fmul_rn(of_x.z, of_y.z), __fmul_rn(of_x.w, of_y.w)));
  };
#pragma unroll 2
  for (int r = warp; r < count; r += kWarps) {
    const int i = first + r;
    put_times(weighed_row(a, row + r, head, 0), m.keys + i * stride, m.chain(i / kBlock, 0));
    put_times(weighed_row(a, row + r, head, 1), m.queries + i * stride, m.chain(i / kBlock, 0));
  }
  if (whole)
#pragma unroll 2
    for (int j = warp; j < kChunkRows; j += kWarps)
      put_times(chunk_row(a, item, at, head, j), m.behind + j * stride, m.chain(kBlocks, j / kBlock + 1));
}

// A CTA for each head and chunk with rows of the step. The first one of an item also has the chunk before it, if
// accepted drafts had reached beyond its end.
template <bool kMost>
__global__ void __launch_bounds__(kThreads, 2) weigh_kernel(DeltaArgs a, StateRows rows) {
  extern __shared__ __align__(16) float memory[];
  after_previous();
  const StateChunk chunk = rows.chunks[blockIdx.y];
  const StateItem item = rows.items[chunk.item];
  const WeighMemory m(memory, kMost ? kMostKeyDim : a.padded);
  for (int at = chunk.at <= item.start ? item.position : chunk.at; at <= chunk.at; at += kChunkRows) {
    weigh_chunk<kMost>(a, item, blockIdx.x, at, m);
    __syncthreads();
  }
}

// A CTA for each item, head and kC of its values: its chunks one after the other.
template <int kC>
__global__ void __launch_bounds__(ChunkWork<true, kC, kChunkRows, true>::kThreads, 1)
    chunks_kernel(DeltaArgs a, StateRows rows) {
  extern __shared__ __align__(16) float memory[];
  using Work = ChunkWork<true, kC, kChunkRows, true>;
  constexpr int kStride = Work::kStride, kBlockThreads = Work::kThreads;
  after_previous();
  const StateItem item = rows.items[rows.short_items + blockIdx.z];
  const DeltaShape& s = a.p.shape;
  const int head = blockIdx.y, begin = blockIdx.x * kC, width = min(kC, s.value - begin), tid = threadIdx.x;
  ChunkMemory<kC, kChunkRows> m(memory, a.padded);
  Work work(m, a);
  float* ring_deltas = ChannelRing(a, item.slot, head).deltas + begin;
  const HeadState<kC, kStride> state{
      m.state, a.p.pages.state<float>(item.slot) + (size_t)head * s.key * s.value + begin, s.key, s.value, width};
  const int end = item.start + item.count, kept = kept_of(item);
  int at = item.position;
  state.load(item.start == 0, a.padded, a.aligned);
  const auto row_of = [&](int position) { return item.row + position - item.start; };
  // What advance() multiplies the deltas with.
  const auto load_behind = [&] {
    load_rows(m.keys, a.stride, chunk_row(a, item, at, head, 0), a.padded, kChunkRows, a.padded, a.padded, true);
    if (tid < a.padded / 4)
      copy_16(shared_address(m.whole + 4 * tid), chunk_row(a, item, at, head, kChunkRows) + 4 * tid);
  };
  const auto advance = [&] {
    work.advance();
    at += kChunkRows;
    if (at == kept) state.store();
  };
  while (at < item.start / kChunkRows * kChunkRows) {  // accepted drafts had reached beyond a multiple
    load_behind();
    load_rows(m.deltas, kStride, ring_deltas + (size_t)(at % kRing) * s.value, s.value, kChunkRows, width, kC,
              a.aligned);
    wait_rows();
    advance();
  }
  // Keys or queries of the rows from `position` on, as rows of the chunk from `first` on; and what they take of the
  // chunk's rows, up to the end of their own block.
  const auto load_heads = [&](int part, int position, int first, int count) {
    load_rows(m.queries + first * a.stride, a.stride, weighed_row(a, row_of(position), head, part),
              s.heads * 2 * a.padded, count, a.padded, a.padded, true);
  };
  const auto load_pairs = [&](int part, int position, int first, int count) {
    for (int n = tid; n < count * kChunkRows / 4; n += kBlockThreads) {
      const int row = n / (kChunkRows / 4), i = first + row, j = n % (kChunkRows / 4) * 4;
      if (j < (i / kBlock + 1) * kBlock)
        copy_16(shared_address(m.pairs + (part * kChunkRows + i) * kPairs + j),
                pairs_row(a, row_of(position) + row, head, part) + j);
    }
  };
  const auto load_factors = [&](int position, int first, int count) {
    load_pairs(0, position, first, count);
    if (tid < count)
      copy_4(shared_address(m.betas + first + tid), a.betas + (size_t)(row_of(position) + tid) * s.heads + head, true);
  };
  // The deltas of the first chunk's rows before the step.
  load_rows(m.deltas, kStride, ring_deltas + (size_t)(at % kRing) * s.value, s.value, item.start - at, width, kC,
            a.aligned);
  {
    const int first = item.start - at, count = min(at + kChunkRows, end) - item.start;
    load_heads(0, item.start, first, count), load_factors(item.start, first, count);
  }
  for (int position = item.start; position < end;) {
    const int first = position - at, count = min(at + kChunkRows, end) - position;
    work.take(first, count, 0);
    float* const queries = m.keys;  // keys came to the place of queries, which come where keys behind the chunk were
    m.keys = m.queries, m.queries = queries;
    wait_rows();
    load_pairs(1, position, first, count), load_heads(1, position, first, count);
    load_rows(m.deltas + first * kStride, kStride,
              a.p.x + (size_t)row_of(position) * a.width + a.v_at + head * s.value + begin, a.width, count, width, kC,
              a.aligned);
    work.clear_deltas_behind();
    commit_copies();
    if (work.part == 0) work.answer();
    wait_rows();
    if (work.part == 1) work.answer();
    __syncthreads();
    const int next = position + count, left = min(kChunkRows, end - next);  // rows of the next chunk
    const bool advances = first + count == kChunkRows && (position + count < end || at + kChunkRows <= kept);
    if (advances) load_behind();
    commit_copies();
    if (left > 0) load_heads(0, next, 0, left);
    work.substitute();
    if (work.part == 1)
      work.each_row([&](int i, const float4& four) {
        put_values<true>(a, head, begin + work.value, row_of(position) + i - first, four);
      });
    __syncthreads();
    if (left > 0) load_factors(next, 0, left);
    commit_copies();
    if (at >= kept) work.keep_deltas(ring_deltas + (size_t)(at % kRing) * s.value, s.value, width);
    position = next;
    if (advances) {
      wait_copies<1>();
      __syncthreads();
      advance();
    }
  }
  if (item.start == 0 && kept == 0) state.clear();
}

// Writes the keys and decays of the rows since the state's position to the ring.
__global__ void __launch_bounds__(128) keep_rows_kernel(DeltaArgs a, StateRows rows) {
  after_previous();
  keep_channel_rows(a, rows.items[rows.short_items + blockIdx.y], blockIdx.x);
}

}  // namespace

void channel_chunks(const DeltaArgs& a, const StateRows& rows, const Queue& queue) {
  const DeltaShape& s = a.p.shape;
  start(queue, a.padded == kMostKeyDim ? weigh_kernel<true> : weigh_kernel<false>, dim3(s.heads, rows.chunk_count),
        kThreads, WeighMemory::bytes(a.padded), a, rows);
  with_columns(a, rows, [&](auto columns) {
    constexpr int kC = decltype(columns)::value;
    start(queue, chunks_kernel<kC>, dim3(ceil_div(s.value, kC), s.heads, rows.long_items),
          ChunkWork<true, kC, kChunkRows, true>::kThreads, ChunkMemory<kC, kChunkRows>::bytes(a.padded), a, rows);
  });
  start(queue, keep_rows_kernel, dim3(s.heads, rows.long_items), 128, 0, a, rows);
}

}  // namespace recurrent
}  // namespace as::cuda
