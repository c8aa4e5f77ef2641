// A message to ranks of experts is written to the host's memory by many CTAs; the last one that ends says that it is
// there. The sums are read once every rank has answered. Kernels count messages in the GPU's memory, so recorded graphs
// need nothing from the host.
#include "cuda/kernels/moe/dispatch.h"

#include <algorithm>

#include "cuda/kernels/common/device.cuh"

namespace as::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kSenders = 32;    // CTAs that write to the host
constexpr int kReceivers = 64;  // that poll the host's flags
constexpr int kLooks = 64;      // polls between two reads of the clock

__device__ uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

__device__ bool has_come(const uint32_t* flag, uint32_t message) {
  uint32_t seen;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
  return (int32_t)(seen - message) >= 0;
}

// The host has written these values while this kernel ran.
__device__ float read_host(const float* from) {
  float value;
  asm volatile("ld.relaxed.sys.global.f32 %0, [%1];" : "=f"(value) : "l"(from) : "memory");
  return value;
}

__device__ float4 read_host4(const float* from) {
  float4 v;
  asm volatile("ld.relaxed.sys.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(from)
               : "memory");
  return v;
}

// The last CTA that has written its part of a message says that it is there.
__device__ void end_message(const ExpertMemory& m, const SentLayer& layer, bool entries) {
  __threadfence_system();
  __syncthreads();
  MessageState& state = *m.local;
  if (threadIdx.x || atomicAdd(&state.ended, 1) != gridDim.x - 1) return;
  __threadfence_system();
  const int there = layer.counts[layer.of_outputs], outputs = layer.counts[1];
  const uint32_t message = state.messages + 1;
  state.ended = 0, state.messages = message, state.rows = (uint32_t)there;
  asm volatile("st.relaxed.sys.global.v4.s32 [%0], {%1, %2, %3, %4};" ::"l"(m.latest), "r"(layer.number), "r"(there),
               "r"(outputs), "r"((int)entries)
               : "memory");
  state.sent_at = nanoseconds();
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(m.sent), "r"(message) : "memory");
}

__global__ void __launch_bounds__(kThreads)
    dispatch_kernel(const __grid_constant__ ExpertMemory m, const float* x, int width, Routing routing,
                    HotExpertsOfLayer hot, SentLayer layer, int rows) {
  after_previous();
  const size_t first = blockIdx.x * (size_t)kThreads + threadIdx.x, stride = gridDim.x * (size_t)kThreads;
  const size_t values = (size_t)rows * width, entries = (size_t)rows * routing.top;
  if (width % 4 == 0)
    for (size_t i = first; i < values / 4; i += stride)
      reinterpret_cast<float4*>(m.rows)[i] = reinterpret_cast<const float4*>(x)[i];
  else
    for (size_t i = first; i < values; i += stride) m.rows[i] = x[i];
  for (size_t i = first; i < entries; i += stride) {
    int expert = routing.entry_of[i];
    if (hot.hot && expert >= 0) {
      atomicAdd(hot.uses + expert, 1u);
      if (hot.hot[expert]) {
        atomicAdd(hot.hits, 1ull);
        expert = -1;
      }
    }
    m.chosen[i] = expert, m.shares[i] = routing.shares[i];
  }
  end_message(m, layer, false);
}

__device__ bool is_of_ranks(const MetEntries& met, int expert) {
  return expert >= 0 && met.by_ranks.has(expert) && !(met.hot && met.hot[expert]);
}

