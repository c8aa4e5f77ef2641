// The gated delta rule, and Mamba2's selective state space, which is that rule without a system to solve: B is the key,
// C the query, and a row's delta is dt x (docs/decisions/recurrent.md). All sums are of FMA products in float32 in one
// order, whatever kernel forms them: over the key's channels, and over the rows since the last multiple of 64, both
// ascending. The values of a head are independent, so CTAs may take any part of them.
//
// Short items (decode, drafts) are computed row by row by one kernel. Long items (prompts) take three: the products of
// keys and queries of all chunks in parallel; then each head's chunks in turn with the state in shared memory; then the
// ring's keys, which the second one still reads.
#include <type_traits>

#include "cuda/kernels/common/device.cuh"
#include "cuda/kernels/recurrent/recurrent.h"

namespace as::cuda {
namespace {

constexpr int kRing = 2 * kChunkRows, kRowGroups = 16, kBlock = 16;  // kBlock: rows that are solved together
constexpr int kPairs = kChunkRows + 4;                               // row of a chunk's products in shared memory
constexpr float kLengthEps = 1e-6f;                                  // added to the squared length of heads

struct Args {
  GatedDelta p;
  int group, width;      // value heads of a key head; columns of x
  int q_at, k_at, v_at;  // columns of x at which queries, keys and values begin
  int padded, stride;    // key dim in shared memory: with zeros up to a multiple of 4; floats of a row
  bool aligned;          // heads begin at multiples of 16 bytes
  double* totals;        // [rows, heads], of long items: decays since the chunk's begin
  // [rows, heads]: factors of a row's values; [rows, key heads, keys and queries, 64]: products with the chunk's keys
  float *betas, *weights;
};

// A slot's ring.
struct Ring {
  double* totals;  // [heads, kRing]
  float *keys, *deltas;
};
__device__ Ring ring_of(const Args& a, int slot) {
  const DeltaShape& s = a.p.shape;
  Ring ring;
  ring.totals = a.p.pages.recent<double>(slot);
  ring.keys = reinterpret_cast<float*>(ring.totals + (size_t)s.heads * kRing);
  ring.deltas = ring.keys + (size_t)s.key_heads * kRing * s.key;
  return ring;
}

// The position of the state after the step.
__device__ int kept_of(const StateItem& item) {
  return (item.start + item.count - item.drafts) / kChunkRows * kChunkRows;
}

__device__ float decay_between(double later, double earlier) { return expf((float)(later - earlier)); }

// A row's gates: of the delta rule [a | b], of a state space [dt].
template <bool kDelta>
__device__ const float* gates_of(const GatedDelta& p, int row) {
  return p.gates + (size_t)row * (kDelta ? 2 : 1) * p.shape.heads;
}
// dt = log(1 + exp(a + dt_bias)), within limits for a state space
template <bool kDelta>
__device__ double step_of(const GatedDelta& p, const float* gates, int head) {
  const double a = (double)gates[head] + (double)p.dt_bias[head], dt = fmax(a, 0.0) + log1p(exp(-fabs(a)));
  return kDelta ? dt : fmin(fmax(dt, p.least_step), p.most_step);
}
// The decay of a row: -exp(A_log) dt.
__device__ double decay_of(const GatedDelta& p, double dt, int head) { return -exp((double)p.a_log[head]) * dt; }
__device__ float beta_of(const GatedDelta& p, const float* gates, int head) {
  return 1.0f / (1.0f + expf(-gates[p.shape.heads + head]));
}

// A warp divides a head by its length. to: with zeros up to `padded`; also: null, or another place without padding.
__device__ void normalize(const float* x, int n, int padded, float scale, float* to, float* also) {
  const int lane = threadIdx.x % 32;
  float sum = 0;
  for (int c = lane; c < n; c += 32) sum = fmaf(x[c], x[c], sum);
  const float factor = __fdiv_rn(scale, sqrtf(warp_sum(sum) + kLengthEps));
  for (int c = lane; c < padded; c += 32) {
    const float value = c < n ? __fmul_rn(x[c], factor) : 0.0f;
    to[c] = value;
    if (also && c < n) also[c] = value;
  }
}

// A warp copies a head, with zeros up to `padded`; of the delta rule, it is divided by its length, and `also` gets it.
template <bool kDelta>
__device__ void take_head(float* x, int n, int padded, float scale, float* to, bool in_place) {
  if constexpr (kDelta) normalize(x, n, padded, scale, to, in_place ? x : nullptr);
  else
    for (int c = threadIdx.x % 32; c < padded; c += 32) to[c] = c < n ? x[c] : 0.0f;
}

// Queues the copy of a matrix to shared memory, with zeros in columns [width, padded).
__device__ void load_rows(float* to, int stride, const float* from, size_t pitch, int rows, int width, int padded,
                          bool aligned) {
  if (aligned && width % 4 == 0) {
    const int chunks = padded / 4;
    for (int i = threadIdx.x; i < rows * chunks; i += blockDim.x) {
      const int row = i / chunks, c = i % chunks * 4;
      copy_16(shared_address(to + row * stride + c), from + (c < width ? row * pitch + c : 0), c < width);
    }
  } else {
    for (int i = threadIdx.x; i < rows * padded; i += blockDim.x) {
      const int row = i / padded, c = i % padded;
      to[row * stride + c] = c < width ? from[row * pitch + c] : 0.0f;
    }
  }
}

__device__ void wait_rows() {
  commit_copies(), wait_copies<0>();
  __syncthreads();
}

// The columns of a thread: kN of kC, four at a time.
template <int kC, int kN>
__device__ int column_of(int cg, int u) {
  return u / 4 * (kC / 2) + cg * 4 + u % 4;
}
template <int kC, int kN>
__device__ void read_columns(const float* row, int cg, float (&values)[kN]) {
#pragma unroll
  for (int u = 0; u < kN; u += 4) {
    const float4 four = *reinterpret_cast<const float4*>(row + column_of<kC, kN>(cg, u));
    values[u] = four.x, values[u + 1] = four.y, values[u + 2] = four.z, values[u + 3] = four.w;
  }
}
__device__ inline float part_of(const float4& x, int m) { return m == 0 ? x.x : m == 1 ? x.y : m == 2 ? x.z : x.w; }

// A thread's part of the state while that advances: 8 channels of the key, kN columns.
template <int kC, int kN>
struct StateTile {
  float sums[8][kN];
  int low, high, cg;  // first channels of two fours; clamped to 0 if they are not the state's
  bool has_low, has_high;

