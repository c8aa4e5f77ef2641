// Long items (prompts), in three kernels: the products of keys and queries of all chunks in parallel; then each head's
// chunks in turn with the state in shared memory; then the ring's keys, which the second one still reads.
#include "cuda/kernels/recurrent/delta_chunk.cuh"

namespace as::cuda {
namespace recurrent {
namespace {

constexpr int kProductWarps = 8;

// A CTA for each chunk and key head: normalizes its rows in place, sums up decays, and multiplies each row's key and
// query by the chunk's keys up to its own. A state space needs no products of keys, and no norms.
template <bool kDelta>
__global__ void __launch_bounds__(32 * kProductWarps, 3) products_kernel(DeltaArgs a, StateRows rows) {
  extern __shared__ __align__(16) float memory[];
  constexpr int kThreads = 32 * kProductWarps;
  after_previous();
  const StateChunk chunk = rows.chunks[blockIdx.y];
  const StateItem item = rows.items[chunk.item];
  const DeltaShape& s = a.p.shape;
  const int key_head = blockIdx.x, begin = max(chunk.at, item.start), first = begin - chunk.at,
            count = min(chunk.at + kChunkRows, item.start + item.count) - begin, row = item.row + begin - item.start;
  float* x = memory;  // keys, then queries
  double* decays = reinterpret_cast<double*>(x + 2 * kChunkRows * a.stride);
  const Ring ring = ring_of(a, item.slot);
  const int place = chunk.at % kRing, warp = threadIdx.x / 32;
  // part 0: keys; 1: queries
  const auto rows_of = [&](int part) {
    return a.p.x + (size_t)row * a.width + (part ? a.q_at : a.k_at) + key_head * s.key;
  };
  load_rows(x, a.stride, ring.keys + ((size_t)key_head * kRing + place) * s.key, s.key, first, s.key, a.padded,
            a.aligned);
  for (int part = 0; part < 2; part++)
    load_rows(x + (part * kChunkRows + first) * a.stride, a.stride, rows_of(part), a.width, count, s.key, a.padded,
              a.aligned);
  for (int i = threadIdx.x; i < count * a.group; i += kThreads) {
    const int r = i / a.group, g = i % a.group, head = key_head * a.group + g;
    const float* gates = gates_of<kDelta>(a.p, row + r);
    const double dt = step_of<kDelta>(a.p, gates, head);
    decays[g * kChunkRows + r] = decay_of(a.p, dt, head);
    a.betas[(size_t)(row + r) * s.heads + head] = kDelta ? beta_of(a.p, gates, head) : (float)dt;
  }
  wait_rows();
  if (kDelta) {
    constexpr int kTogether = 4;  // heads of a warp whose sums are under way together
    for (int i0 = warp * kTogether; i0 < 2 * count; i0 += kProductWarps * kTogether) {
      LoadedHead heads[kTogether];
#pragma unroll
      for (int u = 0; u < kTogether; u++) {
        const int i = i0 + u < 2 * count ? i0 + u : i0, r = i / 2, part = i % 2;
        heads[u].load(x + (part * kChunkRows + first + r) * a.stride, s.key);
        heads[u].normalize(part ? __fdiv_rn(1.0f, sqrtf((float)s.key)) : 1.0f, s.key);
      }
#pragma unroll
      for (int u = 0; u < kTogether; u++)
        if (const int r = (i0 + u) / 2, part = u % 2; r < count) {
          heads[u].store(x + (part * kChunkRows + first + r) * a.stride, s.key);
          heads[u].store(rows_of(part) + (size_t)r * a.width, s.key);
        }
    }
    __syncthreads();
  }
  for (int g = threadIdx.x; g < a.group; g += kThreads) {
    const int head = key_head * a.group + g;
    double total = first ? ring.totals[(size_t)head * kRing + place + first - 1] : 0.0;
    for (int r = 0; r < count; r++)
      a.totals[(size_t)(row + r) * s.heads + head] = total = __dadd_rn(total, decays[g * kChunkRows + r]);
  }
  // A warp multiplies keys or queries of a block of 16 rows, of a state space 8 queries, by all keys before the block's
  // end. The two warps of a scheduler have blocks whose work adds up to the same.
  constexpr int kTiles = kDelta ? 2 : 1;  // of 8 columns
  const int half = warp / 4, block = half ? 7 - warp : warp, own = block * kBlock, lane = threadIdx.x % 32,
            part = kDelta ? half : 1, column = own + (kDelta ? 0 : 8 * half);
  if (own + kBlock <= first || own >= first + count) return;
  float sums[4][kTiles][1][4] = {};  // [blocks of keys]
#pragma unroll 1
  for (int c = 0; c < a.padded; c += 8) {
    const float* right = x + (part * kChunkRows + column + lane / 4) * a.stride + c + lane % 4;
    float columns[kTiles][2];
#pragma unroll
    for (int n = 0; n < kTiles; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) columns[n][i] = right[n * 8 * a.stride + i * 4];
#pragma unroll
    for (int b = 0; b < 4; b++)
      if (b <= block)
        multiply_keys(sums[b], x + b * kBlock * a.stride + c, a.stride, [&](int n, int i) { return columns[n][i]; });
  }
#pragma unroll
  for (int b = 0; b < 4; b++)
#pragma unroll
    for (int n = 0; n < kTiles; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int r = column + n * 8 + lane % 4 * 2 + i % 2 - first;
        if (b <= block && r >= 0 && r < count)
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
  ChunkMemory<kC, kChunkRows> m(memory, a.padded);
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
  const auto row_of = [&](int position) { return item.row + position - item.start; };
  const bool has_keys = kDelta && work.part == 0;  // half of the rule's warps; of a state space, all have queries
  // Columns of x of the rows from `position` on, as rows of the chunk from `first` on.
  const auto load_columns = [&](float* to, int stride, int column, int position, int first, int count, int width,
                                int padded) {
    load_rows(to + first * stride, stride, a.p.x + (size_t)row_of(position) * a.width + column, a.width, count, width,
              padded, a.aligned);
  };
  const auto load_heads = [&](float* to, int column, int position, int first, int count) {
    load_columns(to, a.stride, column + key_head * s.key, position, first, count, s.key, a.padded);
  };
  // take(i, j, row): for each four products of row i of the chunk with its keys from j on, up to the end of the row's
  // block; `row` counts from the first one.
  const auto each_products = [&](int first, int count, const auto& take) {
    for (int n = tid; n < count * kChunkRows / 4; n += kThreads) {
      const int row = n / (kChunkRows / 4), i = first + row, j = n % (kChunkRows / 4) * 4;
      if (j < (i / kBlock + 1) * kBlock) take(i, j, row);
    }
  };
  const auto load_products = [&](int part, int position, int first, int count) {
    const float* from = a.weights + ((size_t)row_of(position) * s.key_heads + key_head) * 2 * kChunkRows;
    each_products(first, count, [&](int i, int j, int row) {
      copy_16(shared_address(m.pairs + (part * kChunkRows + i) * kPairs + j),
              from + ((size_t)row * s.key_heads * 2 + part) * kChunkRows + j);
    });
  };
  // What a chunk begins with, which comes while the chunk before is computed. Keys come to the place of the queries,
  // which are not needed any more. A state space multiplies its state with queries only, so these come first, and keys
  // stay where they are.
  const auto load_first = [&](int position, int first, int count) {
    load_heads(m.queries, kDelta ? a.k_at : a.q_at, position, first, count);
  };
  const auto load_factors = [&](int position, int first, int count) {
    if (kDelta) load_products(0, position, first, count);
    if (tid < count) {
      const size_t entry = (size_t)(row_of(position) + tid) * s.heads + head;
      copy_8(m.totals + first + tid, a.totals + entry);
      copy_4(shared_address(m.betas + first + tid), a.betas + entry, true);
    }
  };
  // What comes while the first products with the state are formed.
  const auto load_second = [&](int position, int first, int count) {
    load_products(1, position, first, count);
    load_heads(kDelta ? m.queries : m.keys, kDelta ? a.q_at : a.k_at, position, first, count);
    load_columns(m.deltas, kStride, a.v_at + head * s.value + begin, position, first, count, width, kC);
  };
  // Of the first chunk's rows before the step: keys, deltas and decays.
  if (const int first = item.start - at) {
    const int place = at % kRing;
    load_rows(kDelta ? m.queries : m.keys, a.stride, ring_keys + (size_t)place * s.key, s.key, first, s.key, a.padded,
              a.aligned);
    load_rows(m.deltas, kStride, ring_deltas + (size_t)place * s.value, s.value, first, width, kC, a.aligned);
    for (int j = tid; j < first; j += kThreads) m.totals[j] = ring_totals[place + j];
  }
  {
    const int first = item.start - at, count = min(at + kChunkRows, end) - item.start;
    load_first(item.start, first, count), load_factors(item.start, first, count);
  }
  for (int position = item.start; position < end;) {
    const int first = position - at, count = min(at + kChunkRows, end) - position;
    work.take(first, count, 0);
    if (kDelta) {
      float* const queries = m.keys;
      m.keys = m.queries, m.queries = queries;
    }
    commit_copies(), wait_copies<0>();
    if (tid < count) m.shrunk[first + tid] = decay_between(m.totals[first + tid], 0.0);  // the thread's own copy
    __syncthreads();
    load_second(position, first, count), commit_copies();
    // Products times the decays between their rows; a thread has copied those of queries itself.
    const auto weigh = [&] {
      work.clear_deltas_behind();
      if (first + count == kChunkRows) work.grow();
      wait_copies<0>();
      each_products(first, count, [&](int i, int j, int) {
        float *of_key = m.pairs + i * kPairs + j, *of_query = of_key + kChunkRows * kPairs;
        float factors[4];
#pragma unroll
        for (int u = 0; u < 4; u++) factors[u] = j + u > i ? 0.0f : decay_between(m.totals[i], m.totals[j + u]);
        const float4 query = four_at(of_query);
        put_four(of_query, make_float4(j > i ? 0.0f : __fmul_rn(factors[0], query.x),
                                       j + 1 > i ? 0.0f : __fmul_rn(factors[1], query.y),
                                       j + 2 > i ? 0.0f : __fmul_rn(factors[2], query.z),
                                       j + 3 > i ? 0.0f : __fmul_rn(factors[3], query.w)));
        if (!kDelta) return;
        const float4 key = four_at(of_key);
        put_four(of_key, make_float4(__fmul_rn(factors[0], key.x), __fmul_rn(factors[1], key.y),
                                     __fmul_rn(factors[2], key.z), __fmul_rn(factors[3], key.w)));
      });
    };
    // Some warps multiply with the state, of the rule those of keys, while others work out decays; then the other way
    // round.
    const bool multiplies_first = work.column_warp < Work::kColumnWarps / 2;
#pragma unroll 1
    for (int turn = 0; turn < 2; turn++) {
      if (multiplies_first == !turn) work.answer();
      else weigh();
      if (turn) break;
      wait_rows();
      if (!kDelta) work.scale_deltas();
    }
    __syncthreads();
    const int next = position + count, left = min(kChunkRows, end - next);  // rows of the next chunk
    if (left > 0) {
      load_first(next, 0, left);
      if (!kDelta) load_factors(next, 0, left);
    }
    work.substitute();
    if (!has_keys) {
      work.each_row([&](int i, const float4& four) {
        put_values<kDelta>(a, head, begin + work.value, row_of(position) + i - first, four);
      });
    }
    if (kDelta) {
      __syncthreads();
      if (left > 0) load_factors(next, 0, left);
    }
    if (at >= kept) work.keep_deltas(ring_deltas + (size_t)(at % kRing) * s.value, s.value, width);
    position = next;
    if (first + count == kChunkRows && (position < end || at + kChunkRows <= kept)) advance();
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
  start(queue, products_kernel<kDelta>, dim3(s.key_heads, rows.chunk_count), 32 * kProductWarps, bytes, a, rows);
  with_columns(a, rows, [&](auto columns) { launch_chunks<kDelta, decltype(columns)::value>(a, rows, queue); });
  start(queue, keep_rows_kernel, dim3(s.key_heads, rows.long_items), 128, 0, a, rows);
}
template void delta_chunks<true>(const DeltaArgs&, const StateRows&, const Queue&);
template void delta_chunks<false>(const DeltaArgs&, const StateRows&, const Queue&);

}  // namespace recurrent
}  // namespace as::cuda
