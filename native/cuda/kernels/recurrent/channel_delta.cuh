// A chunk of the gated delta rule with a decay for each channel, on tensor cores (channel_delta.cu). As in
// delta_chunk.cuh, values are rows of all products: a warp has 32 of them, a lane four.
#pragma once
#include "cuda/kernels/recurrent/delta.cuh"
#include "cuda/kernels/recurrent/tf32.cuh"

namespace as::cuda {
namespace recurrent {

constexpr int kBlocks = kChunkRows / kBlock;

__device__ inline float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log(1 + exp(x)), by the series of artanh(e / (2 + e)) for log(1 + e), e <= 1: half of the operations of log1pf().
__device__ inline float softplus(float x) {
  const float e = expf(-fabsf(x)), s = e * reciprocal(2.0f + e), z = s * s;
  float sum = fmaf(z, 1.0f / 13, 1.0f / 11);
  sum = fmaf(z, sum, 1.0f / 9), sum = fmaf(z, sum, 1.0f / 7), sum = fmaf(z, sum, 1.0f / 5);
  sum = fmaf(z, sum, 1.0f / 3);
  return fmaxf(x, 0.0f) + 2.0f * fmaf(s * z, sum, s);
}

// A row's decay of a channel, -exp(A_log) log(1 + exp(a + dt_bias)) or, with a bound, bound * sigmoid(exp(A_log) (a +
// dt_bias)); and e^decay.
struct ChannelDecay {
  float log, factor;

  __device__ ChannelDecay(float a, float bias, float rate, float bound) {
    const float x = a + bias;
    log = bound != 0 ? __fdiv_rn(bound, 1.0f + expf(__fmul_rn(rate, x))) : __fmul_rn(rate, softplus(x));
    factor = expf(log);
  }
  __device__ ChannelDecay(const GatedDelta& p, int row, int head, int c)
      : ChannelDecay(gates_of(p, row)[head * p.shape.key + c], p.dt_bias[head * p.shape.key + c], rate_of(p, head),
                     p.lower_bound) {}

  __device__ static const float* gates_of(const GatedDelta& p, int row) {
    return p.gates + (size_t)row * p.shape.heads * (p.shape.key + 1);
  }
  __device__ static float rate_of(const GatedDelta& p, int head) { return -expf(p.a_log[head]); }
};

// A slot's ring for a head: decays and their factors, [kRing, key] each, take the place of the totals of delta.cuh.
struct ChannelRing {
  float *decays, *factors, *keys, *deltas;  // deltas: [kRing, value]

  __device__ ChannelRing(const DeltaArgs& a, int slot, int head) {
    const DeltaShape& s = a.p.shape;
    float* all = a.p.pages.recent<float>(slot);
    decays = all + (size_t)head * 2 * kRing * s.key, factors = decays + (size_t)kRing * s.key;
    all += (size_t)s.heads * 2 * kRing * s.key;
    keys = all + (size_t)(head / a.group) * kRing * s.key;
    deltas = all + (size_t)s.key_heads * kRing * s.key + (size_t)head * kRing * s.value;
  }
};

// Writes keys and decays of an item's rows since the state's position to the ring, by a CTA.
__device__ inline void keep_channel_rows(const DeltaArgs& a, const StateItem& item, int head) {
  const DeltaShape& s = a.p.shape;
  const int key_head = head / a.group, begin = max(item.start, kept_of(item)), end = item.start + item.count;
  const ChannelRing ring(a, item.slot, head);
  for (int position = begin + threadIdx.x / 32; position < end; position += blockDim.x / 32) {
    const int row = item.row + position - item.start;
    const size_t place = (size_t)(position % kRing) * s.key;
    if (head % a.group == 0)
      take_head<true>(a.p.x + (size_t)row * a.width + a.k_at + key_head * s.key, s.key, s.key, 1.0f, ring.keys + place);
    for (int c = threadIdx.x % 32; c < s.key; c += 32) {
      const ChannelDecay decay(a.p, row, head, c);
      ring.decays[place + c] = decay.log, ring.factors[place + c] = decay.factor;
    }
  }
}

// A row's channels, of which each of eight lanes has 16: lane n four from 4 n + 32 u on, u < 4.
struct LaneChannels {
  static constexpr int kFours = kMostKeyDim / 32;
  float x[kFours][4];