  __device__ StateTile(float* state, float factor, int padded) : cg(threadIdx.x % (kC / kN)) {
    const int first = threadIdx.x / (kC / kN) * 4;
    has_low = first < padded, has_high = first + 64 < padded;
    low = has_low ? first : 0, high = has_high ? first + 64 : 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      float values[kN];
      read_columns<kC, kN>(state + (i < 4 ? low + i : high + i - 4) * kC, cg, values);
#pragma unroll
      for (int u = 0; u < kN; u++) sums[i][u] = __fmul_rn(factor, values[u]);
    }
  }
  // keys: decayed, `stride` floats a row
  __device__ void add(const float* keys, int stride, const float* deltas, int rows) {
#pragma unroll 2
    for (int j = 0; j < rows; j++) {
      const float4 a = *reinterpret_cast<const float4*>(keys + j * stride + low),
                   b = *reinterpret_cast<const float4*>(keys + j * stride + high);
      float values[kN];
      read_columns<kC, kN>(deltas + j * kC, cg, values);
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const float key = i < 4 ? part_of(a, i) : part_of(b, i - 4);
#pragma unroll
        for (int u = 0; u < kN; u++) sums[i][u] = fmaf(key, values[u], sums[i][u]);
      }
    }
  }
  __device__ void store(float* state) const {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      if (i < 4 ? !has_low : !has_high) continue;
#pragma unroll
      for (int u = 0; u < kN; u += 4)
        *reinterpret_cast<float4*>(state + (i < 4 ? low + i : high + i - 4) * kC + column_of<kC, kN>(cg, u)) =
            make_float4(sums[i][u], sums[i][u + 1], sums[i][u + 2], sums[i][u + 3]);
    }
  }
};

// The state of a head's columns between shared memory and the slot's page.
template <int kC>
struct HeadState {
  float *shared, *page;
  int key, value, width;  // width: columns that the head has

  __device__ void load(bool zero, int padded, bool aligned) const {
    if (zero) {
      for (int i = threadIdx.x; i < padded * kC; i += blockDim.x) shared[i] = 0;
      return;
    }
    load_rows(shared, kC, page, value, key, width, kC, aligned);
    for (int i = key * kC + threadIdx.x; i < padded * kC; i += blockDim.x) shared[i] = 0;
  }
  __device__ void store() const {
    for (int i = threadIdx.x; i < key * kC; i += blockDim.x)
      if (const int c = i % kC; c < width) page[(size_t)(i / kC) * value + c] = shared[i];
  }
};

// ---- long items -----------------------------------------------------------------------------------------------------

