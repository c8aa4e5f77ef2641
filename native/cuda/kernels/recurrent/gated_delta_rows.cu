// Short items (decode, drafts). An item of one row at which no state advances, as nearly all rows of decode are, is
// computed in one pass. Where there are many, it has a kernel of its own, in which the state does not lie in shared
// memory: each value of it is read just once, by the warp that multiplies it.
#include <algorithm>

#include "cuda/kernels/recurrent/delta_chunk.cuh"

namespace as::cuda {
namespace recurrent {
namespace {

constexpr int kColumns = 64;                  // values of a CTA of rows_kernel()
constexpr int kMostWarps = 8, kKeyWarps = 1;  // of a CTA of one_row_kernel(): with values; that multiply keys
constexpr int kOneRowThreads = 32 * (kMostWarps + kKeyWarps);
constexpr int kAhead = 4;  // steps of 8 channels or rows, of which a thread's loads are under way

// Shared memory of one_row().
struct OneRowMemory {
  double* totals;                               // [heads, 64]
  float *k_weights, *q_weights, *query, *keys;  // [heads, 64], twice; [stride]; [64, stride]

  static size_t bytes(int heads, int stride) {
    return sizeof(double) * heads * kChunkRows + sizeof(float) * (2 * heads * kChunkRows + (1 + kChunkRows) * stride);
  }
  __device__ OneRowMemory(float* memory, int heads, int stride) {
    totals = reinterpret_cast<double*>(memory), k_weights = memory + 2 * heads * kChunkRows;
    q_weights = k_weights + heads * kChunkRows, query = q_weights + heads * kChunkRows, keys = query + stride;
  }
};

// Values [d, d + 4) of a row of a head's state or deltas.
__device__ float4 load_values(const DeltaArgs& a, const float* row, int d, bool there) {
  const int width = there ? a.p.shape.value - d : 0;
  if (a.aligned) return width > 0 ? four_at(row + d) : make_float4(0, 0, 0, 0);
  return make_float4(width > 0 ? row[d] : 0.0f, width > 1 ? row[d + 1] : 0.0f, width > 2 ? row[d + 2] : 0.0f,
                     width > 3 ? row[d + 3] : 0.0f);
}

// The values that lane `from` has.
__device__ inline float4 of_lane(const float4& x, int from) {
  return make_float4(__shfl_sync(~0u, x.x, from), __shfl_sync(~0u, x.y, from), __shfl_sync(~0u, x.z, from),
                     __shfl_sync(~0u, x.w, from));
}

// A CTA computes an item's only row: `heads` heads of one key head from first_head on, `each` warps of each, for 32
// values a warp, from `begin` on. Of products' 8 columns, the first is the key's, the second the query's.
// staged: the state comes to shared memory, whole; otherwise to registers, a part at a time. The item's page is read
// before the previous kernel has ended: no other kernel of the step writes it.
template <bool kDelta, bool kStaged>
__device__ void one_row(const DeltaArgs& a, const StateItem& item, int first_head, int heads, int each, int begin,
                        float* memory) {
  const DeltaShape& s = a.p.shape;
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4, h = warp / each;
  const int warps = blockDim.x / 32, head = first_head + h, value = begin + warp % each * 32;
  const bool there = h < heads && value < s.value;  // has values
  const int key_head = first_head / a.group, at = item.position, i = item.start - at, place = at % kRing;
  const OneRowMemory m(memory, heads, a.stride);
  const Ring ring = ring_of(a, item.slot);
  float* ring_keys = ring.keys + ((size_t)key_head * kRing + place) * s.key;
  const float* state = a.p.pages.state<float>(item.slot) + (size_t)head * s.key * s.value;
  float* deltas = ring.deltas + ((size_t)head * kRing + place) * s.value;
  float *x = a.p.x + (size_t)item.row * a.width, *own = m.keys + i * a.stride;
  const float* gates = gates_of<kDelta>(a.p, item.row);
  const auto channels = [&](int c) {
    return load_values(a, state + (size_t)c * s.value, value + 4 * g, there && c < s.key);
  };
  const auto past = [&](int j) { return load_values(a, deltas + (size_t)j * s.value, value + 4 * g, j < i); };

  constexpr int kStride = kColumns + 8;  // floats of a row of the staged state
  float* staged = m.keys + kChunkRows * a.stride;
  if (kStaged) {  // of the only head; by warps that have none, too
    float* page = a.p.pages.state<float>(item.slot) + (size_t)first_head * s.key * s.value + begin;
    HeadState<kColumns, kStride>{staged, page, s.key, s.value, min(kColumns, s.value - begin)}.load(false, a.padded,
                                                                                                    a.aligned);
  }
  float4 ahead[kAhead][2];
#pragma unroll
  for (int u = 0; u < kAhead; u++) {
    ahead[u][0] = kStaged ? past(8 * u + t) : channels(8 * u + t);
    ahead[u][1] = kStaged ? past(8 * u + 4 + t) : channels(8 * u + 4 + t);
  }
  load_rows(m.keys, a.stride, ring_keys, s.key, i, s.key, a.padded, a.aligned);
  commit_copies();
  for (int n = tid; n < heads * i; n += blockDim.x)
    m.totals[n / i * kChunkRows + n % i] = ring.totals[(size_t)(first_head + n / i) * kRing + place + n % i];
  const double before = lane < heads && i ? ring.totals[(size_t)(first_head + lane) * kRing + place + i - 1] : 0.0;
  await_previous();                 // so far all was written before the step's first kernel
  const int d = value + 4 * g + t;  // the value whose delta the lane computes
  const float v = there && d < s.value ? x[a.v_at + head * s.value + d] : 0.0f,
              beta = kDelta && there ? beta_of(a.p, gates, head) : 0;
  for (int task = warps - 1 - warp; task < 3; task += warps) {
    if (task == 0) take_head<kDelta>(x + a.k_at + key_head * s.key, s.key, a.padded, 1.0f, own);
    if (task == 1)
      take_head<kDelta>(x + a.q_at + key_head * s.key, s.key, a.padded, __fdiv_rn(1.0f, sqrtf((float)s.key)), m.query);
    if (task == 2 && lane < heads) {
      const double dt = step_of<kDelta>(a.p, gates, first_head + lane);
      m.totals[lane * kChunkRows + i] = __dadd_rn(before, decay_of(a.p, dt, first_head + lane));
      if (!kDelta) m.k_weights[lane * kChunkRows + i] = (float)dt;
    }
  }
  wait_rows();
  const float step = kDelta || !there ? 0.0f : m.k_weights[h * kChunkRows + i];
  const float* column = g == 0 ? own : m.query;
  float sums[1][2][4] = {};  // what the state, and then the rows since, answer to the key and to the query
  const auto right = [&](int c) { return [=](int, int half) { return g < 2 ? column[c + t + half * 4] : 0.0f; }; };
  if (kStaged && there) {
#pragma unroll 4
    for (int c = 0; c < a.padded; c += 8) {
      const float* left = staged + (c + t) * kStride + value - begin + 4 * g;
      add_products(sums, four_at(left), four_at(left + 4 * kStride), right(c));
    }
  } else if (there) {
#pragma unroll 1
    for (int c0 = 0; c0 < a.padded; c0 += 8 * kAhead)
#pragma unroll
      for (int u = 0; u < kAhead; u++) {
        const int c = c0 + 8 * u, next = c + 8 * kAhead;
        const bool end = c0 + 8 * kAhead >= a.padded;  // then the rows since follow
        if (c < a.padded) add_products(sums, ahead[u][0], ahead[u][1], right(c));
        ahead[u][0] = end ? past(8 * u + t) : channels(next + t);
        ahead[u][1] = end ? past(8 * u + 4 + t) : channels(next + 4 + t);
      }
  }
  // The other warps, if there are, multiply the keys meanwhile.
  const int busy = warps > heads * each ? heads * each : 0;
  for (int j0 = (warp - busy) * 2 * kBlock; j0 >= 0 && j0 <= i; j0 += (warps - busy) * 2 * kBlock) {
    float products[1][2][4] = {};
#pragma unroll 4
    for (int c = 0; c < a.padded; c += 8) multiply_keys(products, m.keys + j0 * a.stride + c, a.stride, right(c));
    float of_key = 0, of_query = 0;  // of row j, from the lane that has their columns
#pragma unroll
    for (int n = 0; n < 4; n++) {
      const float *two = &products[0][n / 2][n % 2 * 2], key = __shfl_sync(~0u, two[0], lane & ~3),
                  query = __shfl_sync(~0u, two[1], lane & ~3);
      if (n == t) of_key = key, of_query = query;
    }
    const int j = j0 + g + 8 * t;
    for (int k = 0; k < heads; k++) {
      const double* totals = m.totals + k * kChunkRows;
      const float factor = j > i ? 0.0f : decay_between(totals[i], totals[j]);
      if (kDelta) m.k_weights[k * kChunkRows + j] = j < i ? __fmul_rn(factor, of_key) : 0.0f;
      m.q_weights[k * kChunkRows + j] = j > i ? 0.0f : __fmul_rn(factor, of_query);
    }
  }
  __syncthreads();
  if (begin == 0) {
    if (tid < heads) ring.totals[(size_t)(first_head + tid) * kRing + place + i] = m.totals[tid * kChunkRows + i];
    if (first_head % a.group == 0)
      for (int c = tid; c < s.key; c += blockDim.x) ring_keys[(size_t)i * s.key + c] = own[c];
  }
  if (!there) return;

  const float *k_weights = m.k_weights + h * kChunkRows, *q_weights = m.q_weights + h * kChunkRows;
  const int last = i / kBlock * kBlock;  // the first row of the row's own block
  const float shrunk = decay_between(m.totals[h * kChunkRows + i], 0.0);
#pragma unroll
  for (int n = 0; n < 8; n++) sums[0][n / 4][n % 4] = __fmul_rn(shrunk, sums[0][n / 4][n % 4]);
#pragma unroll 1
  for (int j0 = 0; j0 < last; j0 += 8 * kAhead)
#pragma unroll
    for (int u = 0; u < kAhead; u++) {
      const int j = j0 + 8 * u + t;
      if (j0 + 8 * u >= last) continue;
      add_products(sums, ahead[u][0], ahead[u][1], [&](int, int half) {
        return g == 0 ? (kDelta ? k_weights[j + half * 4] : 0.0f) : g == 1 ? q_weights[j + half * 4] : 0.0f;
      });
      ahead[u][0] = past(j + 8 * kAhead), ahead[u][1] = past(j + 8 * kAhead + 4);
    }
  float4 now[4];  // deltas of the row's own block: rows lane % 4, 4 behind it, and so on
#pragma unroll
  for (int u = 0; u < 4; u++) now[u] = last / 8 % kAhead ? ahead[kAhead - 2 + u / 2][u % 2] : ahead[u / 2][u % 2];
  float delta;
  if constexpr (kDelta) {
    const int from = lane & ~3;  // has the key's column
    float4 known = make_float4(sums[0][0][0], sums[0][0][2], sums[0][1][0], sums[0][1][2]);
#pragma unroll
    for (int j = 0; j < kBlock - 1; j++)
      if (last + j < i) {
        const float weight = k_weights[last + j];
        const float4 four = of_lane(now[j / 4], from + j % 4);
        known.x = fmaf(weight, four.x, known.x), known.y = fmaf(weight, four.y, known.y);
        known.z = fmaf(weight, four.z, known.z), known.w = fmaf(weight, four.w, known.w);
      }
    known = of_lane(known, from);
    delta = __fmul_rn(beta, __fsub_rn(v, t == 0 ? known.x : t == 1 ? known.y : t == 2 ? known.z : known.w));
  } else {
    delta = __fmul_rn(step, v);
  }
  if (d < s.value) deltas[(size_t)i * s.value + d] = delta;
  else delta = 0;
  const float4 mine = make_float4(__shfl_sync(~0u, delta, lane & ~3), __shfl_sync(~0u, delta, (lane & ~3) + 1),
                                  __shfl_sync(~0u, delta, (lane & ~3) + 2), __shfl_sync(~0u, delta, (lane & ~3) + 3));
#pragma unroll
  for (int n = 0; n < 2; n++) {
    const int j = last + 8 * n + t;
    add_products(sums, j == i ? mine : now[2 * n], j + 4 == i ? mine : now[2 * n + 1],
                 [&](int, int half) { return g == 1 ? q_weights[j + half * 4] : 0.0f; });
  }
  if (t == 0)
    put_values<kDelta>(a, head, value + 4 * g, item.row,
                       make_float4(sums[0][0][1], sums[0][0][3], sums[0][1][1], sums[0][1][3]));
}

// A CTA for each item and `heads` heads, with `each` warps of each. Every CTA waits for the previous kernel: otherwise
// one that ends early would let the next kernel begin too early.
template <bool kDelta>
__global__ void __launch_bounds__(kOneRowThreads, 2) one_row_kernel(DeltaArgs a, StateRows rows, int heads, int each) {
  extern __shared__ __align__(16) float memory[];
  let_next_begin();
  const StateItem item = rows.items[blockIdx.z];
  if (is_one_row(item))
    one_row<kDelta, false>(a, item, blockIdx.y * heads, heads, each, blockIdx.x * each * 32, memory);
  else await_previous();
}

constexpr int kMostItems = 8;
template <bool kDelta>
using ShortWork = ChunkWork<kDelta, kColumns, kShortRows>;
using ShortMemory = ChunkMemory<kColumns, kShortRows>;

// A CTA computes 64 values of a head, of all rows of an item.
template <bool kDelta>
__device__ void several_rows(const DeltaArgs& a, const StateItem& item, float* memory) {
  using Work = ShortWork<kDelta>;
  constexpr int kThreads = Work::kThreads, kStride = Work::kStride;
  const DeltaShape& s = a.p.shape;
  const int head = blockIdx.y, key_head = head / a.group, begin = blockIdx.x * kColumns,
            width = min(kColumns, s.value - begin), tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  const ShortMemory m(memory, a.padded);
  Work work(m, a);
  const Ring ring = ring_of(a, item.slot);
  float* ring_keys = ring.keys + (size_t)key_head * kRing * s.key;
  double* ring_totals = ring.totals + (size_t)head * kRing;
  float* ring_deltas = ring.deltas + (size_t)head * kRing * s.value + begin;
  const HeadState<kColumns, kStride> state{
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
  for (int position = item.start; position < end;) {
    const int first = position - at, count = min(at + kChunkRows, end) - position, place = at % kRing;
    const int row = item.row + position - item.start;
    work.take(first, count, first);
    load_rows(m.keys, a.stride, ring_keys + (size_t)place * s.key, s.key, first, s.key, a.padded, a.aligned);
    load_rows(m.deltas, kStride, ring_deltas + (size_t)place * s.value, s.value, first, width, kColumns, a.aligned);
    load_rows(m.deltas + first * kStride, kStride, a.p.x + (size_t)row * a.width + a.v_at + head * s.value + begin,
              a.width, count, width, kColumns, a.aligned);
    work.clear_deltas_behind();
    for (int j = tid; j < first; j += kThreads) m.totals[j] = ring_totals[place + j];
    for (int i = warp; i < 2 * count; i += kThreads / 32) {
      const int r = i / 2, part = i % 2;  // 0: the key
      take_head<kDelta>(a.p.x + (size_t)(row + r) * a.width + (part ? a.q_at : a.k_at) + key_head * s.key, s.key,
                        a.padded, part ? __fdiv_rn(1.0f, sqrtf((float)s.key)) : 1.0f,
                        part ? m.queries + r * a.stride : m.keys + (first + r) * a.stride);
    }
    if (tid == 0) {
      double total = first ? ring_totals[place + first - 1] : 0.0;
      for (int r = 0; r < count; r++) {
        const float* gates = gates_of<kDelta>(a.p, row + r);
        const double dt = step_of<kDelta>(a.p, gates, head);
        m.totals[first + r] = total = __dadd_rn(total, decay_of(a.p, dt, head));
        m.shrunk[first + r] = decay_between(total, 0.0);
        m.betas[first + r] = kDelta ? beta_of(a.p, gates, head) : (float)dt;
      }
    }
    wait_rows();
    if (!kDelta) work.scale_deltas();
    if (first + count == kChunkRows) work.grow();
    constexpr int kTiles = Work::kParts;  // of 8 columns
    for (int j0 = warp * 2 * kBlock; j0 < first + count; j0 += kThreads / 16 * kBlock) {
      float sums[kTiles][2][4] = {};
#pragma unroll 4
      for (int c = 0; c < a.padded; c += 8)
        multiply_keys(sums, m.keys + j0 * a.stride + c, a.stride, [&](int n, int half) {
          const float* right = n == kTiles - 1 ? m.queries : m.keys + first * a.stride;
          return right[lane / 4 * a.stride + c + lane % 4 + half * 4];
        });
#pragma unroll
      for (int n = 0; n < kTiles; n++)
#pragma unroll
        for (int u = 0; u < 8; u++) {
          const int r = lane % 4 * 2 + u % 2, i = first + r, j = j0 + lane / 4 + u / 2 * 8;
          if (r < count)
            m.pairs[((kDelta ? n : 1) * kShortRows + r) * kPairs + j] =
                j > i ? 0.0f : __fmul_rn(decay_between(m.totals[i], m.totals[j]), sums[n][u / 4][u % 4]);
        }
    }
    work.answer();
    __syncthreads();
    work.substitute();
    if (work.part == 1)
      work.each_row(
          [&](int i, const float4& four) { put_values<kDelta>(a, head, begin + work.value, row + i - first, four); });
    __syncthreads();
    if (at >= kept) {
      work.keep_deltas(ring_deltas + (size_t)place * s.value, s.value, width);
      if (blockIdx.x == 0) {
        if (tid < count) ring_totals[place + first + tid] = m.totals[first + tid];
        if (head % a.group == 0)
          for (int n = tid; n < count * s.key; n += kThreads) {
            const int j = first + n / s.key, c = n % s.key;
            ring_keys[(size_t)(place + j) * s.key + c] = m.keys[j * a.stride + c];
          }
      }
    }
    position += count;
    if (first + count == kChunkRows && (position < end || at + kChunkRows <= kept)) advance();
    __syncthreads();
  }
  if (item.start == 0 && kept == 0) state.clear();
}

// A CTA for every head and 64 of its values, and every eighth item or so. alone: no one_row_kernel() runs before it.
template <bool kDelta>
__global__ void __launch_bounds__(ShortWork<kDelta>::kThreads) rows_kernel(DeltaArgs a, StateRows rows, bool alone) {
  extern __shared__ __align__(16) float memory[];
  let_next_begin();
  for (int z0 = blockIdx.z; z0 < rows.short_items; z0 += 32 * gridDim.z) {
    const int own = z0 + threadIdx.x % 32 * gridDim.z;  // a lane's item
    const StateItem item = own < rows.short_items ? rows.items[own] : StateItem{-1, 0, 0, 0, 0, 0, 0};
    for (unsigned left = __ballot_sync(~0u, item.slot >= 0 && (alone || !is_one_row(item))); left; left &= left - 1) {
      const StateItem each = rows.items[z0 + (__ffs(left) - 1) * gridDim.z];
      if (is_one_row(each)) one_row<kDelta, true>(a, each, blockIdx.y, 1, kColumns / 32, blockIdx.x * kColumns, memory);
      else await_previous(), several_rows<kDelta>(a, each, memory);
    }
  }
  await_previous();  // also without items: the next kernel may not begin before the previous one has ended
}

}  // namespace

template <bool kDelta>
void delta_rows(const DeltaArgs& a, const StateRows& rows, const Queue& queue) {
  const DeltaShape& s = a.p.shape;
  const int count = rows.short_items, parts = ceil_div(s.value, kColumns), sms = sm_count();
  // Where all CTAs of rows_kernel() run at once, another launch would take longer than it gains.
  const bool alone = parts * s.heads * count <= 3 * sms;
  if (!alone) {
    const int each = std::min(ceil_div(s.value, 32), 4), of_head = ceil_div(s.value, 32 * each);
    int heads = 1;  // of a CTA: the more, the fewer CTAs read the same keys
    while (a.group % (2 * heads) == 0 && 2 * heads * each <= kMostWarps &&
           of_head * s.heads * count / (2 * heads) >= 3 * sms)
      heads *= 2;
    start(queue, one_row_kernel<kDelta>, dim3(of_head, s.heads / heads, count), 32 * (heads * each + kKeyWarps),
          OneRowMemory::bytes(heads, a.stride), a, rows, heads, each);
  }
  start(queue, rows_kernel<kDelta>, dim3(parts, s.heads, alone ? count : std::min(count, kMostItems)),
        ShortWork<kDelta>::kThreads, ShortMemory::bytes(a.padded), a, rows, alone);
}
template void delta_rows<true>(const DeltaArgs&, const StateRows&, const Queue&);
template void delta_rows<false>(const DeltaArgs&, const StateRows&, const Queue&);

}  // namespace recurrent
}  // namespace as::cuda
