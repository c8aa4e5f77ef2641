// Routers, and grouping of entries by expert. Sums of entries: combine_experts.cu.
#include <algorithm>
#include <climits>

#include "cuda/kernels/gemm/gemm_small_n.cuh"
#include "cuda/kernels/moe/dispatch.h"
#include "cuda/kernels/moe/moe.h"
#include "cuda/kernels/moe/routing.cuh"

namespace as::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kGroupThreads = 1024;
constexpr int kFewRows = 32, kFewThreads = 512, kFewExperts = 256;  // limits of a step that one CTA routes

// A CTA sorts entries by expert, in any order within an expert. chosen: the entries' experts. shared: three numbers for
// each expert.
__device__ void group(const Routing& routing, const int* chosen, int entries, int tile_rows, int* shared) {
  const int experts = routing.end - routing.begin, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (entries == routing.top) {  // a single row: its experts are in order
    if (warp) return;
    const int expert = lane < entries ? chosen[lane] - routing.begin : -1;
    const bool own = expert >= 0 && expert < experts;
    const uint32_t all = __ballot_sync(0xffffffffu, own);
    const int entry = __popc(all & ((1u << lane) - 1));
    if (lane < entries) routing.entry_of[lane] = own ? entry : -1;
    if (own) routing.row_of[entry] = 0, routing.tiles[entry] = {expert, entry, 1};
    if (lane == 0) *routing.tile_count = __popc(all);
    return;
  }
  int *counts = shared, *next = shared + experts, *first_tile = shared + 2 * experts;
  const auto expert_of = [&](int entry) {
    const int expert = chosen[entry] - routing.begin;
    return expert < experts ? expert : -1;
  };
  for (int e = threadIdx.x; e < experts; e += blockDim.x) counts[e] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < entries; i += blockDim.x)
    if (const int expert = expert_of(i); expert >= 0) atomicAdd(&counts[expert], 1);
  __syncthreads();
  if (warp == 0) {
    int before = 0, tiles_before = 0;
    for (int begin = 0; begin < experts; begin += 32) {
      const int e = begin + lane, count = e < experts ? counts[e] : 0, tiles = (count + tile_rows - 1) / tile_rows;
      int up_to = count, tiles_up_to = tiles;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, up_to, step),
                  other_tiles = __shfl_up_sync(0xffffffffu, tiles_up_to, step);
        if (lane >= step) up_to += other, tiles_up_to += other_tiles;
      }
      if (e < experts) next[e] = before + up_to - count, first_tile[e] = tiles_before + tiles_up_to - tiles;
      before += __shfl_sync(0xffffffffu, up_to, 31), tiles_before += __shfl_sync(0xffffffffu, tiles_up_to, 31);
    }
    if (lane == 0) *routing.tile_count = tiles_before;
  }
  __syncthreads();
  for (int e = warp; e < experts; e += blockDim.x / 32) {
    const int count = counts[e], first = next[e];
    for (int i = lane; i * tile_rows < count; i += 32)
      routing.tiles[first_tile[e] + i] = {e, first + i * tile_rows, min(tile_rows, count - i * tile_rows)};
  }
  __syncthreads();
  for (int i = threadIdx.x; i < entries; i += blockDim.x) {
    const int expert = expert_of(i), entry = expert >= 0 ? atomicAdd(&next[expert], 1) : -1;
    routing.entry_of[i] = entry;
    if (entry >= 0) routing.row_of[entry] = i / routing.top;
  }
}

__global__ void __launch_bounds__(kThreads)
    route_kernel(const float* logits, Router router, Routing routing, const int* where, int rows) {
  extern __shared__ float scores[];
  after_previous();
  const int warp = threadIdx.x / 32, row = blockIdx.x * (kThreads / 32) + warp;
  float* own = scores + warp * 2 * router.experts;
  if (row < rows)
    route_row(logits + (size_t)row * router.experts, router, routing.top, !where || where[row] >= 0, own,
              routing.entry_of + (size_t)row * routing.top, routing.shares + (size_t)row * routing.top);
}

// entry_of holds the experts of the entries, and receives the entries.
__global__ void __launch_bounds__(kGroupThreads) group_kernel(Routing routing, int entries, int tile_rows) {
  extern __shared__ int numbers[];
  after_previous();
  group(routing, routing.entry_of, entries, tile_rows, numbers);
}