// A CTA for each chunk and key head: normalizes its rows in place, sums up decays, and multiplies each row's key and
// query by the chunk's keys up to its own. A state space needs no products of keys, and no norms.
template <bool kDelta>
__global__ void __launch_bounds__(128) products_kernel(Args a, StateRows rows) {
  extern __shared__ __align__(16) float memory[];
  after_previous();
  const StateChunk chunk = rows.chunks[blockIdx.x];
  const StateItem item = rows.items[chunk.item];
  const DeltaShape& s = a.p.shape;
  const int key_head = blockIdx.y, begin = max(chunk.at, item.start), first = begin - chunk.at,
            count = min(chunk.at + kChunkRows, item.start + item.count) - begin, row = item.row + begin - item.start;
  float* x = memory;  // keys, then queries
  double* decays = reinterpret_cast<double*>(x + 2 * kChunkRows * a.stride);
  const Ring ring = ring_of(a, item.slot);
  const int place = chunk.at % kRing;
  load_rows(x, a.stride, ring.keys + ((size_t)key_head * kRing + place) * s.key, s.key, first, s.key, a.padded,
            a.aligned);
  for (int i = threadIdx.x / 32; i < 2 * count; i += 4) {
    const int r = i / 2, part = i % 2;  // 0: the key
    float* head = a.p.x + (size_t)(row + r) * a.width + (part ? a.q_at : a.k_at) + key_head * s.key;
    take_head<kDelta>(head, s.key, a.padded, part ? __fdiv_rn(1.0f, sqrtf((float)s.key)) : 1.0f,
                      x + (part * kChunkRows + first + r) * a.stride, true);
  }
  for (int i = threadIdx.x; i < count * a.group; i += 128) {
    const int r = i / a.group, g = i % a.group, head = key_head * a.group + g;
    const float* gates = gates_of<kDelta>(a.p, row + r);
    const double dt = step_of<kDelta>(a.p, gates, head);
    decays[g * kChunkRows + r] = decay_of(a.p, dt, head);
    a.betas[(size_t)(row + r) * s.heads + head] = kDelta ? beta_of(a.p, gates, head) : (float)dt;
  }
  wait_rows();
  for (int g = threadIdx.x; g < a.group; g += 128) {
    const int head = key_head * a.group + g;
    double total = first ? ring.totals[(size_t)head * kRing + place + first - 1] : 0.0;
    for (int r = 0; r < count; r++)
      a.totals[(size_t)(row + r) * s.heads + head] = total = __dadd_rn(total, decays[g * kChunkRows + r]);
  }
  constexpr int kFirst = kDelta ? 0 : 4;  // of 8: keys, then queries
  const int cg = threadIdx.x % 8, rg = threadIdx.x / 8;
  float sums[8][8] = {};
#pragma unroll 1
  for (int c = 0; c < a.padded; c += 4) {
    float4 left[8];
#pragma unroll
    for (int t = kFirst; t < 8; t++)
      left[t] = *reinterpret_cast<const float4*>(x + (rg + kRowGroups * t) * a.stride + c);
#pragma unroll
    for (int u = 0; u < 8; u++) {
      const float4 right = *reinterpret_cast<const float4*>(x + (cg + 8 * u) * a.stride + c);
#pragma unroll
      for (int t = kFirst; t < 8; t++) {
        sums[t][u] = fmaf(left[t].x, right.x, sums[t][u]), sums[t][u] = fmaf(left[t].y, right.y, sums[t][u]);
        sums[t][u] = fmaf(left[t].z, right.z, sums[t][u]), sums[t][u] = fmaf(left[t].w, right.w, sums[t][u]);
      }
    }
  }
#pragma unroll
  for (int t = kFirst; t < 8; t++) {
    const int i = rg + kRowGroups * (t % 4) - first;
    if (i < 0 || i >= count) continue;
    float* to = a.weights + (((size_t)(row + i) * s.key_heads + key_head) * 2 + t / 4) * kChunkRows;
#pragma unroll
    for (int u = 0; u < 8; u++) to[cg + 8 * u] = sums[t][u];
  }
}

// Shared memory of chunks_kernel().
template <int kC>
struct ChunkMemory {
  float *state, *keys, *queries, *pairs, *deltas, *known;
  double* totals;
  float *betas, *grown;

  __host__ __device__ static size_t bytes(int padded) {
    return sizeof(float) * ((size_t)padded * kC + 2 * kChunkRows * (padded + 4) + 2 * kChunkRows * kPairs +
                            kChunkRows * kC + kBlock * kC + 4 * kChunkRows);
  }
  __device__ ChunkMemory(float* memory, int padded) {
    totals = reinterpret_cast<double*>(memory), betas = memory + 2 * kChunkRows, grown = betas + kChunkRows;
    state = grown + kChunkRows, keys = state + padded * kC, queries = keys + kChunkRows * (padded + 4);
    pairs = queries + kChunkRows * (padded + 4), deltas = pairs + 2 * kChunkRows * kPairs;
    known = deltas + kChunkRows * kC;
  }
};

