// The gated delta rule with a decay for each channel, of single rows at which no state advances, as nearly all rows of
// decode are. Sums are those of channel_delta.cuh; of products' 8 columns, the first is the key's, the second the
// query's. Each value of the state is read just once, by the warp that multiplies it.
#include "cuda/kernels/recurrent/channel_delta.cuh"

namespace as::cuda {
namespace recurrent {
namespace {

constexpr int kValueWarps = 4, kKeyWarps = kBlocks;  // with 32 values each; that multiply keys of a block each
constexpr int kThreads = 32 * (kValueWarps + kKeyWarps);
constexpr int kAhead = 4;  // steps of 8 channels, of which a thread's loads are under way

struct RowMemory {
  // [64, stride], as in ChannelMemory. Deltas of the rows before it, [63, kDeltaStride], come where keys have been.
  float *keys, *behind;
  float *query, *passed;  // [stride]; [key and query, stride], times the factors of their block up to them
  float *between,
      *past;  // [kBlocks - 1, stride]: the factors of the blocks between block b and the row's; of all before
  float *k_weights, *q_weights;  // [64]

  static constexpr int kDeltaStride = 32 * kValueWarps + 8;
  __host__ __device__ static int key_floats(int stride) {
    const int keys = kChunkRows * stride, deltas = (kChunkRows - 1) * kDeltaStride;
    return keys > deltas ? keys : deltas;
  }
  static size_t bytes(int stride) {
    return sizeof(float) * ((size_t)key_floats(stride) + (kChunkRows + 3 + kBlocks - 1 + 1) * stride + 2 * kChunkRows);
  }
  __device__ RowMemory(float* memory, int stride) {
    keys = memory, behind = keys + key_floats(stride), query = behind + kChunkRows * stride, passed = query + stride;
    between = passed + 2 * stride, past = between + (kBlocks - 1) * stride, k_weights = past + stride;
    q_weights = k_weights + kChunkRows;
  }
};

__device__ inline void prefetch_line(const float* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// As weigh_in_block(), of row j of the block only, by eight lanes. `key` and `query` become these times the factors of
// the block only if j is 0.
__device__ inline void weigh_row(const float* keys, const float* factors, int stride, int padded, int i, int j,
                                 LaneChannels& key, LaneChannels& query, float& of_key, float& of_query) {
  LaneChannels left;
  left.set(1);
#pragma unroll 2
  for (int r = i; r > j; r--)
#pragma unroll
    for (int u = 0; u < LaneChannels::kFours; u++) {
      const float4 four = four_at(factors + r * stride + LaneChannels::place(u, padded));
      left.x[u][0] = __fmul_rn(left.x[u][0], four.x), left.x[u][1] = __fmul_rn(left.x[u][1], four.y);
      left.x[u][2] = __fmul_rn(left.x[u][2], four.z), left.x[u][3] = __fmul_rn(left.x[u][3], four.w);
    }
  take_row(key, query, keys + j * stride, factors + j * stride, padded, true, left, of_key, of_query);
  if (j == 0) key.multiply(left), query.multiply(left);
#pragma unroll
  for (int bit = 4; bit > 0; bit /= 2)
    of_key += __shfl_xor_sync(~0u, of_key, bit), of_query += __shfl_xor_sync(~0u, of_query, bit);
}

// A CTA for each item, head and 128 of its values. The item's page is read before the previous kernel has ended: no
// other kernel of the step writes it. kMost: keys have the most channels, so that places in shared memory are known.
template <bool kMost>
__global__ void __launch_bounds__(kThreads, 3) single_rows_kernel(DeltaArgs a, StateRows rows) {
  extern __shared__ __align__(16) float memory[];
  let_next_begin();
  const StateItem item = rows.items[blockIdx.z];
  if (!is_one_row(item)) return await_previous();
  const DeltaShape& s = a.p.shape;
  const int padded = kMost ? kMostKeyDim : a.padded, stride = padded + 4;
  const RowMemory m(memory, stride);
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4;
  const int head = blockIdx.y, key_head = head / a.group, begin = blockIdx.x * kValueWarps * 32;
  const int value = begin + warp * 32, width = min(kValueWarps * 32, s.value - begin);
  const bool there = warp < kValueWarps && value < s.value;  // has values
  const int i = item.start - item.position, block = i / kBlock, place = item.position % kRing;
  const int last = block * kBlock;  // the first row of the row's own block
  const ChannelRing ring(a, item.slot, head);
  const size_t old = (size_t)place * s.key, own = old + (size_t)i * s.key;
  const float* x = a.p.x + (size_t)item.row * a.width;
  const float* state = a.p.pages.state<float>(item.slot) + (size_t)head * s.key * s.value;
  float* deltas = ring.deltas + (size_t)place * s.value;
  load_rows(m.keys, stride, ring.keys + old, s.key, i, s.key, padded, a.aligned);
  load_rows(m.behind, stride, ring.factors + old, s.key, i, s.key, padded, a.aligned);
  // The state and the deltas come to the L2 cache meanwhile.
  constexpr int kLine = 32;  // floats
  for (int n = tid; n < (s.key + i) * kValueWarps; n += kThreads) {
    const int row = n / kValueWarps, d = begin + n % kValueWarps * kLine;
    if (d < s.value)
      prefetch_line((row < s.key ? state + (size_t)row * s.value : deltas + (size_t)(row - s.key) * s.value) + d);
  }
  // Values [value + 4 g, + 4) of the state at a channel.
  const auto channels = [&](int c) {
    const int d = value + 4 * g, left = there && c < s.key ? s.value - d : 0;
    const float* row = state + (size_t)c * s.value + d;
    if (a.aligned) return left > 0 ? four_at(row) : make_float4(0, 0, 0, 0);
    return make_float4(left > 0 ? row[0] : 0.0f, left > 1 ? row[1] : 0.0f, left > 2 ? row[2] : 0.0f,
                       left > 3 ? row[3] : 0.0f);
  };
  float4 ahead[kAhead][2];
  await_previous();  // so far all was written before the step's first kernel

  const int d = value + lane;  // the value whose delta the lane computes
  const float v = there && d < s.value ? x[a.v_at + head * s.value + d] : 0.0f;
  const float rate = ChannelDecay::gates_of(a.p, item.row)[s.heads * s.key + head];
  if (warp == kValueWarps) take_head<true>(x + a.k_at + key_head * s.key, s.key, padded, 1.0f, m.keys + i * stride);
  if (warp == kValueWarps + 1)
    take_head<true>(x + a.q_at + key_head * s.key, s.key, padded, __fdiv_rn(1.0f, sqrtf((float)s.key)), m.query);
  if (tid < padded) {
    float factor = 1;
    if (tid < s.key) {
      const ChannelDecay decay(a.p, item.row, head, tid);
      factor = decay.factor;
      if (begin == 0) ring.decays[own + tid] = decay.log, ring.factors[own + tid] = factor;
    }
    m.behind[i * stride + tid] = factor;
  }
  wait_rows();

  if (warp >= kValueWarps) {
    const int j = 4 * (warp - kValueWarps) + lane / 8;
    LaneChannels key, query;
    key.load(m.keys + i * stride, padded), query.load(m.query, padded);
    float of_key, of_query;
    weigh_row(m.keys + last * stride, m.behind + last * stride, stride, padded, i - last, j, key, query, of_key,
              of_query);
    if (lane % 8 == 0) {
      m.k_weights[last + j] = last + j < i ? of_key : 0.0f;
      m.q_weights[last + j] = last + j <= i ? of_query : 0.0f;
    }
    if (j == 0) key.store(m.passed, padded), query.store(m.passed + stride, padded);
  } else {
#pragma unroll
    for (int u = 0; u < kAhead; u++) ahead[u][0] = channels(8 * u + t), ahead[u][1] = channels(8 * u + 4 + t);
  }
  if (tid < padded && warp < kValueWarps) {
    float factor = 1;  // of the blocks behind b
    for (int b = block - 1; b >= 0; b--) {
      float left = 1;
#pragma unroll
      for (int j = (b + 1) * kBlock - 1; j >= b * kBlock; j--) {
        const float each = m.behind[j * stride + tid];
        m.behind[j * stride + tid] = __fmul_rn(m.keys[j * stride + tid], left);
        left = __fmul_rn(left, each);
      }
      m.between[b * stride + tid] = factor;
      factor = __fmul_rn(factor, left);
    }
    m.past[tid] = factor;
    if (begin == 0 && head % a.group == 0 && tid < s.key) ring.keys[own + tid] = m.keys[i * stride + tid];
  }
  __syncthreads();
  constexpr int kDeltaStride = RowMemory::kDeltaStride;
  load_rows(m.keys, kDeltaStride, deltas + begin, s.value, i, width, kValueWarps * 32, a.aligned);
  commit_copies();

  const auto right_of = [&](int k, const float* factors) {
    const float *from = m.passed + (g == 0 ? 0 : stride) + k + t, *by = factors + k + t;
    return [=](int, int half) { return g < 2 ? __fmul_rn(from[half * 4], by[half * 4]) : 0.0f; };
  };
  float sums[1][2][4] = {};
  if (warp >= kValueWarps) {
    if (const int b = warp - kValueWarps; b < block) {
      float products[1][1][4] = {};
#pragma unroll 2
      for (int k = 0; k < padded; k += 8)
        multiply_keys(products, m.behind + b * kBlock * stride + k, stride, right_of(k, m.between + b * stride));
      if (t == 0)
#pragma unroll
        for (int e = 0; e < 4; e++) (e % 2 ? m.q_weights : m.k_weights)[b * kBlock + g + e / 2 * 8] = products[0][0][e];
    }
  } else if (there) {
#pragma unroll 1
    for (int k0 = 0; k0 < padded; k0 += 8 * kAhead)
#pragma unroll
      for (int u = 0; u < kAhead; u++) {
        const int k = k0 + 8 * u, next = k + 8 * kAhead;
        if (k < padded) add_products(sums, ahead[u][0], ahead[u][1], right_of(k, m.past));
        if (next < padded) ahead[u][0] = channels(next + t), ahead[u][1] = channels(next + 4 + t);
      }
  }
  wait_rows();
  if (!there) return;

  const float* past = m.keys + warp * 32;  // deltas of the warp's values
#pragma unroll 2
  for (int j0 = 0; j0 < last; j0 += 8) {
    const float* left = past + (j0 + t) * kDeltaStride + 4 * g;
    add_products(sums, four_at(left), four_at(left + 4 * kDeltaStride), [&](int, int half) {
      const int j = j0 + t + half * 4;
      return g == 0 ? m.k_weights[j] : g == 1 ? m.q_weights[j] : 0.0f;
    });
  }
  // Each lane solves for one value, of which the lane with the key's column has the sum.
  const int from = lane & ~3;
  const float four[4] = {__shfl_sync(~0u, sums[0][0][0], from), __shfl_sync(~0u, sums[0][0][2], from),
                         __shfl_sync(~0u, sums[0][1][0], from), __shfl_sync(~0u, sums[0][1][2], from)};
  float known = t == 0 ? four[0] : t == 1 ? four[1] : t == 2 ? four[2] : four[3];
#pragma unroll
  for (int r = 0; r < kBlock - 1; r++)
    if (last + r < i) known = fmaf(m.k_weights[last + r], past[(last + r) * kDeltaStride + lane], known);
  float delta = 0;
  if (d < s.value) {
    delta = __fmul_rn(1.0f / (1.0f + expf(-rate)), __fsub_rn(v, known));
    deltas[(size_t)i * s.value + d] = delta;
  }
  const float4 mine = make_float4(__shfl_sync(~0u, delta, from), __shfl_sync(~0u, delta, from + 1),
                                  __shfl_sync(~0u, delta, from + 2), __shfl_sync(~0u, delta, from + 3));
  const auto seen = [&](int j) {
    return j == i ? mine : j < i ? four_at(past + j * kDeltaStride + 4 * g) : make_float4(0, 0, 0, 0);
  };
#pragma unroll
  for (int n = 0; n < 2; n++) {
    const int j = last + 8 * n + t;
    add_products(sums, seen(j), seen(j + 4), [&](int, int half) { return g == 1 ? m.q_weights[j + half * 4] : 0.0f; });
  }
  if (t == 0) {
    const float results[4] = {sums[0][0][1], sums[0][0][3], sums[0][1][1], sums[0][1][3]};
    float* y = a.p.y + ((size_t)item.row * s.heads + head) * s.value + value + 4 * g;
#pragma unroll
    for (int u = 0; u < 4; u++)
      if (value + 4 * g + u < s.value) y[u] = results[u];
  }
}

}  // namespace

void single_channel_rows(const DeltaArgs& a, const StateRows& rows, const Queue& queue) {
  const dim3 grid(ceil_div(a.p.shape.value, 32 * kValueWarps), a.p.shape.heads, rows.short_items);
  start(queue, a.padded == kMostKeyDim ? single_rows_kernel<true> : single_rows_kernel<false>, grid, kThreads,
        RowMemory::bytes(a.stride), a, rows);
}

}  // namespace recurrent
}  // namespace as::cuda