  // Where four of the lane's channels are in a row; behind the row's end, others are read, but not used.
  __device__ static int place(int u, int padded) { return min(32 * u + threadIdx.x % 8 * 4, padded - 4); }
  __device__ static bool has(int u, int padded) { return 32 * u + (int)threadIdx.x % 8 * 4 < padded; }

  __device__ void set(float value) {
#pragma unroll
    for (int n = 0; n < 4 * kFours; n++) x[n / 4][n % 4] = value;
  }
  __device__ void load(const float* row, int padded) {
#pragma unroll
    for (int u = 0; u < kFours; u++) {
      const float4 four = has(u, padded) ? four_at(row + place(u, padded)) : make_float4(0, 0, 0, 0);
      x[u][0] = four.x, x[u][1] = four.y, x[u][2] = four.z, x[u][3] = four.w;
    }
  }
  __device__ void store(float* row, int padded) const {
#pragma unroll
    for (int u = 0; u < kFours; u++)
      if (has(u, padded)) put_four(row + place(u, padded), make_float4(x[u][0], x[u][1], x[u][2], x[u][3]));
  }
  __device__ void multiply(const LaneChannels& by) {
#pragma unroll
    for (int n = 0; n < 4 * kFours; n++) x[n / 4][n % 4] = __fmul_rn(x[n / 4][n % 4], by.x[n / 4][n % 4]);
  }
};

// What a row takes of row j of its block, as far as the lane's channels tell. left: the factors of the rows behind j up
// to the row itself, and then also of row j if `seen`.
__device__ inline void take_row(const LaneChannels& key, const LaneChannels& query, const float* key_j,
                                const float* factors_j, int padded, bool seen, LaneChannels& left, float& of_key,
                                float& of_query) {
  of_key = of_query = 0;
#pragma unroll
  for (int u = 0; u < LaneChannels::kFours; u++) {
    const int at = LaneChannels::place(u, padded);
    const float4 keys = four_at(key_j + at), factors = four_at(factors_j + at);
    const float k[4] = {keys.x, keys.y, keys.z, keys.w}, f[4] = {factors.x, factors.y, factors.z, factors.w};
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const float decayed = __fmul_rn(k[e], left.x[u][e]);
      of_key = fmaf(decayed, key.x[u][e], of_key), of_query = fmaf(decayed, query.x[u][e], of_query);
      if (seen) left.x[u][e] = __fmul_rn(left.x[u][e], f[e]);
    }
  }
}

// A warp weighs four rows of a block of 16, eight lanes each. `key` and `query` are a lane's part of row i of the block
// and become these times the factors of the block up to row i. top: the last of the four rows. Lane n of the eight
// returns what the key (n < 4) or the query takes of rows [n % 4 * 4, + 4), or zeros for rows that it does not see.
__device__ inline float4 weigh_in_block(const float* keys, const float* factors, int stride, int padded, int i, int top,
                                        LaneChannels& key, LaneChannels& query) {
  LaneChannels left;
  left.set(1);
  float parts[2 * kBlock];
#pragma unroll
  for (int j = kBlock - 1; j >= 0; j--) {
    parts[j] = parts[kBlock + j] = 0;
    if (j <= top)
      take_row(key, query, keys + j * stride, factors + j * stride, padded, j <= i, left, parts[j], parts[kBlock + j]);
  }
  key.multiply(left), query.multiply(left);
  // Sums over the lanes: each step halves the sums of which a lane has a part.
  const int lane = threadIdx.x % 8;
#pragma unroll
  for (int step = 0; step < 3; step++) {
    const int bit = 4 >> step, half = kBlock >> step;
    const bool upper = lane & bit;
#pragma unroll
    for (int n = 0; n < kBlock; n++) {
      if (n >= half) break;
      const float sent = upper ? parts[n] : parts[n + half], kept = upper ? parts[n + half] : parts[n];
      parts[n] = kept + __shfl_xor_sync(~0u, sent, bit);
    }
  }
  const int seen = i + lane / 4 - lane % 4 * 4;  // how many of the four rows
  return make_float4(seen > 0 ? parts[0] : 0.0f, seen > 1 ? parts[1] : 0.0f, seen > 2 ? parts[2] : 0.0f,
                     seen > 3 ? parts[3] : 0.0f);
}

// Shared memory of a CTA that computes kC values of a head.
template <int kC>
struct ChannelMemory {
  static constexpr int kStride = kC + 8, kPairs = kChunkRows + 4;  // floats of a row of values, and of pairs
  static constexpr int kChains = (kBlocks + 1) * (kBlocks + 2) / 2;
  float* keys;     // [64, stride]: first the rows' keys, then these times the factors of their block up to them
  float* queries;  // likewise
  float* behind;   // [64, stride]: first factors, then keys times the factors of their block behind them
  float* pairs;    // [keys and queries, 64, kPairs]: what a row takes of another's delta; first, the rows' decays
  float *state, *deltas, *known;  // [padded, kStride], [64, kStride], [kBlock, kStride]
  float* chains;                  // [kChains, stride], see chain()
  float *whole, *betas;           // [stride]: the decay of the whole chunk; [64]