// A CTA for each item, head and kC of its values: its chunks one after the other. Threads are in 16 groups, each with
// rows r, r + 16, r + 32 and r + 48 of the chunk, of which each has its key's and its query's sums of kN values.
template <bool kDelta, int kC, int kN>
__global__ void __launch_bounds__(kRowGroups* kC / kN) chunks_kernel(Args a, StateRows rows) {
  extern __shared__ __align__(16) float memory[];
  constexpr int kGroups = kC / kN;
  after_previous();
  const StateItem item = rows.items[rows.short_items + blockIdx.z];
  const DeltaShape& s = a.p.shape;
  const int head = blockIdx.y, key_head = head / a.group, begin = blockIdx.x * kC, width = min(kC, s.value - begin);
  const int tid = threadIdx.x, cg = tid % kGroups, rg = tid / kGroups;
  const ChunkMemory<kC> m(memory, a.padded);
  const Ring ring = ring_of(a, item.slot);
  const float* ring_keys = ring.keys + (size_t)key_head * kRing * s.key;
  const double* ring_totals = ring.totals + (size_t)head * kRing;
  float* ring_deltas = ring.deltas + (size_t)head * kRing * s.value + begin;
  const HeadState<kC> state{m.state, a.p.pages.state<float>(item.slot) + (size_t)head * s.key * s.value + begin, s.key,
                            s.value, width};
  const int end = item.start + item.count, kept = kept_of(item);
  int at = item.position;
  state.load(item.start == 0, a.padded, a.aligned);

  const auto advance = [&] {
    const double last = m.totals[kChunkRows - 1];
    for (int i = tid; i < kChunkRows * a.padded; i += kRowGroups * kGroups) {
      const int j = i / a.padded, c = i % a.padded;
      m.keys[j * a.stride + c] = __fmul_rn(m.keys[j * a.stride + c], m.grown[j]);
    }
    __syncthreads();
    StateTile<kC, kN> tile(m.state, decay_between(last, 0.0), a.padded);
    tile.add(m.keys, a.stride, m.deltas, kChunkRows);
    __syncthreads();
    tile.store(m.state);
    __syncthreads();
    at += kChunkRows;
    if (at == kept) state.store();
  };
  const auto grow = [&] {  // e^(last total - each total), for advance()
    __syncthreads();
    for (int j = tid; j < kChunkRows; j += kRowGroups * kGroups)
      m.grown[j] = decay_between(m.totals[kChunkRows - 1], m.totals[j]);
    __syncthreads();
  };

  while (at < item.start / kChunkRows * kChunkRows) {  // accepted drafts had reached beyond a multiple
    const int place = at % kRing;
    load_rows(m.keys, a.stride, ring_keys + (size_t)place * s.key, s.key, kChunkRows, s.key, a.padded, a.aligned);
    load_rows(m.deltas, kC, ring_deltas + (size_t)place * s.value, s.value, kChunkRows, width, kC, a.aligned);
    for (int j = tid; j < kChunkRows; j += kRowGroups * kGroups) m.totals[j] = ring_totals[place + j];
    wait_rows();
    grow();
    advance();
    __syncthreads();
  }
  for (int position = item.start; position < end;) {
    const int first = position - at, count = min(at + kChunkRows, end) - position, place = at % kRing;
    const int row = item.row + position - item.start;
    const float* x = a.p.x + (size_t)row * a.width;
    load_rows(m.keys, a.stride, ring_keys + (size_t)place * s.key, s.key, first, s.key, a.padded, a.aligned);
    load_rows(m.keys + first * a.stride, a.stride, x + a.k_at + key_head * s.key, a.width, count, s.key, a.padded,
              a.aligned);
    load_rows(m.queries + first * a.stride, a.stride, x + a.q_at + key_head * s.key, a.width, count, s.key, a.padded,
              a.aligned);
    // Deltas of rows before these; of these, first their values.
    load_rows(m.deltas, kC, ring_deltas + (size_t)place * s.value, s.value, first, width, kC, a.aligned);
    load_rows(m.deltas + first * kC, kC, x + a.v_at + head * s.value + begin, a.width, count, width, kC, a.aligned);
    const float* pairs = a.weights + ((size_t)row * s.key_heads + key_head) * 2 * kChunkRows;
    for (int part = kDelta ? 0 : 1; part < 2; part++)
      load_rows(m.pairs + (part * kChunkRows + first) * kPairs, kPairs, pairs + part * kChunkRows,
                (size_t)s.key_heads * 2 * kChunkRows, count, kChunkRows, kChunkRows, true);
    for (int j = tid; j < first + count; j += kRowGroups * kGroups) {
      const size_t entry = (size_t)(row + j - first) * s.heads + head;
      m.totals[j] = j < first ? ring_totals[place + j] : a.totals[entry];
      if (j >= first) m.betas[j] = a.betas[entry];
    }
    wait_rows();

    // What the state answers to each row's key and query.
    float known[4][kN] = {}, out[4][kN] = {};
#pragma unroll 1
    for (int c = 0; c < a.padded; c += 4) {
      float4 k[4], q[4];
#pragma unroll
      for (int t = 0; t < 4; t++) {
        if (kDelta) k[t] = *reinterpret_cast<const float4*>(m.keys + (rg + kBlock * t) * a.stride + c);
        q[t] = *reinterpret_cast<const float4*>(m.queries + (rg + kBlock * t) * a.stride + c);
      }
#pragma unroll
      for (int n = 0; n < 4; n++) {
        float values[kN];
        read_columns<kC, kN>(m.state + (c + n) * kC, cg, values);
#pragma unroll
        for (int t = 0; t < 4; t++)
#pragma unroll
          for (int u = 0; u < kN; u++) {
            if (kDelta) known[t][u] = fmaf(part_of(k[t], n), values[u], known[t][u]);
            out[t][u] = fmaf(part_of(q[t], n), values[u], out[t][u]);
          }
      }
    }
#pragma unroll
    for (int t = 0; t < 4; t++) {
      const int i = rg + kBlock * t;
      const float factor = i < first + count ? decay_between(m.totals[i], 0.0) : 0.0f;
#pragma unroll
      for (int u = 0; u < kN; u++)
        known[t][u] = __fmul_rn(factor, known[t][u]), out[t][u] = __fmul_rn(factor, out[t][u]);
    }
    for (int n = tid; n < count * kChunkRows; n += kRowGroups * kGroups) {
      const int i = first + n / kChunkRows, j = n % kChunkRows;
      if (j > i) continue;
      const float factor = decay_between(m.totals[i], m.totals[j]);
      float* pair = m.pairs + i * kPairs + j;
      if (kDelta) pair[0] = __fmul_rn(factor, pair[0]);
      pair[kChunkRows * kPairs] = __fmul_rn(factor, pair[kChunkRows * kPairs]);
    }

    if constexpr (!kDelta) {
      for (int n = tid; n < count * kC; n += kRowGroups * kGroups) {
        float& delta = m.deltas[first * kC + n];
        delta = __fmul_rn(m.betas[first + n / kC], delta);
      }
      __syncthreads();
    }
    // Forward substitution by blocks of 16 rows, whose number is known when this is compiled: sums stay in registers.
    const auto substitute = [&](auto block) {
      constexpr int b = decltype(block)::value;
#pragma unroll
      for (int u = 0; u < kN; u += 4)
        *reinterpret_cast<float4*>(m.known + rg * kC + column_of<kC, kN>(cg, u)) =
            make_float4(known[b][u], known[b][u + 1], known[b][u + 2], known[b][u + 3]);
      __syncthreads();
      if (tid < kC) {
        float own[kBlock];
#pragma unroll
        for (int r = 0; r < kBlock; r++) own[r] = m.known[r * kC + tid];
#pragma unroll
        for (int j = 0; j < kBlock; j++) {
          const int i = kBlock * b + j;
          float delta = m.deltas[i * kC + tid];
          if (i >= first) {
            delta = __fmul_rn(m.betas[i], __fsub_rn(delta, own[j]));
            if (i < first + count) m.deltas[i * kC + tid] = delta;
          }
#pragma unroll
          for (int r = j + 1; r < kBlock; r++) own[r] = fmaf(m.pairs[(kBlock * b + r) * kPairs + i], delta, own[r]);
        }
      }
      __syncthreads();
    };
    const auto solve = [&](auto block) {
      constexpr int b = decltype(block)::value;
      if constexpr (kDelta) substitute(block);
#pragma unroll
      for (int j = 0; j < kBlock; j += 4) {
        float4 k[4], q[4];
#pragma unroll
        for (int t = b; t < 4; t++) {
          const float* pair = m.pairs + (rg + kBlock * t) * kPairs + kBlock * b + j;
          if (kDelta && t > b) k[t] = *reinterpret_cast<const float4*>(pair);
          q[t] = *reinterpret_cast<const float4*>(pair + kChunkRows * kPairs);
        }
#pragma unroll
        for (int n = 0; n < 4; n++) {
          float values[kN];
          read_columns<kC, kN>(m.deltas + (kBlock * b + j + n) * kC, cg, values);
#pragma unroll
          for (int t = b; t < 4; t++)
#pragma unroll
            for (int u = 0; u < kN; u++) {
              if (kDelta && t > b) known[t][u] = fmaf(part_of(k[t], n), values[u], known[t][u]);
              if (t > b || j + n <= rg) out[t][u] = fmaf(part_of(q[t], n), values[u], out[t][u]);
            }
        }
      }
    };
    solve(std::integral_constant<int, 0>()), solve(std::integral_constant<int, 1>());
    solve(std::integral_constant<int, 2>()), solve(std::integral_constant<int, 3>());
#pragma unroll
    for (int t = 0; t < 4; t++) {
      const int i = rg + kBlock * t - first;
      if (i < 0 || i >= count) continue;
      float* y = a.p.y + (size_t)(row + i) * s.heads * s.value + head * s.value + begin;
#pragma unroll
      for (int u = 0; u < kN; u++)
        if (const int c = column_of<kC, kN>(cg, u); c < width)
          y[c] = kDelta ? out[t][u]
                        : fmaf(a.p.skip[head], x[(size_t)i * a.width + a.v_at + head * s.value + begin + c], out[t][u]);
    }
    if (at >= kept)
      for (int n = tid; n < count * kC; n += kRowGroups * kGroups)
        if (const int j = first + n / kC, c = n % kC; c < width)
          ring_deltas[(size_t)(place + j) * s.value + c] = m.deltas[j * kC + c];
    position += count;
    if (first + count == kChunkRows && (position < end || at + kChunkRows <= kept)) grow(), advance();
    __syncthreads();
  }
  // A sequence that has begun and is not at a multiple yet.
  if (item.start == 0 && kept == 0) {
    for (int n = tid; n < s.key * kC; n += kRowGroups * kGroups)
      if (const int c = n % kC; c < width) state.page[(size_t)(n / kC) * s.value + c] = 0;
  }
}

