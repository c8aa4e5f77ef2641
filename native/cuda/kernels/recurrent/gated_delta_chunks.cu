// Long items (prompts), in three kernels: the products of keys and queries of all chunks in parallel; then each head's
// chunks in turn with the state in shared memory; then the ring's keys, which the second one still reads.
#include "cuda/kernels/recurrent/delta_chunk.cuh"

namespace as::cuda {
namespace recurrent {
namespace {

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
  const int place = chunk.at % kRing, warp = threadIdx.x / 32;
  load_rows(x, a.stride, ring.keys + ((size_t)key_head * kRing + place) * s.key, s.key, first, s.key, a.padded,
            a.aligned);
  // Keys and queries, some heads at a time, so that their loads are under way together.
  constexpr int kTogether = 4;
  for (int i0 = warp * kTogether; i0 < 2 * count; i0 += 4 * kTogether) {
    LoadedHead heads[kTogether];
#pragma unroll
    for (int u = 0; u < kTogether; u++) {
      const int r = min((i0 + u) / 2, count - 1), part = u % 2;  // 0: the key
      heads[u].load(a.p.x + (size_t)(row + r) * a.width + (part ? a.q_at : a.k_at) + key_head * s.key, s.key);
    }
#pragma unroll
    for (int u = 0; u < kTogether; u++)
      if (const int r = (i0 + u) / 2, part = u % 2; r < count) {
        if (kDelta) heads[u].normalize(part ? __fdiv_rn(1.0f, sqrtf((float)s.key)) : 1.0f, s.key);
        heads[u].store(x + (part * kChunkRows + first + r) * a.stride, a.padded);
        if (kDelta)
          heads[u].store(a.p.x + (size_t)(row + r) * a.width + (part ? a.q_at : a.k_at) + key_head * s.key, s.key);
      }
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
  // A warp multiplies 16 rows by all keys before their end.
  constexpr int kTiles = kDelta ? 4 : 2;  // of 8 columns: keys, then queries
  const int own = warp * kBlock, lane = threadIdx.x % 32;
  if (own + kBlock <= first || own >= first + count) return;
  float sums[4][kTiles][1][4] = {};  // [blocks of keys]
#pragma unroll 1
  for (int c = 0; c < a.padded; c += 8) {
    const float* right = x + ((kDelta ? 0 : kChunkRows) + own + lane / 4) * a.stride + c + lane % 4;
    float columns[kTiles][2];
#pragma unroll
    for (int n = 0; n < kTiles; n++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        columns[n][half] = right[(n / 2 * kChunkRows + n % 2 * 8) * a.stride + half * 4];
#pragma unroll
    for (int b = 0; b < 4; b++)
      if (b <= warp)
        multiply_keys(sums[b], x + b * kBlock * a.stride + c, a.stride,
                      [&](int n, int half) { return columns[n][half]; });
  }
#pragma unroll
  for (int b = 0; b < 4; b++)
#pragma unroll
    for (int n = 0; n < kTiles; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int r = own + n % 2 * 8 + lane % 4 * 2 + i % 2 - first, part = kDelta ? n / 2 : 1;
        if (b <= warp && r >= 0 && r < count)
          a.weights[(((size_t)(row + r) * s.key_heads + key_head) * 2 + part) * kChunkRows + b * kBlock + lane / 4 +
                    i / 2 * 8] = sums[b][n][0][i];
      }
}

// A CTA for each item, head and kC of its values: its chunks one after the other.
template <bool kDelta, int kC>
__global__ void __launch_bounds__(ChunkWork<kDelta, kC, kChunkRows>::kThreads, 1)
    chunks_kernel(DeltaArgs a, StateRows rows) {
  extern __shared__ __align__(16) float memory[];
  using Work = ChunkWork<kDelta, kC, kChunkRows>;
  constexpr int kThreads = Work::kThreads, kStride = Work::kStride;
  after_previous();
  const StateItem item = rows.items[rows.short_items + blockIdx.z];
  const DeltaShape& s = a.p.shape;
  const int head = blockIdx.y, key_head = head / a.group, begin = blockIdx.x * kC, width = min(kC, s.value - begin);
  const int tid = threadIdx.x;
  const ChunkMemory<kC, kChunkRows> m(memory, a.padded);
  Work work(m, a);
  const Ring ring = ring_of(a, item.slot);
  const float* ring_keys = ring.keys + (size_t)key_head * kRing * s.key;
  const double* ring_totals = ring.totals + (size_t)head * kRing;
  float* ring_deltas = ring.deltas + (size_t)head * kRing * s.value + begin;
  const HeadState<kC, kStride> state{
      m.state, a.p.pages.state<float>(item.slot) + (size_t)head * s.key * s.value + begin, s.key, s.value, width};
  const int end = item.start + item.count, kept = kept_of(item);
  int at = item.position;
  state.load(item.start == 0, a.padded, a.aligned);
  const auto advance = [&] {
    work.advance();
    at += kChunkRows;
    if (at == kept) state.store();
  };

  while (at < item.start / kChunkRows * kChunkRows) {  // accepted drafts had reached beyond a multiple
    const int place = at % kRing;
    work.load_past(ring_keys + (size_t)place * s.key, ring_deltas + (size_t)place * s.value, ring_totals + place, s,
                   width, a.aligned);
    wait_rows();
    work.grow();
    __syncthreads();
    advance();
  }
  const auto load_queries = [&](int position, int first, int count) {
    load_rows(m.queries + first * a.stride, a.stride,
              a.p.x + (size_t)(item.row + position - item.start) * a.width + a.q_at + key_head * s.key, a.width, count,
              s.key, a.padded, a.aligned);
  };
  const auto load_pairs = [&](int position, int first, int count) {
    const float* pairs =
        a.weights + ((size_t)(item.row + position - item.start) * s.key_heads + key_head) * 2 * kChunkRows;
    for (int part = kDelta ? 0 : 1; part < 2; part++)
      load_rows(m.pairs + (part * kChunkRows + first) * kPairs, kPairs, pairs + part * kChunkRows,
                (size_t)s.key_heads * 2 * kChunkRows, count, kChunkRows, kChunkRows, true);
  };
  for (int position = item.start; position < end;) {
    const int first = position - at, count = min(at + kChunkRows, end) - position, place = at % kRing;
    const int row = item.row + position - item.start;
    const float* x = a.p.x + (size_t)row * a.width;
    work.take(first, count, 0);
    load_rows(m.keys, a.stride, ring_keys + (size_t)place * s.key, s.key, first, s.key, a.padded, a.aligned);
    load_rows(m.keys + first * a.stride, a.stride, x + a.k_at + key_head * s.key, a.width, count, s.key, a.padded,
              a.aligned);
    if (position == item.start) load_queries(position, first, count), load_pairs(position, first, count);
    // Deltas of rows before these; of these, first their values; then zeros.
    load_rows(m.deltas, kStride, ring_deltas + (size_t)place * s.value, s.value, first, width, kC, a.aligned);
    load_rows(m.deltas + first * kStride, kStride, x + a.v_at + head * s.value + begin, a.width, count, width, kC,
              a.aligned);
    work.clear_deltas_behind();
    for (int j = tid; j < first + count; j += kThreads) {
      const size_t entry = (size_t)(row + j - first) * s.heads + head;
      const double total = j < first ? ring_totals[place + j] : a.totals[entry];
      m.totals[j] = total;
      if (j >= first) m.betas[j] = a.betas[entry], m.shrunk[j] = decay_between(total, 0.0);
    }
    wait_rows();
    // While some warps multiply, others work out decays.
    const auto weigh = [&] {
      for (int n = tid; n < count * kChunkRows; n += kThreads) {
        const int i = first + n / kChunkRows, j = n % kChunkRows;
        if (j >= (i / kBlock + 1) * kBlock) continue;
        const float factor = j > i ? 0.0f : decay_between(m.totals[i], m.totals[j]);
        float *of_key = m.pairs + i * kPairs + j, *of_query = of_key + kChunkRows * kPairs;
        if (kDelta) *of_key = __fmul_rn(factor, *of_key);
        *of_query = j > i ? 0.0f : __fmul_rn(factor, *of_query);
      }
      if (first + count == kChunkRows) work.grow();
      if (!kDelta) work.scale_deltas();
    };
    const int turn = work.column_warp < Work::kColumnWarps / 2;
#pragma unroll 1
    for (int i = 0; i < 2; i++)
      if (i == turn) work.answer();
      else weigh();
    __syncthreads();
    const int next = position + count, left = min(kChunkRows, end - next);  // rows of the next chunk
    if (left > 0) load_queries(next, 0, left);
    work.substitute();
    if (work.part == 1)
      work.each_row(
          [&](int i, const float4& four) { put_values<kDelta>(a, head, begin + work.value, row + i - first, four); });
    __syncthreads();
    if (left > 0) load_pairs(next, 0, left);
    if (at >= kept) work.keep_deltas(ring_deltas + (size_t)place * s.value, s.value, width);
    position = next;
    if (first + count == kChunkRows && (position < end || at + kChunkRows <= kept)) advance();
    __syncthreads();
  }
  if (item.start == 0 && kept == 0) state.clear();
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

template <bool kDelta, int kC>
void launch_chunks(const DeltaArgs& a, const StateRows& rows, const Queue& queue) {
  start(queue, chunks_kernel<kDelta, kC>, dim3(ceil_div(a.p.shape.value, kC), a.p.shape.heads, rows.long_items),
        ChunkWork<kDelta, kC, kChunkRows>::kThreads, ChunkMemory<kC, kChunkRows>::bytes(a.padded), a, rows);
}
}  // namespace

template <bool kDelta>
void delta_chunks(const DeltaArgs& a, const StateRows& rows, const Queue& queue) {
  const DeltaShape& s = a.p.shape;
  const size_t bytes = sizeof(float) * 2 * kChunkRows * a.stride + sizeof(double) * a.group * kChunkRows;
  start(queue, products_kernel<kDelta>, dim3(rows.chunk_count, s.key_heads), 128, bytes, a, rows);
  // The fewest parts of a head that occupy the GPU: each of them loads the chunk's keys and products.
  const int heads = s.heads * rows.long_items, sms = sm_count();
  const auto wide = [&](int columns, size_t shared) {
    return 2 * s.value > columns && 4 * heads * ceil_div(s.value, columns) >= 3 * sms && (int)shared <= max_shared();
  };
  if (wide(128, ChunkMemory<128, kChunkRows>::bytes(a.padded))) launch_chunks<kDelta, 128>(a, rows, queue);
  else if (wide(64, ChunkMemory<64, kChunkRows>::bytes(a.padded))) launch_chunks<kDelta, 64>(a, rows, queue);
  else launch_chunks<kDelta, 32>(a, rows, queue);
  start(queue, keep_rows_kernel, dim3(s.key_heads, rows.long_items), 128, 0, a, rows);
}
template void delta_chunks<true>(const DeltaArgs&, const StateRows&, const Queue&);
template void delta_chunks<false>(const DeltaArgs&, const StateRows&, const Queue&);

}  // namespace recurrent
}  // namespace as::cuda