  __host__ __device__ static size_t bytes(int padded) {
    return sizeof(float) * ((3 * kChunkRows + kChains + 1) * (padded + 4) + 2 * kChunkRows * kPairs +
                            (padded + kChunkRows + kBlock) * kStride + kChunkRows);
  }
  __device__ ChannelMemory(float* memory, int padded) {
    const int stride = padded + 4;
    keys = memory, queries = keys + kChunkRows * stride, behind = queries + kChunkRows * stride;
    chains = behind + kChunkRows * stride, whole = chains + kChains * stride, pairs = whole + stride;
    state = pairs + 2 * kChunkRows * kPairs, deltas = state + padded * kStride;
    known = deltas + kChunkRows * kStride, betas = known + kBlock * kStride;
  }
};

// A CTA's work on rows [first, first + count) of a chunk. A warp has 32 values, and the chunk's rows of one block.
template <int kC>
struct ChannelWork {
  static constexpr int kValueWarps = kC / 32, kThreads = 32 * kValueWarps * kBlocks, kWarps = kThreads / 32,
                       kStride = ChannelMemory<kC>::kStride, kPairs = ChannelMemory<kC>::kPairs;
  static constexpr int kOfLane = kMostKeyDim / 32;  // channels of a lane
  const ChannelMemory<kC> m;
  const DeltaArgs& a;
  const StateItem item;
  const ChannelRing ring;
  const int head, begin, padded, stride;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int own = warp / kValueWarps;                 // block of rows
  const int value = warp % kValueWarps * 32 + g * 4;  // first of the lane's four values
  int first = 0, count = 0, row = 0;                  // row: of the step, of the chunk's row `first`
  float sums[4][2][4];                                // tiles of 8 rows: keys', keys', queries', queries'

  __device__ ChannelWork(float* memory, const DeltaArgs& args, const StateItem& of, int of_head, int from)
      : m(memory, args.padded),
        a(args),
        item(of),
        ring(args, of.slot, of_head),
        head(of_head),
        begin(from),
        padded(args.padded),
        stride(args.stride) {}

  __device__ int last_block() const { return (first + count - 1) / kBlock; }
  __device__ bool is_new(int i) const { return i >= first && i < first + count; }

