// Short items (decode, drafts), row by row. An item of one row at which no state advances, as nearly all rows of decode
// are, has a kernel of its own: keys of the ring lie in shared memory, since threads of a warp form the products of 32
// rows, which are 512 bytes apart; the state does not, since a thread reads its column just once, with many loads under
// way.
#include <algorithm>

#include "cuda/kernels/recurrent/delta.cuh"

namespace as::cuda {
namespace recurrent {
namespace {

// kAhead: loads of a thread that are under way. More would take more instructions, which each launch fetches anew.
constexpr int kOneRowThreads = 256, kAhead = 16;

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

// Whether one_row() computes an item.
__device__ bool is_one_row(const StateItem& item) {
  const int at = item.start / kChunkRows * kChunkRows;
  return item.slot >= 0 && item.count == 1 && item.start > 0 && item.position == at && kept_of(item) <= at;
}

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

// A CTA computes an item's only row: `heads` heads of one key head from first_head on, `each` threads of each, for the
// values from `begin` on.
template <bool kDelta>
__device__ void one_row(const DeltaArgs& a, const StateItem& item, int first_head, int heads, int each, int begin,
                        float* memory) {
  const DeltaShape& s = a.p.shape;
  const int tid = threadIdx.x, h = tid / each, d = begin + tid % each, head = first_head + h;
  const int key_head = first_head / a.group, at = item.position, i = item.start - at, place = at % kRing;
  const bool there = h < heads && d < s.value;  // has a value
  const OneRowMemory m(memory, heads, a.stride);
  const Ring ring = ring_of(a, item.slot);
  float* ring_keys = ring.keys + ((size_t)key_head * kRing + place) * s.key;
  float* column = a.p.pages.state<float>(item.slot) + (size_t)head * s.key * s.value + d;
  float* deltas = ring.deltas + ((size_t)head * kRing + place) * s.value + d;
  float *x = a.p.x + (size_t)item.row * a.width, *own = m.keys + i * a.stride;
  const float* gates = gates_of<kDelta>(a.p, item.row);

  float ahead[kAhead];
#pragma unroll
  for (int u = 0; u < kAhead; u++) ahead[u] = there && u < s.key ? column[u * s.value] : 0.0f;
  const float v = there ? x[a.v_at + head * s.value + d] : 0.0f, beta = kDelta && there ? beta_of(a.p, gates, head) : 0;
  load_rows(m.keys, a.stride, ring_keys, s.key, i, s.key, a.padded, a.aligned);
  commit_copies();
  for (int n = tid; n < heads * i; n += blockDim.x)
    m.totals[n / i * kChunkRows + n % i] = ring.totals[(size_t)(first_head + n / i) * kRing + place + n % i];
  for (int task = tid / 32; task < 3; task += blockDim.x / 32) {
    if (task == 0) take_head<kDelta>(x + a.k_at + key_head * s.key, s.key, a.padded, 1.0f, own, false);
    if (task == 1)
      take_head<kDelta>(x + a.q_at + key_head * s.key, s.key, a.padded, __fdiv_rn(1.0f, sqrtf((float)s.key)), m.query,
                        false);
    if (const int n = tid % 32; task == 2 && n < heads) {
      const double before = i ? ring.totals[(size_t)(first_head + n) * kRing + place + i - 1] : 0.0;
      const double dt = step_of<kDelta>(a.p, gates, first_head + n);
      m.totals[n * kChunkRows + i] = __dadd_rn(before, decay_of(a.p, dt, first_head + n));
      if (!kDelta) m.k_weights[n * kChunkRows + i] = (float)dt;
    }
  }
  wait_rows();
  for (int n = tid; n < 2 * kChunkRows; n += blockDim.x) {
    const int j = n % kChunkRows;
    const bool asks = n >= kChunkRows;  // with the query
    if (j > i || (!kDelta && !asks)) continue;
    const float sum = dot(m.keys + j * a.stride, asks ? m.query : own, s.key, a.padded, true);
    for (int g = 0; g < heads; g++) {
      const double* totals = m.totals + g * kChunkRows;
      (asks ? m.q_weights : m.k_weights)[g * kChunkRows + j] = __fmul_rn(decay_between(totals[i], totals[j]), sum);
    }
  }
  __syncthreads();
  if (there) {
    float known = 0, out = 0;  // what the state and the rows since answer to the key and to the query
#pragma unroll 1
    for (int c0 = 0; c0 < a.padded; c0 += kAhead) {
      const bool last = c0 + kAhead >= a.padded;
      const float* next = last ? deltas : column + (size_t)(c0 + kAhead) * s.value;
      const int count = last ? i : s.key - c0 - kAhead;
#pragma unroll
      for (int u = 0; u < kAhead; u += 4) {
        if (c0 + u < a.padded) {
          const float4 q = *reinterpret_cast<const float4*>(m.query + c0 + u);
          const float4 k = kDelta ? *reinterpret_cast<const float4*>(own + c0 + u) : make_float4(0, 0, 0, 0);
#pragma unroll
          for (int n = 0; n < 4; n++) {
            if (kDelta) known = fmaf(part_of(k, n), ahead[u + n], known);
            out = fmaf(part_of(q, n), ahead[u + n], out);
          }
        }
#pragma unroll
        for (int n = u; n < u + 4; n++) ahead[n] = n < count ? next[n * s.value] : 0.0f;
      }
    }
    const float *k_weights = m.k_weights + h * kChunkRows, *q_weights = m.q_weights + h * kChunkRows;
    const float shrunk = decay_between(m.totals[h * kChunkRows + i], 0.0);
    known = __fmul_rn(shrunk, known), out = __fmul_rn(shrunk, out);
#pragma unroll 1
    for (int j0 = 0; j0 < i; j0 += kAhead)
#pragma unroll
      for (int u = 0; u < kAhead; u++) {
        if (j0 + u < i) {
          if (kDelta) known = fmaf(k_weights[j0 + u], ahead[u], known);
          out = fmaf(q_weights[j0 + u], ahead[u], out);
        }
        ahead[u] = j0 + kAhead + u < i ? deltas[(j0 + kAhead + u) * s.value] : 0.0f;
      }
    const float delta = kDelta ? __fmul_rn(beta, __fsub_rn(v, known)) : __fmul_rn(k_weights[i], v);
    deltas[i * s.value] = delta;
    out = fmaf(q_weights[i], delta, out);
    a.p.y[(size_t)item.row * s.heads * s.value + head * s.value + d] = kDelta ? out : fmaf(a.p.skip[head], v, out);
  }
  if (begin == 0) {
    if (tid < heads) ring.totals[(size_t)(first_head + tid) * kRing + place + i] = m.totals[tid * kChunkRows + i];
    if (first_head % a.group == 0)
      for (int c = tid; c < s.key; c += blockDim.x) ring_keys[(size_t)i * s.key + c] = own[c];
  }
}

// A CTA for each item, `heads` heads, and as many of their values as it has threads for a head.
template <bool kDelta>
__global__ void __launch_bounds__(kOneRowThreads, 4) one_row_kernel(DeltaArgs a, StateRows rows, int heads) {
  extern __shared__ __align__(16) float memory[];
  after_previous();
  const StateItem item = rows.items[blockIdx.z];
  const int each = blockDim.x / heads;
  if (is_one_row(item)) one_row<kDelta>(a, item, blockIdx.y * heads, heads, each, blockIdx.x * each, memory);
}

constexpr int kColumns = 64, kRowThreads = 128, kMostItems = 8;

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

// A CTA computes 64 values of a head: an item's rows one after the other. Half of the threads form the sums of the key,
// half those of the query. A state space needs no sums of the key; k_weights holds its rows' steps then.
template <bool kDelta>
__device__ void several_rows(const DeltaArgs& a, const StateItem& item, float* memory) {
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

// A CTA for every head and 64 of its values, and every eighth item or so. alone: no one_row_kernel() runs before it.
template <bool kDelta>
__global__ void __launch_bounds__(kRowThreads) rows_kernel(DeltaArgs a, StateRows rows, bool alone) {
  extern __shared__ __align__(16) float memory[];
  after_previous();
  for (int z0 = blockIdx.z; z0 < rows.short_items; z0 += 32 * gridDim.z) {
    const int own = z0 + threadIdx.x % 32 * gridDim.z;  // a lane's item
    const StateItem item = own < rows.short_items ? rows.items[own] : StateItem{-1, 0, 0, 0, 0, 0};
    for (unsigned left = __ballot_sync(~0u, item.slot >= 0 && (alone || !is_one_row(item))); left; left &= left - 1)
      several_rows<kDelta>(a, rows.items[z0 + (__ffs(left) - 1) * gridDim.z], memory);
  }
}

}  // namespace

template <bool kDelta>
void delta_rows(const DeltaArgs& a, const StateRows& rows, const Queue& queue) {
  const DeltaShape& s = a.p.shape;
  const int count = rows.short_items, parts = ceil_div(s.value, kColumns), sms = sm_count();
  // Where all CTAs of rows_kernel() run at once, another launch would take longer than it gains.
  const bool alone = parts * s.heads * count <= 3 * sms;
  if (!alone) {
    const int each = std::min(ceil_div(s.value, 32) * 32, kRowThreads), of_head = ceil_div(s.value, each);
    int heads = 1;  // of a CTA: the more, the fewer CTAs read the same keys
    while (a.group % (2 * heads) == 0 && 2 * heads * each <= kOneRowThreads &&
           of_head * s.heads * count / (2 * heads) >= 3 * sms)
      heads *= 2;
    start(queue, one_row_kernel<kDelta>, dim3(of_head, s.heads / heads, count), heads * each,
          OneRowMemory::bytes(heads, a.stride), a, rows, heads);
  }
  start(queue, rows_kernel<kDelta>, dim3(parts, s.heads, alone ? count : std::min(count, kMostItems)), kRowThreads,
        RowMemory::bytes(a.padded), a, rows, alone);
}
template void delta_rows<true>(const DeltaArgs&, const StateRows&, const Queue&);
template void delta_rows<false>(const DeltaArgs&, const StateRows&, const Queue&);

}  // namespace recurrent
}  // namespace as::cuda