// A warp writes a row. Rows that no rank reads keep what an earlier message had.
__global__ void __launch_bounds__(kThreads)
    dispatch_part_kernel(const __grid_constant__ ExpertMemory m, const float* x, int width,
                         const __grid_constant__ MetEntries met, SentLayer layer, int rows) {
  after_previous();
  const int lane = threadIdx.x % 32, warps = gridDim.x * (kThreads / 32);
  for (int row = blockIdx.x * (kThreads / 32) + threadIdx.x / 32; row < rows; row += warps) {
    bool sent = false;
    if (lane < met.top) {
      const size_t at = (size_t)row * met.top + lane;
      const int expert = met.chosen[at];
      sent = is_of_ranks(met, expert);
      m.chosen[at] = sent ? expert : -1, m.shares[at] = met.shares[at];
    }
    if (!__any_sync(~0u, sent)) continue;
    const float* from = x + (size_t)row * width;
    float* to = m.rows + (size_t)row * width;
    if (width % 4 == 0)
      for (int i = lane; i < width / 4; i += 32)
        reinterpret_cast<float4*>(to)[i] = reinterpret_cast<const float4*>(from)[i];
    else
      for (int i = lane; i < width; i += 32) to[i] = from[i];
  }
  end_message(m, layer, true);
}

// Once a rank has missed the time limit, all waits end at once. The results are then useless, and the host reports it.
__device__ void await_rank(const ExpertMemory& m, int r, uint32_t message) {
  volatile uint32_t* given_up = &m.local->given_up;
  uint64_t began = 0;
  for (int looks = 1; !has_come(m.returned[r], message); looks++) {
    if (looks % kLooks) continue;
    const uint64_t now = nanoseconds();
    if (looks == kLooks) began = now;
    if (looks > (1 << 30)) looks = 2 * kLooks;
    if (*given_up) return;
    if (now - began <= m.limit) continue;
    *given_up = 1;
    *const_cast<volatile int*>(m.failed) = 1 + r;
    __threadfence_system();
    return;
  }
}

// Waits, by a CTA, until all ranks have answered the latest message. Returns its number of rows.
__device__ int await_ranks(const ExpertMemory& m) {
  after_previous();
  MessageState& state = *m.local;
  const int there = (int)state.rows;
  if (threadIdx.x < m.ranks) await_rank(m, threadIdx.x, state.messages);
  __syncthreads();
  if (!blockIdx.x && !threadIdx.x && state.sent_at) {
    state.waited_ns += nanoseconds() - state.sent_at, state.sent_at = 0;
    *const_cast<volatile uint64_t*>(m.waited) = state.waited_ns;
  }
  return there;
}

__global__ void __launch_bounds__(kThreads) count_kernel(const int* chosen, int entries, uint32_t* uses) {
  after_previous();
  for (int i = blockIdx.x * kThreads + threadIdx.x; i < entries; i += gridDim.x * kThreads)
    if (chosen[i] >= 0) atomicAdd(uses + chosen[i], 1u);
}

__global__ void await_kernel(const __grid_constant__ ExpertMemory m) { await_ranks(m); }

__global__ void __launch_bounds__(kThreads)
    returned_kernel(const __grid_constant__ ExpertMemory m, float* y, int width, int rows) {
  const int there = await_ranks(m);
  const size_t first = blockIdx.x * (size_t)kThreads + threadIdx.x, stride = gridDim.x * (size_t)kThreads;
  const size_t values = (size_t)rows * width, sent = (size_t)there * width;
  if (width % 4 == 0) {
    for (size_t i = first; i < values / 4; i += stride) {
      float4 sum = make_float4(0, 0, 0, 0);
      if (4 * i < sent) {
        sum = read_host4(m.sums[0] + 4 * i);
        for (int r = 1; r < m.ranks; r++) {
          const float4 next = read_host4(m.sums[r] + 4 * i);
          sum.x = __fadd_rn(sum.x, next.x), sum.y = __fadd_rn(sum.y, next.y);
          sum.z = __fadd_rn(sum.z, next.z), sum.w = __fadd_rn(sum.w, next.w);
        }
      }
      reinterpret_cast<float4*>(y)[i] = sum;
    }
    return;
  }
  for (size_t i = first; i < values; i += stride) {
    float sum = i < sent ? read_host(m.sums[0] + i) : 0.0f;
    for (int r = 1; r < m.ranks && i < sent; r++) sum = __fadd_rn(sum, read_host(m.sums[r] + i));
    y[i] = sum;
  }
}