  // Takes the chunk that begins at position `at`: rows before first_row from the ring, then `rows` of the step.
  __device__ void load(int at, int first_row, int rows) {
    const DeltaShape& s = a.p.shape;
    const int place = at % kRing, width = min(kC, s.value - begin), key_head = head / a.group;
    first = first_row, count = rows, row = item.row + at + first - item.start;
    const float* x = a.p.x + (size_t)row * a.width;
    const size_t old = (size_t)place * s.key;
    load_rows(m.keys, stride, ring.keys + old, s.key, first, s.key, padded, a.aligned);
    load_rows(m.behind, stride, ring.factors + old, s.key, first, s.key, padded, a.aligned);
    load_rows(m.pairs, stride, ring.decays + old, s.key, first, s.key, padded, a.aligned);
    load_rows(m.deltas, kStride, ring.deltas + (size_t)place * s.value + begin, s.value, first, width, kC, a.aligned);
    load_rows(m.deltas + first * kStride, kStride, x + a.v_at + head * s.value + begin, a.width, count, width, kC,
              a.aligned);
    for (int i = (first + count) * kC + threadIdx.x; i < (last_block() + 1) * kBlock * kC; i += kThreads)
      m.deltas[i / kC * kStride + i % kC] = 0;
    // A warp loads a row's key, query and gates together.
    const float scale = __fdiv_rn(1.0f, sqrtf((float)s.key)), rate = ChannelDecay::rate_of(a.p, head);
    for (int r = warp; r < count; r += kWarps) {
      const float *from = x + (size_t)r * a.width + key_head * s.key,
                  *gates = ChannelDecay::gates_of(a.p, row + r) + head * s.key;
      const int i = (first + r) * stride;
      LoadedHead key, query, decays, bias;
      key.load(from + a.k_at, s.key), query.load(from + a.q_at, s.key);
      decays.load(gates, s.key), bias.load(a.p.dt_bias + head * s.key, s.key);
      key.normalize(1.0f, s.key), query.normalize(scale, s.key);
      key.store(m.keys + i, padded), query.store(m.queries + i, padded);
#pragma unroll
      for (int u = 0; u < kOfLane; u++)
        if (const int c = lane + 32 * u; c < padded) {
          const ChannelDecay decay(decays.x[u], bias.x[u], rate, a.p.lower_bound);
          m.behind[i + c] = c < s.key ? decay.factor : 1.0f, m.pairs[i + c] = c < s.key ? decay.log : 0.0f;
        }
    }
    const int rates = s.heads * s.key;
    for (int r = threadIdx.x; r < count; r += kThreads)
      m.betas[first + r] = 1.0f / (1.0f + expf(-a.p.gates[(size_t)(row + r) * (rates + s.heads) + rates + head]));
    wait_rows();
  }

  // What rows take of each other, and what is multiplied with the state and added to it.
  __device__ void weigh() {
    if (first + count == kChunkRows) {
      for (int c = threadIdx.x; c < padded; c += kThreads) {
        double sums[2] = {};  // of each half of the chunk
        for (int j = 0; j < kChunkRows; j++) sums[j / (kChunkRows / 2)] += m.pairs[j * stride + c];
        m.whole[c] = expf((float)__dadd_rn(sums[0], sums[1]));
      }
      __syncthreads();
    }
    // Short items have at most eight rows, which are in at most as many groups of four as there are warps.
    static_assert(kShortRows / 4 + 1 <= kWarps);
    const int group = first / 4 + warp, i = 4 * group + lane / 8;
    LaneChannels key, query;
    if (4 * group < first + count) {
      const int block = i / kBlock * kBlock;
      key.load(m.keys + i * stride, padded), query.load(m.queries + i * stride, padded);
      const float4 taken = weigh_in_block(m.keys + block * stride, m.behind + block * stride, stride, padded,
                                          i % kBlock, group * 4 % kBlock + 3, key, query);
      if (is_new(i)) put_four(pair(lane / 4 % 2, i) + block + lane % 4 * 4, taken);
    }
    __syncthreads();
    for (int n = threadIdx.x; n < (first + count) / kBlock * padded; n += kThreads) {  // of whole blocks
      const int b = n / padded, c = n % padded;
      float left = 1;
      for (int j = (b + 1) * kBlock - 1; j >= b * kBlock; j--) {
        const float factor = m.behind[j * stride + c];
        m.behind[j * stride + c] = __fmul_rn(m.keys[j * stride + c], left);
        left = __fmul_rn(left, factor);
      }
      chain(b + 1, b)[c] = left;
    }
    __syncthreads();
    if (is_new(i)) key.store(m.keys + i * stride, padded), query.store(m.queries + i * stride, padded);
    for (int c = threadIdx.x; c < padded; c += kThreads) {
      for (int to = 0; to <= kBlocks; to++) chain(to, to)[c] = 1;
      for (int to = 2; to <= (first + count) / kBlock; to++)
        for (int from = to - 2; from >= 0; from--)
          chain(to, from)[c] = __fmul_rn(chain(to, from + 1)[c], chain(from + 1, from)[c]);
    }
    __syncthreads();
    int task = 0;
    for (int i = first / kBlock; i <= last_block(); i++)
      for (int j = 0; j < i; j++, task++)
        if (task % kWarps == warp) weigh_blocks(i, j);
  }