// Writes the keys and decays of the rows since the state's position to the ring.
__global__ void __launch_bounds__(128) keep_rows_kernel(Args a, StateRows rows) {
  after_previous();
  const StateItem item = rows.items[rows.short_items + blockIdx.y];
  const DeltaShape& s = a.p.shape;
  const int key_head = blockIdx.x, begin = max(item.start, kept_of(item)), end = item.start + item.count;
  const Ring ring = ring_of(a, item.slot);
  for (int i = threadIdx.x; i < (end - begin) * s.key; i += 128) {
    const int position = begin + i / s.key, c = i % s.key, row = item.row + position - item.start;
    ring.keys[((size_t)key_head * kRing + position % kRing) * s.key + c] =
        a.p.x[(size_t)row * a.width + a.k_at + key_head * s.key + c];
  }
  for (int i = threadIdx.x; i < (end - begin) * a.group; i += 128) {
    const int position = begin + i / a.group, head = key_head * a.group + i % a.group;
    ring.totals[(size_t)head * kRing + position % kRing] =
        a.totals[(size_t)(item.row + position - item.start) * s.heads + head];
  }
}

// ---- short items ----------------------------------------------------------------------------------------------------

constexpr int kColumns = 64, kRowThreads = 128;

struct RowMemory {
  double* totals;
  float *k_weights, *q_weights, *query, *own, *state, *deltas, *staged;

