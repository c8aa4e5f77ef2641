// Long items (prompts), in three kernels: the products of keys and queries of all chunks in parallel; then each head's
// chunks in turn with the state in shared memory; then the ring's keys, which the second one still reads.
#include <type_traits>

#include "cuda/kernels/recurrent/delta.cuh"

namespace as::cuda {
namespace recurrent {
namespace {

constexpr int kRowGroups = 16, kPairs = kChunkRows + 4;  // kPairs: floats of a row of a chunk's products

// A CTA for each chunk and key head: normalizes its rows in place, sums up decays, and multiplies each row's key and
// query by the chunk's keys up to its own. A state space needs no products of keys, and no norms.
template <bool kDelta>
__global__ void __launch_bounds__(128) products_kernel(DeltaArgs a, StateRows rows) {
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
__global__ void __launch_bounds__(kRowGroups* kC / kN) chunks_kernel(DeltaArgs a, StateRows rows) {
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
__global__ void __launch_bounds__(128) keep_rows_kernel(DeltaArgs a, StateRows rows) {
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

template <bool kDelta, int kC, int kN>
void launch_chunks(const DeltaArgs& a, const StateRows& rows, const Queue& queue) {
  const size_t bytes = ChunkMemory<kC>::bytes(a.padded);
  start(queue, chunks_kernel<kDelta, kC, kN>, dim3(ceil_div(a.p.shape.value, kC), a.p.shape.heads, rows.long_items),
        kRowGroups * kC / kN, bytes, a, rows);
}
}  // namespace

template <bool kDelta>
void delta_chunks(const DeltaArgs& a, const StateRows& rows, const Queue& queue) {
  const DeltaShape& s = a.p.shape;
  const size_t bytes = sizeof(float) * 2 * kChunkRows * a.stride + sizeof(double) * a.group * kChunkRows;
  start(queue, products_kernel<kDelta>, dim3(rows.chunk_count, s.key_heads), 128, bytes, a, rows);
  // The fewest parts of a head that occupy the GPU: each of them loads the chunk's keys and products.
  const int heads = s.heads * rows.long_items, sms = sm_count();
  if (s.value > 64 && 2 * heads >= 3 * sms) launch_chunks<kDelta, 128, 8>(a, rows, queue);
  else if (s.value > 32 && 2 * heads * ceil_div(s.value, 64) >= 3 * sms) launch_chunks<kDelta, 64, 4>(a, rows, queue);
  else launch_chunks<kDelta, 32, 4>(a, rows, queue);
  start(queue, keep_rows_kernel, dim3(s.key_heads, rows.long_items), 128, 0, a, rows);
}
template void delta_chunks<true>(const DeltaArgs&, const StateRows&, const Queue&);
template void delta_chunks<false>(const DeltaArgs&, const StateRows&, const Queue&);

}  // namespace recurrent
}  // namespace as::cuda
