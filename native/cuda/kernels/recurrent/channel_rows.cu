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
  float *keys, *behind;    // [64, stride], as in ChannelMemory
  float *query, *passed;   // [stride]; [key and query, stride], times the factors of their block up to them
  float *whole, *between;  // [kBlocks, stride]: the factors of block b, and of those between it and the row's
  float *past, *k_weights, *q_weights;  // [stride]: the factors of all blocks before; [64]

  static size_t bytes(int stride) {
    return sizeof(float) * ((size_t)(2 * kChunkRows + 2 * kBlocks + 4) * stride + 2 * kChunkRows);
  }
  __device__ RowMemory(float* memory, int stride) {
    keys = memory, behind = keys + kChunkRows * stride, query = behind + kChunkRows * stride;
    passed = query + stride, whole = passed + 2 * stride, between = whole + kBlocks * stride;
    past = between + kBlocks * stride, k_weights = past + stride, q_weights = k_weights + kChunkRows;
  }
};

// A CTA for each item, head and 128 of its values.
__global__ void __launch_bounds__(kThreads, 2) single_rows_kernel(DeltaArgs a, StateRows rows) {
  extern __shared__ __align__(16) float memory[];
  after_previous();
  const StateItem item = rows.items[blockIdx.z];
  if (!is_one_row(item)) return;
  const DeltaShape& s = a.p.shape;
  const RowMemory m(memory, a.stride);
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4, stride = a.stride;
  const int head = blockIdx.y, key_head = head / a.group, value = (blockIdx.x * kValueWarps + warp) * 32;
  const bool there = warp < kValueWarps && value < s.value;  // has values
  const int i = item.start - item.position, block = i / kBlock, place = item.position % kRing;
  const ChannelRing ring(a, item.slot, head);
  const size_t old = (size_t)place * s.key, own = old + (size_t)i * s.key;
  const float* x = a.p.x + (size_t)item.row * a.width;
  const float* state = a.p.pages.state<float>(item.slot) + (size_t)head * s.key * s.value;
  float* deltas = ring.deltas + (size_t)place * s.value;
  // Values [value + 4 g, + 4) of a row.
  const auto load_four = [&](const float* row, bool has) {
    const int d = value + 4 * g, width = there && has ? s.value - d : 0;
    if (a.aligned) return width > 0 ? four_at(row + d) : make_float4(0, 0, 0, 0);
    return make_float4(width > 0 ? row[d] : 0.0f, width > 1 ? row[d + 1] : 0.0f, width > 2 ? row[d + 2] : 0.0f,
                       width > 3 ? row[d + 3] : 0.0f);
  };
  const auto channels = [&](int c) { return load_four(state + (size_t)c * s.value, c < s.key); };
  const auto past_delta = [&](int j) { return load_four(deltas + (size_t)j * s.value, j < i); };

  load_rows(m.keys, stride, ring.keys + old, s.key, i, s.key, a.padded, a.aligned);
  load_rows(m.behind, stride, ring.factors + old, s.key, i, s.key, a.padded, a.aligned);
  float4 ahead[kAhead][2];
#pragma unroll
  for (int u = 0; u < kAhead; u++) ahead[u][0] = channels(8 * u + t), ahead[u][1] = channels(8 * u + 4 + t);
  if (warp == kValueWarps) take_head<true>(x + a.k_at + key_head * s.key, s.key, a.padded, 1.0f, m.keys + i * stride);
  if (warp == kValueWarps + 1)
    take_head<true>(x + a.q_at + key_head * s.key, s.key, a.padded, __fdiv_rn(1.0f, sqrtf((float)s.key)), m.query);
  for (int c = tid; c < a.padded; c += kThreads) {
    float factor = 1;
    if (c < s.key) {
      const ChannelDecay decay(a.p, item.row, head, c);
      factor = decay.factor;
      if (blockIdx.x == 0) ring.decays[own + c] = decay.log, ring.factors[own + c] = factor;
    }
    m.behind[i * stride + c] = factor;
  }
  wait_rows();

  if (warp == 0) {
    float left[kMostKeyDim / 32];
    const float taken = weigh_in_block(m.keys + block * kBlock * stride, m.query, m.behind + block * kBlock * stride,
                                       stride, a.padded, i % kBlock, left);
    (lane < kBlock ? m.k_weights : m.q_weights)[block * kBlock + lane % kBlock] = taken;
#pragma unroll
    for (int u = 0; u < kMostKeyDim / 32; u++)
      if (const int c = lane + 32 * u; c < a.padded) {
        m.passed[c] = __fmul_rn(m.keys[i * stride + c], left[u]);
        m.passed[stride + c] = __fmul_rn(m.query[c], left[u]);
      }
  } else {
    for (int n = tid - 32; n < block * a.padded; n += kThreads - 32) {
      const int b = n / a.padded, c = n % a.padded;
      float left = 1;
      for (int j = (b + 1) * kBlock - 1; j >= b * kBlock; j--) {
        const float factor = m.behind[j * stride + c];
        m.behind[j * stride + c] = __fmul_rn(m.keys[j * stride + c], left);
        left = __fmul_rn(left, factor);
      }
      m.whole[b * stride + c] = left;
    }
  }
  __syncthreads();
  for (int c = tid; c < a.padded; c += kThreads) {
    float factor = 1;
    for (int b = block - 1; b >= 0; b--) {
      m.between[b * stride + c] = factor;
      factor = __fmul_rn(factor, m.whole[b * stride + c]);
    }
    m.past[c] = factor;
    if (blockIdx.x == 0 && head % a.group == 0 && c < s.key) ring.keys[own + c] = m.keys[i * stride + c];
  }
  __syncthreads();

  const auto right_of = [&](int k, const float* factors) {
    const float *from = m.passed + (g == 0 ? 0 : stride) + k + t, *by = factors + k + t;
    return [=](int, int half) { return g < 2 ? __fmul_rn(from[half * 4], by[half * 4]) : 0.0f; };
  };
  float sums[1][2][4] = {};
  if (warp >= kValueWarps) {
    if (const int b = warp - kValueWarps; b < block) {
      float products[1][1][4] = {};
#pragma unroll 2
      for (int k = 0; k < a.padded; k += 8)
        multiply_keys(products, m.behind + b * kBlock * stride + k, stride, right_of(k, m.between + b * stride));
      if (t == 0)
#pragma unroll
        for (int e = 0; e < 4; e++) (e % 2 ? m.q_weights : m.k_weights)[b * kBlock + g + e / 2 * 8] = products[0][0][e];
    }
  } else if (there) {
#pragma unroll 1
    for (int k0 = 0; k0 < a.padded; k0 += 8 * kAhead)
#pragma unroll
      for (int u = 0; u < kAhead; u++) {
        const int k = k0 + 8 * u, next = k + 8 * kAhead;
        const bool end = k0 + 8 * kAhead >= a.padded;  // then the rows since follow
        if (k < a.padded) add_products(sums, ahead[u][0], ahead[u][1], right_of(k, m.past));
        ahead[u][0] = end ? past_delta(8 * u + t) : channels(next + t);
        ahead[u][1] = end ? past_delta(8 * u + 4 + t) : channels(next + 4 + t);
      }
  }
  __syncthreads();
  if (!there) return;

  const int last = block * kBlock;  // the first row of the row's own block
#pragma unroll 1
  for (int j0 = 0; j0 < last; j0 += 8 * kAhead)
#pragma unroll
    for (int u = 0; u < kAhead; u++) {
      const int j = j0 + 8 * u + t;
      if (j0 + 8 * u >= last) continue;
      add_products(sums, ahead[u][0], ahead[u][1], [&](int, int half) {
        return g == 0 ? m.k_weights[j + half * 4] : g == 1 ? m.q_weights[j + half * 4] : 0.0f;
      });
      ahead[u][0] = past_delta(j + 8 * kAhead), ahead[u][1] = past_delta(j + 8 * kAhead + 4);
    }
  // Each lane solves for one value, of which the lane with the key's column has the sum.
  const int d = value + lane, from = lane & ~3;
  float parts[kBlock - 1];
#pragma unroll
  for (int r = 0; r < kBlock - 1; r++)
    parts[r] = last + r < i && d < s.value ? deltas[(size_t)(last + r) * s.value + d] : 0.0f;
  const float four[4] = {__shfl_sync(~0u, sums[0][0][0], from), __shfl_sync(~0u, sums[0][0][2], from),
                         __shfl_sync(~0u, sums[0][1][0], from), __shfl_sync(~0u, sums[0][1][2], from)};
  float known = t == 0 ? four[0] : t == 1 ? four[1] : t == 2 ? four[2] : four[3];
#pragma unroll
  for (int r = 0; r < kBlock - 1; r++)
    if (last + r < i) known = fmaf(m.k_weights[last + r], parts[r], known);
  const float beta =
      1.0f / (1.0f + expf(-a.p.gates[((size_t)item.row * s.heads) * (s.key + 1) + s.heads * s.key + head]));
  float delta = 0;
  if (d < s.value) {
    delta = __fmul_rn(beta, __fsub_rn(x[a.v_at + head * s.value + d], known));
    deltas[(size_t)i * s.value + d] = delta;
  }
  const float4 mine = make_float4(__shfl_sync(~0u, delta, from), __shfl_sync(~0u, delta, from + 1),
                                  __shfl_sync(~0u, delta, from + 2), __shfl_sync(~0u, delta, from + 3));
#pragma unroll
  for (int n = 0; n < 2; n++) {
    const int j = last + 8 * n + t;
    const float4 upper = past_delta(j), lower = past_delta(j + 4);
    add_products(sums, j == i ? mine : upper, j + 4 == i ? mine : lower,
                 [&](int, int half) { return g == 1 ? m.q_weights[j + half * 4] : 0.0f; });
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
  start(queue, single_rows_kernel, grid, kThreads, RowMemory::bytes(a.stride), a, rows);
}

}  // namespace recurrent
}  // namespace as::cuda