  static size_t bytes(int padded) {
    return sizeof(float) * (4 * kChunkRows + (size_t)(1 + kShortRows + kBlock) * (padded + 4) +
                            ((size_t)padded + kChunkRows) * kColumns);
  }
  __device__ RowMemory(float* memory, int padded) {
    totals = reinterpret_cast<double*>(memory), k_weights = memory + 2 * kChunkRows;
    q_weights = k_weights + kChunkRows, query = q_weights + kChunkRows, own = query + padded + 4;
    staged = own + kShortRows * (padded + 4), state = staged + kBlock * (padded + 4);
    deltas = state + padded * kColumns;
  }
};

// A key's product with x, which has zeros from n on; `key` has them if `whole`.
__device__ float dot(const float* key, const float* x, int n, int padded, bool whole) {
  float sum = 0;
  if (whole) {
#pragma unroll 16
    for (int c = 0; c < padded; c += 4) {
      const float4 a = *reinterpret_cast<const float4*>(key + c), b = *reinterpret_cast<const float4*>(x + c);
      sum = fmaf(a.x, b.x, sum), sum = fmaf(a.y, b.y, sum), sum = fmaf(a.z, b.z, sum), sum = fmaf(a.w, b.w, sum);
    }
  } else {
    for (int c = 0; c < padded; c++) sum = fmaf(c < n ? key[c] : 0.0f, x[c], sum);
  }
  return sum;
}

