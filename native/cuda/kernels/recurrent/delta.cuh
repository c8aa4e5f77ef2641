// What the kernels of the gated delta rule share, and those of Mamba2's selective state space, which is that rule
// without a system to solve: B is the key, C the query, and a row's delta is dt x (docs/decisions/recurrent.md). Sums
// have one order, whatever kernel forms them: over the key's channels, and over the rows since the last multiple of 64,
// both ascending, by tensor cores in steps of 8 (tf32.cuh); but what a key takes from rows of its own 16 is of FMA
// products, one after the other. The values of a head are independent, so CTAs may take any part of them.
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
  int padded, stride;    // key dim in shared memory: with zeros up to a multiple of 8; floats of a row
  bool aligned;          // heads begin at multiples of 16 bytes
  double* totals;        // [rows, heads], of long items: decays since the chunk's begin
  // [rows, heads]: factors of a row's values; [rows, key heads, keys and queries, 64]: products with the chunk's keys
  float *betas, *weights;
  // With a decay for each channel, what weigh_kernel() makes of long items: `weights` of each head, with decays;
  // [rows, heads, key and query, padded], times the factors of the chunk's rows up to them; and of each chunk [heads,
  // 65, padded]: its keys times the factors of the rows behind them, and the decay of the whole chunk.
  float *weighed, *chunks;
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

// Whether an item is a row at which no state advances, which has kernels of its own.
__device__ inline bool is_one_row(const StateItem& item) {
  const int at = item.start / kChunkRows * kChunkRows;
  return item.slot >= 0 && item.count == 1 && item.start > 0 && item.position == at && kept_of(item) <= at;
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

// A head of a key or query in a warp's registers, with zeros behind its n channels.
struct LoadedHead {
  float x[kMostKeyDim / 32];

  __device__ void load(const float* from, int n) {
#pragma unroll
    for (int u = 0; u < kMostKeyDim / 32; u++) {
      const int c = threadIdx.x % 32 + 32 * u;
      x[u] = c < n ? from[c] : 0.0f;
    }
  }
  // Divides it by its length, and multiplies it by `scale`.
  __device__ void normalize(float scale, int n) {
    float sum = 0;
#pragma unroll
    for (int u = 0; u < kMostKeyDim / 32; u++)
      if ((int)threadIdx.x % 32 + 32 * u < n) sum = fmaf(x[u], x[u], sum);
    const float factor = __fdiv_rn(scale, sqrtf(warp_sum(sum) + kLengthEps));
#pragma unroll
    for (int u = 0; u < kMostKeyDim / 32; u++) x[u] = __fmul_rn(x[u], factor);
  }
  __device__ void store(float* to, int count) const {
#pragma unroll
    for (int u = 0; u < kMostKeyDim / 32; u++)
      if (const int c = threadIdx.x % 32 + 32 * u; c < count) to[c] = x[u];
  }
};

// A warp copies a head, with zeros up to `padded`; of the delta rule, it is divided by its length.
template <bool kDelta>
__device__ void take_head(const float* x, int n, int padded, float scale, float* to) {
  LoadedHead head;
  head.load(x, n);
  if (kDelta) head.normalize(scale, n);
  head.store(to, padded);
}

// Queues the copy of a matrix to shared memory by all threads of the CTA, with zeros in columns [width, padded).
__device__ inline void load_rows(float* to, int stride, const float* from, size_t pitch, int rows, int width,
                                 int padded, bool aligned) {
  if (aligned && width % 4 == 0) {
    const int lanes = padded > 64 ? 32 : padded > 32 ? 16 : 8;  // of a row
    for (int row = threadIdx.x / lanes; row < rows; row += blockDim.x / lanes)
      for (int c = threadIdx.x % lanes * 4; c < padded; c += lanes * 4)
        copy_16(shared_address(to + row * stride + c), from + (c < width ? row * pitch + c : 0), c < width);
  } else {
    for (int i = threadIdx.x; i < rows * padded; i += blockDim.x) {
      const int row = i / padded, c = i % padded;
      to[row * stride + c] = c < width ? from[row * pitch + c] : 0.0f;
    }
  }
}

// Queues the copy of one value of 8 bytes.
__device__ inline void copy_8(double* to, const double* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

__device__ inline void wait_rows() {
  commit_copies(), wait_copies<0>();
  __syncthreads();
}

// The state of kC of a head's columns between shared memory, kStride floats a row, and the slot's page.
template <int kC, int kStride>
struct HeadState {
  float *shared, *page;
  int key, value, width;  // width: columns that the head has

  __device__ void load(bool zero, int padded, bool aligned) const {
    if (!zero) load_rows(shared, kStride, page, value, key, width, kC, aligned);
    for (int i = (zero ? 0 : key * kC) + threadIdx.x; i < padded * kC; i += blockDim.x)
      shared[i / kC * kStride + i % kC] = 0;
  }
  __device__ void store() const {
    for (int i = threadIdx.x; i < key * kC; i += blockDim.x)
      if (const int c = i % kC; c < width) page[(size_t)(i / kC) * value + c] = shared[i / kC * kStride + c];
  }
  // Of a sequence that has begun and is not at a multiple yet.
  __device__ void clear() const {
    for (int i = threadIdx.x; i < key * kC; i += blockDim.x)
      if (const int c = i % kC; c < width) page[(size_t)(i / kC) * value + c] = 0;
  }
};

// The short items of a step, row by row; and the long ones. kDelta: the gated delta rule; otherwise a state space.
template <bool kDelta>
void delta_rows(const DeltaArgs& a, const StateRows& rows, const Queue& queue);
template <bool kDelta>
void delta_chunks(const DeltaArgs& a, const StateRows& rows, const Queue& queue);

// With a decay for each channel: all items of a step; of these, long ones, and single rows at which no state advances.
void channel_delta(const DeltaArgs& a, const StateRows& rows, const Queue& queue);
void channel_chunks(const DeltaArgs& a, const StateRows& rows, const Queue& queue);
void single_channel_rows(const DeltaArgs& a, const StateRows& rows, const Queue& queue);

}  // namespace recurrent
}  // namespace as::cuda