// As many adjacent values of a rank's entry, in the host's memory.
template <int kWide>
__device__ void read_entry(const float* from, float (&to)[kWide]) {
  if constexpr (kWide == 4) {
    const float4 v = read_host4(from);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  } else {
    to[0] = read_host(from);
  }
}

template <int kWide>
__global__ void __launch_bounds__(kThreads)
    returned_entries_kernel(const __grid_constant__ ExpertMemory m, const __grid_constant__ MetEntries met, float* y,
                            int width, int rows) {
  const int there = await_ranks(m);
  const size_t first = blockIdx.x * (size_t)kThreads + threadIdx.x, stride = gridDim.x * (size_t)kThreads;
  for (size_t i = first; i < (size_t)rows * width / kWide; i += stride) {
    const int row = (int)(i * kWide / width), column = (int)(i * kWide % width);
    float sum[kWide] = {};
    for (int r = 0; r < m.ranks && row < there; r++) {
      const MetEntries::Rank& rank = met.ranks[r];
      float own[kWide] = {};
#pragma unroll 4
      for (int j = 0; j < met.top; j++) {
        const size_t at = (size_t)row * met.top + j;
        const int expert = met.chosen[at];
        if (expert < rank.begin || expert >= rank.end) continue;
        float value[kWide];
        if (is_of_ranks(met, expert)) {
          read_entry(m.sums[r] + at * width + column, value);
        } else {
          const float* from = rank.entries + (size_t)rank.entry_of[at] * width + column;
#pragma unroll
          for (int k = 0; k < kWide; k++) value[k] = from[k];
        }
#pragma unroll
        for (int k = 0; k < kWide; k++) own[k] = __fmaf_rn(value[k], met.shares[at], own[k]);
      }
#pragma unroll
      for (int k = 0; k < kWide; k++) sum[k] = r ? __fadd_rn(sum[k], own[k]) : own[k];
    }
#pragma unroll
    for (int k = 0; k < kWide; k++) y[i * kWide + k] = sum[k];
  }
}

int ctas(int rows, int width, int most) {
  return std::clamp(ceil_div((int)std::min<int64_t>((int64_t)rows * width, 1 << 24), 4 * kThreads), 1, most);
}

}  // namespace

void dispatch_rows(const ExpertMemory& memory, const float* x, int width, const Routing& routing,
                   const HotExpertsOfLayer& hot, const SentLayer& layer, int rows, const Queue& queue) {
  start(queue, dispatch_kernel, ctas(rows, width, kSenders), kThreads, 0, memory, x, width, routing, hot, layer, rows);
}

void dispatch_part(const ExpertMemory& memory, const float* x, int width, const MetEntries& met, const SentLayer& layer,
                   int rows, const Queue& queue) {
  start(queue, dispatch_part_kernel, ctas(rows, width, kSenders), kThreads, 0, memory, x, width, met, layer, rows);
}

void count_uses(const int* chosen, int entries, uint32_t* uses, const Queue& queue) {
  start(queue, count_kernel, std::min(ceil_div(entries, kThreads), kReceivers), kThreads, 0, chosen, entries, uses);
}

void await_ranks(const ExpertMemory& memory, const Queue& queue) { start(queue, await_kernel, 1, 32, 0, memory); }

void returned_sums(const ExpertMemory& memory, float* y, int width, int rows, const Queue& queue) {
  start(queue, returned_kernel, ctas(rows, width, kReceivers), kThreads, 0, memory, y, width, rows);
}

void returned_entries(const ExpertMemory& memory, const MetEntries& met, float* y, int width, int rows,
                      const Queue& queue) {
  const auto kernel = width % 4 ? returned_entries_kernel<1> : returned_entries_kernel<4>;
  start(queue, kernel, ctas(rows, width, kReceivers), kThreads, 0, memory, met, y, width, rows);
}

}  // namespace as::cuda