// Few rows: a CTA for each expert computes its logits. The last CTA to end routes all rows and groups their entries.
template <bool kWhole>
__global__ void __launch_bounds__(kFewThreads)
    route_few_kernel(const __grid_constant__ GemmArgs logits, Router router, Routing routing, const int* where,
                     int rows, int tile_rows) {
  extern __shared__ __align__(16) float shared[];
  __shared__ int chosen[kFewRows * kMaxTop];
  __shared__ bool last, there[kFewRows];
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32, expert = blockIdx.x;
  let_next_begin();
  // Weights are copied before the previous kernel has written the rows.
  bring_rows<kWhole>(logits.w, expert, 1, shared);
  await_previous();
  if (threadIdx.x < rows) there[threadIdx.x] = !where || where[threadIdx.x] >= 0;
  __syncthreads();
  for (int row = warp; row < rows; row += warps) {
    float sum[1][1];
    multiply_rows<1, 1, kWhole>(logits.x.values + (size_t)row * logits.w.k, 1, shared, logits.w.k, sum);
    if (threadIdx.x % 32 == 0)
      logits.y.values[(size_t)row * router.experts + expert] =
          logits.bias ? __fadd_rn(sum[0][0], logits.bias[expert]) : sum[0][0];
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(routing.ended, 1) == gridDim.x - 1;
    if (last) *routing.ended = 0;
  }
  __syncthreads();
  if (!last) return;
  float* own = shared + warp * 2 * router.experts;
  for (int row = warp; row < rows; row += warps)
    route_row(logits.y.values + (size_t)row * router.experts, router, routing.top, there[row], own,
              chosen + row * routing.top, routing.shares + (size_t)row * routing.top);
  __syncthreads();
  group(routing, chosen, rows * routing.top, tile_rows, reinterpret_cast<int*>(shared));
}

__global__ void __launch_bounds__(kThreads) sigmoid_mul_kernel(float* x, const float* gate, int width) {
  after_previous();
  const int row = blockIdx.y, column = blockIdx.x * kThreads + threadIdx.x;
  if (column < width) x[(size_t)row * width + column] *= 1.0f / (1.0f + expf(-gate[row]));
}

int max_tiles(int entries, int experts) {
  const int many = entries / 8 + experts;  // tiles have at least 8 rows
  return entries < many ? entries : many;
}

}  // namespace

size_t routing_bytes(int rows, int top, int experts) {
  const size_t entries = (size_t)rows * top;
  return 3 * round_up_256(entries * 4) + round_up_256(max_tiles((int)entries, experts) * sizeof(ExpertTile)) +
         2 * round_up_256(4);
}

void place_routing(char* memory, int rows, int experts, Routing& r) {
  const size_t entries = (size_t)rows * r.top;
  const auto take = [&](size_t bytes) {
    char* found = memory;
    memory += round_up_256(bytes);
    return found;
  };
  r.entry_of = reinterpret_cast<int*>(take(entries * 4)), r.shares = reinterpret_cast<float*>(take(entries * 4));
  r.row_of = reinterpret_cast<int*>(take(entries * 4));
  r.tiles = reinterpret_cast<ExpertTile*>(take(max_tiles((int)entries, experts) * sizeof(ExpertTile)));
  r.tile_count = reinterpret_cast<int*>(take(4)), r.ended = reinterpret_cast<int*>(take(4));
}

void group_entries(const Routing& routing, int rows, int tile_rows, const Queue& queue) {
  start(queue, group_kernel, 1, kGroupThreads, (routing.end - routing.begin) * 3 * sizeof(int), routing,
        rows * routing.top, tile_rows);
}

void choose_experts(const float* logits, const Router& router, const Routing& routing, const int* where, int rows,
                    const Queue& queue) {
  constexpr int kWarps = kThreads / 32;
  const size_t shared = kWarps * 2 * router.experts * sizeof(float);
  start(queue, route_kernel, ceil_div(rows, kWarps), kThreads, shared, logits, router, routing, where, rows);
}

void route(const float* logits, const Router& router, const Routing& routing, const int* where, int rows, int tile_rows,
           const Queue& queue) {
  choose_experts(logits, router, routing, where, rows, queue);
  group_entries(routing, rows, tile_rows, queue);
}

void route(const GemmArgs& logits, const Router& router, const Routing& routing, const int* where, int rows,
           int tile_rows, const Queue& queue) {
  if (rows > kFewRows || router.experts > kFewExperts) {
    gemm_small_n(logits, rows, queue);
    return route(logits.y.values, router, routing, where, rows, tile_rows, queue);
  }
  const int warps = std::clamp(rows, 4, kFewThreads / 32);
  // Grouping needs three numbers for each expert, routing two for each warp and expert.
  const size_t shared = sizeof(float) * std::max(padded_columns(logits.w.k), 2 * warps * router.experts);
  const auto kernel = logits.w.k % kLaneColumns ? route_few_kernel<false> : route_few_kernel<true>;
  start(queue, kernel, router.experts, 32 * warps, shared, logits, router, routing, where, rows, tile_rows);
}

void sigmoid_mul(float* x, const float* gate, int rows, int width, const Queue& queue) {
  start(queue, sigmoid_mul_kernel, dim3(ceil_div(width, kThreads), rows), kThreads, 0, x, gate, width);
}

}  // namespace as::cuda