// A CTA for each item, head and 64 of its values: its rows one after the other. Half of the threads form the sums of
// the key, half those of the query. A state space needs no sums of the key; k_weights holds its rows' steps then.
template <bool kDelta>
__global__ void __launch_bounds__(kRowThreads) rows_kernel(Args a, StateRows rows) {
  extern __shared__ __align__(16) float memory[];
  after_previous();
  const StateItem item = rows.items[blockIdx.z];
  if (item.slot < 0) return;
  const DeltaShape& s = a.p.shape;
  const int head = blockIdx.y, key_head = head / a.group, begin = blockIdx.x * kColumns,
            width = min(kColumns, s.value - begin), tid = threadIdx.x, d = tid % kColumns;
  const bool asks = tid >= kColumns;  // with the query
  const RowMemory m(memory, a.padded);
  const Ring ring = ring_of(a, item.slot);
  float* ring_keys = ring.keys + (size_t)key_head * kRing * s.key;
  double* ring_totals = ring.totals + (size_t)head * kRing;
  float* ring_deltas = ring.deltas + (size_t)head * kRing * s.value + begin;
  const HeadState<kColumns> state{m.state, a.p.pages.state<float>(item.slot) + (size_t)head * s.key * s.value + begin,
                                  s.key, s.value, width};
  const int end = item.start + item.count, kept = kept_of(item);
  int at = item.position, known_from = 0;  // known_from: rows of the chunk from it on have their keys in m.own
  state.load(item.start == 0, a.padded, a.aligned);
  if (item.start == 0 && kept == 0)  // a sequence begins
    for (int n = tid; n < s.key * kColumns; n += kRowThreads)
      if (const int c = n % kColumns; c < width) state.page[(size_t)(n / kColumns) * s.value + c] = 0;

  // The key of the chunk's row j; rows of the item from `own_from` on are the chunk's.
  const auto key_of = [&](int j, int own_from) -> const float* {
    return j < known_from ? ring_keys + (size_t)(at % kRing + j) * s.key
                          : m.own + (own_from + j - known_from) * a.stride;
  };
  const auto advance = [&](int own_from) {
    __syncthreads();
    if (tid < kChunkRows) m.k_weights[tid] = decay_between(m.totals[kChunkRows - 1], m.totals[tid]);
    StateTile<kColumns, 8> tile(m.state, decay_between(m.totals[kChunkRows - 1], 0.0), a.padded);
    for (int j0 = 0; j0 < kChunkRows; j0 += kBlock) {
      __syncthreads();
      for (int i = tid; i < kBlock * a.padded; i += kRowThreads) {
        const int j = i / a.padded, c = i % a.padded;
        m.staged[j * a.stride + c] = c < s.key ? __fmul_rn(key_of(j0 + j, own_from)[c], m.k_weights[j0 + j]) : 0.0f;
      }
      __syncthreads();
      tile.add(m.staged, a.stride, m.deltas + j0 * kColumns, kBlock);
    }
    __syncthreads();
    tile.store(m.state);
    __syncthreads();
    at += kChunkRows;
    if (at == kept) state.store();
  };

  while (at < item.start / kChunkRows * kChunkRows) {  // accepted drafts had reached beyond a multiple
    const int place = at % kRing;
    load_rows(m.deltas, kColumns, ring_deltas + (size_t)place * s.value, s.value, kChunkRows, width, kColumns,
              a.aligned);
    if (tid < kChunkRows) m.totals[tid] = ring_totals[place + tid];
    wait_rows();
    known_from = kChunkRows;
    advance(0);
  }
  for (int position = item.start; position < end;) {
    const int first = position - at, count = min(at + kChunkRows, end) - position, place = at % kRing;
    const int own_from = position - item.start;
    known_from = first;
    load_rows(m.deltas, kColumns, ring_deltas + (size_t)place * s.value, s.value, first, width, kColumns, a.aligned);
    commit_copies();
    if (tid < first) m.totals[tid] = ring_totals[place + tid];
    for (int i = first; i < first + count; i++) {
      const int row = item.row + own_from + i - first, warp = tid / 32;
      float* x = a.p.x + (size_t)row * a.width;
      const float* gates = gates_of<kDelta>(a.p, row);
      float* own = m.own + (own_from + i - first) * a.stride;
      const float v = (!kDelta || !asks) && d < width ? x[a.v_at + head * s.value + begin + d] : 0.0f;
      if (warp == 0) take_head<kDelta>(x + a.k_at + key_head * s.key, s.key, a.padded, 1.0f, own, false);
      if (warp == 1)
        take_head<kDelta>(x + a.q_at + key_head * s.key, s.key, a.padded, __fdiv_rn(1.0f, sqrtf((float)s.key)), m.query,
                          false);
      if (tid == 64) {
        const double before = i == 0 ? 0.0 : i == first ? ring_totals[place + i - 1] : m.totals[i - 1];
        const double dt = step_of<kDelta>(a.p, gates, head);
        m.totals[i] = __dadd_rn(before, decay_of(a.p, dt, head));
        if (!kDelta) m.k_weights[i] = (float)dt;
      }
      __syncthreads();
      if (const int j = d; j <= i && (kDelta || asks)) {
        const float sum = dot(key_of(j, own_from), asks ? m.query : own, s.key, a.padded, j >= first || a.aligned);
        (asks ? m.q_weights : m.k_weights)[j] = __fmul_rn(decay_between(m.totals[i], m.totals[j]), sum);
      }
      if (i == first) wait_copies<0>();
      __syncthreads();
      float sum = 0;
      if (kDelta || asks) {
        const float* asked = asks ? m.query : own;
#pragma unroll 8
        for (int c = 0; c < a.padded; c += 4) {
          const float4 four = *reinterpret_cast<const float4*>(asked + c);
#pragma unroll
          for (int n = 0; n < 4; n++) sum = fmaf(part_of(four, n), m.state[(c + n) * kColumns + d], sum);
        }
        sum = __fmul_rn(decay_between(m.totals[i], 0.0), sum);
        const float* weights = asks ? m.q_weights : m.k_weights;
#pragma unroll 8
        for (int j = 0; j < i; j++) sum = fmaf(weights[j], m.deltas[j * kColumns + d], sum);
      }
      if (!asks) {
        const float delta =
            kDelta ? __fmul_rn(beta_of(a.p, gates, head), __fsub_rn(v, sum)) : __fmul_rn(m.k_weights[i], v);
        m.deltas[i * kColumns + d] = delta;
        if (at >= kept && d < width) ring_deltas[(size_t)(place + i) * s.value + d] = delta;
      }
      if (at >= kept && blockIdx.x == 0) {
        if (tid == 64) ring_totals[place + i] = m.totals[i];
        if (head % a.group == 0 && tid < s.key) ring_keys[(size_t)(place + i) * s.key + tid] = own[tid];
      }
      __syncthreads();
      if (asks && d < width) {
        sum = fmaf(m.q_weights[i], m.deltas[i * kColumns + d], sum);
        a.p.y[(size_t)row * s.heads * s.value + head * s.value + begin + d] =
            kDelta ? sum : fmaf(a.p.skip[head], v, sum);
      }
    }
    position += count;
    if (first + count == kChunkRows && (position < end || at + kChunkRows <= kept)) advance(own_from);
    __syncthreads();
  }
}