  // sums = what the state answers to the keys and queries of the warp's block
  __device__ void answer() {
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
      for (int i = 0; i < 8; i++) sums[n][i / 4][i % 4] = 0;
    if (has_rows()) {
      const float* past = chain(own, 0);
      for (int k = 0; k < padded; k += 8) {
        const float* left = m.state + (k + t) * kStride + value;
        add_products(sums, four_at(left), four_at(left + 4 * kStride), right_of(own, k, past));
      }
    }
    __syncthreads();
  }

  // The deltas of the new rows from their values, which m.deltas has, and the rows' results.
  __device__ void substitute() {
    for (int b = 0; b <= last_block(); b++) {
      if (b >= first / kBlock) {
        if (own == b) solve(b);
        __syncthreads();
      }
      if (has_rows() && own > b) add_deltas<0>(b);
      if (has_rows() && own == b) add_deltas<2>(b);
    }
    const DeltaShape& s = a.p.shape;
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int e = 0; e < 2; e++)
        if (const int i = own * kBlock + 8 * n + 2 * t + e; is_new(i)) {
          const float four[4] = {sums[2 + n][0][e], sums[2 + n][0][2 + e], sums[2 + n][1][e], sums[2 + n][1][2 + e]};
          float* y = a.p.y + ((size_t)(row + i - first) * s.heads + head) * s.value + begin + value;
#pragma unroll
          for (int u = 0; u < 4; u++)
            if (begin + value + u < s.value) y[u] = four[u];
        }
  }

  // Writes the new rows' deltas to the ring.
  __device__ void keep_deltas(int at) const {
    const int size = a.p.shape.value;
    __syncthreads();
    for (int n = threadIdx.x; n < count * kC; n += kThreads)
      if (const int j = first + n / kC, c = n % kC; begin + c < size)
        ring.deltas[(size_t)(at % kRing + j) * size + begin + c] = m.deltas[j * kStride + c];
  }

  // The state after the chunk, of which all rows are known.
  __device__ void advance() {
    constexpr int kWide = 4;  // tiles of 8 channels at a time; what is behind the last channel is read, but not used
    for (int c = own * 8 * kWide; c < padded; c += kBlocks * 8 * kWide) {
      float next[kWide][2][4];
      float* state = m.state + (c + 2 * t) * kStride + value;
#pragma unroll
      for (int n = 0; n < kWide; n++)
#pragma unroll
        for (int e = 0; e < 2; e++)
          if (c + 8 * n < padded) {
            const float4 four = scaled(m.whole[c + 8 * n + 2 * t + e], four_at(state + (8 * n + e) * kStride));
            next[n][0][e] = four.x, next[n][0][2 + e] = four.y, next[n][1][e] = four.z, next[n][1][2 + e] = four.w;
          }
#pragma unroll 1
      for (int k = 0; k < kChunkRows; k += 8) {
        const float* left = m.deltas + (k + t) * kStride + value;
        const float *keys = m.behind + (k + t) * stride + c + g, *later = chain(kBlocks, k / kBlock + 1) + c + g;
        add_products(next, four_at(left), four_at(left + 4 * kStride),
                     [&](int n, int half) { return __fmul_rn(keys[half * 4 * stride + 8 * n], later[8 * n]); });
      }
#pragma unroll
      for (int n = 0; n < kWide; n++)
#pragma unroll
        for (int e = 0; e < 2; e++)
          if (c + 8 * n < padded)
            put_four(state + (8 * n + e) * kStride,
                     make_float4(next[n][0][e], next[n][0][2 + e], next[n][1][e], next[n][1][2 + e]));
    }
    __syncthreads();
  }

