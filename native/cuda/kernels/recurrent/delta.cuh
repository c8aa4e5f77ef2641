// What the kernels of the gated delta rule share, and those of Mamba2's selective state space, which is that rule
// without a system to solve: B is the key, C the query, and a row's delta is dt x (docs/decisions/recurrent.md). All
// sums are of FMA products in float32 in one order, whatever kernel forms them: over the key's channels, and over the
// rows since the last multiple of 64, both ascending. The values of a head are independent, so CTAs may take any part
// of them.
#pragma once
#include "cuda/kernels/common/device.cuh"
#include "cuda/kernels/recurrent/recurrent.h"

namespace as::cuda {
namespace recurrent {

constexpr int kRing = 2 * kChunkRows, kBlock = 16;  // kBlock: rows of a chunk that are worked on together
constexpr float kLengthEps = 1e-6f;                 // added to the squared length of heads

struct DeltaArgs {
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
__device__ inline Ring ring_of(const DeltaArgs& a, int slot) {
  const DeltaShape& s = a.p.shape;
  Ring ring;
  ring.totals = a.p.pages.recent<double>(slot);
  ring.keys = reinterpret_cast<float*>(ring.totals + (size_t)s.heads * kRing);
  ring.deltas = ring.keys + (size_t)s.key_heads * kRing * s.key;
  return ring;
}

// The position of the state after the step.
__device__ inline int kept_of(const StateItem& item) {
  return (item.start + item.count - item.drafts) / kChunkRows * kChunkRows;
}

__device__ inline float decay_between(double later, double earlier) { return expf((float)(later - earlier)); }

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
__device__ inline double decay_of(const GatedDelta& p, double dt, int head) { return -exp((double)p.a_log[head]) * dt; }
__device__ inline float beta_of(const GatedDelta& p, const float* gates, int head) {
  return 1.0f / (1.0f + expf(-gates[p.shape.heads + head]));
}

// A warp divides a head by its length. to: with zeros up to `padded`; also: null, or another place without padding.
__device__ inline void normalize(const float* x, int n, int padded, float scale, float* to, float* also) {
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
__device__ inline void load_rows(float* to, int stride, const float* from, size_t pitch, int rows, int width,
                                 int padded, bool aligned) {
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

__device__ inline void wait_rows() {
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

// The short items of a step, row by row; and the long ones. kDelta: the gated delta rule; otherwise a state space.
template <bool kDelta>
void delta_rows(const DeltaArgs& a, const StateRows& rows, const Queue& queue);
template <bool kDelta>
void delta_chunks(const DeltaArgs& a, const StateRows& rows, const Queue& queue);

}  // namespace recurrent
}  // namespace as::cuda