template <bool kDelta, int kC, int kN>
void launch_chunks(const Args& a, const StateRows& rows, const Queue& queue) {
  const size_t bytes = ChunkMemory<kC>::bytes(a.padded);
  start(queue, chunks_kernel<kDelta, kC, kN>, dim3(ceil_div(a.p.shape.value, kC), a.p.shape.heads, rows.long_items),
        kRowGroups * kC / kN, bytes, a, rows);
}

size_t whole(size_t bytes) { return (bytes + 255) / 256 * 256; }

template <bool kDelta>
void launch(const Args& a, const StateRows& rows, const Queue& queue) {
  const DeltaShape& s = a.p.shape;
  if (rows.short_items) {
    const size_t bytes = RowMemory::bytes(a.padded);
    start(queue, rows_kernel<kDelta>, dim3(ceil_div(s.value, kColumns), s.heads, rows.short_items), kRowThreads, bytes,
          a, rows);
  }
  if (!rows.long_items) return;
  const size_t bytes = sizeof(float) * 2 * kChunkRows * a.stride + sizeof(double) * a.group * kChunkRows;
  start(queue, products_kernel<kDelta>, dim3(rows.chunk_count, s.key_heads), 128, bytes, a, rows);
  // The fewest parts of a head that occupy the GPU: each of them loads the chunk's keys and products.
  const int heads = s.heads * rows.long_items, sms = sm_count();
  if (s.value > 64 && 2 * heads >= 3 * sms) launch_chunks<kDelta, 128, 8>(a, rows, queue);
  else if (s.value > 32 && 2 * heads * ceil_div(s.value, 64) >= 3 * sms) launch_chunks<kDelta, 64, 4>(a, rows, queue);
  else launch_chunks<kDelta, 32, 4>(a, rows, queue);
  start(queue, keep_rows_kernel, dim3(s.key_heads, rows.long_items), 128, 0, a, rows);
}

}  // namespace

PageBytes gated_delta_bytes(const DeltaShape& s) {
  const size_t keys = sizeof(float) * s.key_heads * s.key, values = sizeof(float) * s.heads * s.value;
  return {whole(values * s.key), whole(kRing * (sizeof(double) * s.heads + keys + values))};
}

size_t gated_delta_scratch(const DeltaShape& s, int rows) {
  return rows * (whole(12 * s.heads) + sizeof(float) * 2 * kChunkRows * s.key_heads);
}

void gated_delta(const GatedDelta& p, const StateRows& rows, const Queue& queue) {
  const DeltaShape& s = p.shape;
  Args a{p, s.heads / s.key_heads, 2 * s.key_heads * s.key + s.heads * s.value};
  a.padded = (s.key + 3) / 4 * 4, a.stride = a.padded + 4, a.aligned = s.key % 4 == 0 && s.value % 4 == 0;
  a.weights = reinterpret_cast<float*>(p.scratch);
  a.totals = reinterpret_cast<double*>(a.weights + (size_t)p.max_rows * 2 * kChunkRows * s.key_heads);
  a.betas = reinterpret_cast<float*>(a.totals + (size_t)p.max_rows * s.heads);
  const int keys = s.key_heads * s.key;
  if (p.skip) a.k_at = s.heads * s.value, a.q_at = a.k_at + keys, launch<false>(a, rows, queue);
  else a.k_at = keys, a.v_at = 2 * keys, launch<true>(a, rows, queue);
}

}  // namespace as::cuda