 private:
  // The factors of all rows of blocks [from, to), for each channel: those of the last block first.
  __device__ float* chain(int to, int from) const { return m.chains + (to * (to + 1) / 2 + from) * stride; }
  __device__ bool has_rows() const { return own >= first / kBlock && own <= last_block(); }

  // What the rows of block i take of those of block j before it.
  __device__ void weigh_blocks(int i, int j) const {
    float products[4][1][4] = {};
    const float* between = chain(i, j + 1);
#pragma unroll 2
    for (int k = 0; k < padded; k += 8)
      multiply_keys(products, m.behind + j * kBlock * stride + k, stride, right_of(i, k, between));
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
      for (int e = 0; e < 4; e++)
        pair(n / 2, i * kBlock + n % 2 * 8 + 2 * t + e % 2)[j * kBlock + g + e / 2 * 8] = products[n][0][e];
  }

  // The columns of a product: the keys, then the queries of block b's rows, times the factors of blocks before it.
  __device__ auto right_of(int b, int k, const float* past) const {
    const float *keys = m.keys + (b * kBlock + g) * stride + k + t, *factors = past + k + t;
    const int rows = 8 * stride, queries = m.queries - m.keys;
    return
        [=](int n, int half) { return __fmul_rn(keys[n / 2 * queries + n % 2 * rows + half * 4], factors[half * 4]); };
  }
  __device__ float* pair(int part, int i) const { return m.pairs + (part * kChunkRows + i) * kPairs; }

  // sums += the deltas of block b, for tiles from kFrom on
  template <int kFrom>
  __device__ void add_deltas(int b) {
#pragma unroll
    for (int k = b * kBlock; k < (b + 1) * kBlock; k += 8) {
      const float* left = m.deltas + (k + t) * kStride + value;
      add_products<kFrom>(sums, four_at(left), four_at(left + 4 * kStride),
                          [&](int n, int half) { return pair(n / 2, own * kBlock + n % 2 * 8 + g)[k + t + half * 4]; });
    }
  }

  // Forward substitution in block b, by a warp that has a value a thread.
  __device__ void solve(int b) const {
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int e = 0; e < 2; e++)
        put_four(m.known + (8 * n + 2 * t + e) * kStride + value,
                 make_float4(sums[n][0][e], sums[n][0][2 + e], sums[n][1][e], sums[n][1][2 + e]));
    __syncwarp();
    const int d = value - g * 4 + lane;
    float* deltas = m.deltas + b * kBlock * kStride + d;
    float delta[kBlock];
#pragma unroll
    for (int r = 0; r < kBlock; r++) {
      const int i = b * kBlock + r;
      delta[r] = deltas[r * kStride];
      if (!is_new(i)) continue;
      const float* weights = pair(0, i) + b * kBlock;
      float sum = m.known[r * kStride + d];
#pragma unroll
      for (int j = 0; j < r; j++) sum = fmaf(weights[j], delta[j], sum);
      delta[r] = __fmul_rn(m.betas[i], __fsub_rn(delta[r], sum));
      deltas[r * kStride] = delta[r];
    }
  }
};

}  // namespace recurrent
}  // namespace as::cuda
