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
constexpr int kOneGroups = 4096, kSlice = 2048, kSliceThreads = 512;  // most entries that one CTA groups; slices
constexpr int kGroupedAtOnce = 2048;  // most entries that a CTA groups which has routed rows before
constexpr int kFewRows = 32, kFewThreads = 512, kFewExperts = 256;  // limits of a step that one CTA routes

// Calls visit(i, numbers[i]) for all entries, by all threads of a CTA, with several loads under way. A thread visits
// the same entries each time.
template <typename Visit>
__device__ __forceinline__ void visit_entries(const int* numbers, int entries, Visit visit) {
  constexpr int kAtOnce = 8;
  for (int begin = threadIdx.x; begin < entries; begin += kAtOnce * blockDim.x) {
    int found[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; j++)
      if (const int i = begin + j * blockDim.x; i < entries) found[j] = numbers[i];
#pragma unroll
    for (int j = 0; j < kAtOnce; j++)
      if (const int i = begin + j * blockDim.x; i < entries) visit(i, found[j]);
  }
}

// An entry's expert and its place among the expert's entries.
constexpr int kExpertBits = 10;
static_assert(kMaxExperts <= 1 << kExpertBits);
__device__ __forceinline__ int expert_of(int both) { return both & ((1 << kExpertBits) - 1); }
__device__ __forceinline__ int place_of(int both) { return both >> kExpertBits; }

// of: the numbers of the experts' entries, which become the first entries. Lists the tiles, if `lists`. By a CTA.
__device__ void begin_experts(const Routing& routing, int tile_rows, bool lists, int* of) {
  const int experts = routing.end - routing.begin, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __shared__ int of_warps[2][kGroupThreads / 32];  // entries and tiles
  // A thread has an expert: where its entries and its tiles begin.
  int before = 0, tiles_before = 0;
  for (int begin = 0; begin < experts; begin += blockDim.x) {
    const int e = begin + threadIdx.x, count = e < experts ? of[e] : 0, tiles = (count + tile_rows - 1) / tile_rows;
    int up_to = count, tiles_up_to = tiles;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, up_to, step),
                other_tiles = __shfl_up_sync(0xffffffffu, tiles_up_to, step);
      if (lane >= step) up_to += other, tiles_up_to += other_tiles;
    }
    if (lane == 31) of_warps[0][warp] = up_to, of_warps[1][warp] = tiles_up_to;
    __syncthreads();
    int first = before + up_to - count, first_tile = tiles_before + tiles_up_to - tiles;
    for (int i = 0; i < blockDim.x / 32; i++) {
      const int entries_there = of_warps[0][i], tiles_there = of_warps[1][i];
      if (i < warp) first += entries_there, first_tile += tiles_there;
      before += entries_there, tiles_before += tiles_there;
    }
    if (e < experts) of[e] = first;
    for (int i = 0; i < tiles && lists; i++)
      routing.tiles[first_tile + i] = {e, first + i * tile_rows, min(tile_rows, count - i * tile_rows)};
    __syncthreads();
  }
  if (threadIdx.x == 0 && lists) *routing.tile_count = tiles_before;
}

// A CTA sorts entries by expert, in any order within an expert. chosen: the entries' experts, which are overwritten.
// of: a number for each expert, in shared memory.
__device__ void group(const Routing& routing, int* chosen, int entries, int tile_rows, int* of) {
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
  for (int e = threadIdx.x; e < experts; e += blockDim.x) of[e] = 0;
  __syncthreads();
  visit_entries(chosen, entries, [&](int i, int expert) {
    expert -= routing.begin;
    chosen[i] = expert >= 0 && expert < experts ? expert | atomicAdd(&of[expert], 1) << kExpertBits : -1;
  });
  __syncthreads();
  begin_experts(routing, tile_rows, true, of);
  visit_entries(chosen, entries, [&](int i, int both) {
    const int entry = both >= 0 ? of[expert_of(both)] + place_of(both) : -1;
    routing.entry_of[i] = entry;
    if (entry >= 0) routing.row_of[entry] = i / routing.top;
  });
}

// Whether the calling CTA is the last one of the launch to come here. It sees what the others have written before.
__device__ bool is_last(const Routing& routing) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(routing.ended, 1) == gridDim.x * gridDim.y - 1;
    if (last) *routing.ended = 0;
  }
  __syncthreads();
  if (last) __threadfence();
  return last;
}

// A warp routes a row. groups: the last CTA to end groups the entries.
__global__ void __launch_bounds__(kThreads) route_kernel(const float* logits, Router router, Routing routing,
                                                         const int* where, int rows, bool groups, int tile_rows) {
  extern __shared__ float scores[];
  after_previous();
  const int warp = threadIdx.x / 32, row = blockIdx.x * (kThreads / 32) + warp;
  float* own = scores + warp * 2 * router.experts;
  if (row < rows)
    route_row(logits + (size_t)row * router.experts, router, routing.top, row, !where || where[row] >= 0, own,
              routing.entry_of + (size_t)row * routing.top, routing.shares + (size_t)row * routing.top);
  if (groups && is_last(routing))
    group(routing, routing.entry_of, rows * routing.top, tile_rows, reinterpret_cast<int*>(scores));
}

// entry_of holds the experts of the entries, and receives the entries.
__global__ void __launch_bounds__(kGroupThreads) group_kernel(Routing routing, int entries, int tile_rows) {
  extern __shared__ int numbers[];
  after_previous();
  group(routing, routing.entry_of, entries, tile_rows, numbers);
}

// The same of many entries, by CTAs with kSlice of them each. Counts them by expert:
__global__ void __launch_bounds__(kSliceThreads) count_kernel(Routing routing, int entries) {
  extern __shared__ int numbers[];
  after_previous();
  const int experts = routing.end - routing.begin, begin = blockIdx.x * kSlice + threadIdx.x;
  constexpr int kEach = kSlice / kSliceThreads;
  for (int e = threadIdx.x; e < experts; e += kSliceThreads) numbers[e] = 0;
  int expert[kEach], place[kEach];
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    const int at = begin + i * kSliceThreads;
    expert[i] = at < entries ? routing.entry_of[at] - routing.begin : -1;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kEach; i++)
    if (expert[i] >= 0 && expert[i] < experts) place[i] = atomicAdd(&numbers[expert[i]], 1);
  __syncthreads();
  for (int e = threadIdx.x; e < experts; e += kSliceThreads) routing.counts[blockIdx.x * experts + e] = numbers[e];
#pragma unroll
  for (int i = 0; i < kEach; i++)
    if (const int at = begin + i * kSliceThreads; at < entries)
      routing.entry_of[at] = expert[i] >= 0 && expert[i] < experts ? expert[i] | place[i] << kExpertBits : -1;
}
// Then places them.
__global__ void __launch_bounds__(kSliceThreads) place_kernel(Routing routing, int entries, int tile_rows) {
  extern __shared__ int numbers[];
  after_previous();
  const int experts = routing.end - routing.begin, begin = blockIdx.x * kSlice;
  int* const before = numbers + experts;  // entries in earlier slices
  for (int e = threadIdx.x; e < experts; e += kSliceThreads) {
    int all = 0, earlier = 0;
#pragma unroll 16
    for (int i = 0; i < gridDim.x; i++) {
      const int count = __ldcg(routing.counts + i * experts + e);
      all += count, earlier += i < blockIdx.x ? count : 0;
    }
    numbers[e] = all, before[e] = earlier;
  }
  __syncthreads();
  begin_experts(routing, tile_rows, blockIdx.x == 0, numbers);
  visit_entries(routing.entry_of + begin, min(kSlice, entries - begin), [&](int i, int both) {
    const int expert = expert_of(both), entry = both >= 0 ? numbers[expert] + before[expert] + place_of(both) : -1;
    routing.entry_of[begin + i] = entry;
    if (entry >= 0) routing.row_of[entry] = (begin + i) / routing.top;
  });
}

// Few rows: a CTA computes an expert's logits of `each` rows; where there are few experts, several CTAs share an
// expert's rows. The last CTA to end routes all rows and groups their entries.
template <bool kWhole>
__global__ void __launch_bounds__(kFewThreads)
    route_few_kernel(const __grid_constant__ GemmArgs logits, Router router, Routing routing, const int* where,
                     int rows, int each, int tile_rows) {
  extern __shared__ __align__(16) float shared[];
  __shared__ int chosen[kFewRows * kMaxTop];
  __shared__ bool there[kFewRows];
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32, expert = blockIdx.x;
  let_next_begin();
  // Weights are copied before the previous kernel has written the rows.
  bring_rows<kWhole>(logits.w, expert, 1, shared);
  await_previous();
  if (threadIdx.x < rows) there[threadIdx.x] = !where || where[threadIdx.x] >= 0;
  __syncthreads();
  const int begin = blockIdx.y * each, end = min(begin + each, rows);
  for (int row = begin + warp; row < end; row += warps) {
    float sum[1][1];
    multiply_rows<1, 1, kWhole>(logits.x.values + (size_t)row * logits.w.k, 1, shared, logits.w.k, sum);
    if (threadIdx.x % 32 == 0)
      logits.y.values[(size_t)row * router.experts + expert] =
          logits.bias ? __fadd_rn(sum[0][0], logits.bias[expert]) : sum[0][0];
  }
  if (!is_last(routing)) return;
  float* own = shared + warp * 2 * router.experts;
  for (int row = warp; row < rows; row += warps)
    route_row(logits.y.values + (size_t)row * router.experts, router, routing.top, row, there[row], own,
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

size_t slices_of(int entries) { return entries <= kOneGroups ? 0 : ceil_div(entries, kSlice); }

}  // namespace

size_t routing_bytes(int rows, int top, int experts) {
  const size_t entries = (size_t)rows * top;
  return 3 * round_up_256(entries * 4) + round_up_256(max_tiles((int)entries, experts) * sizeof(ExpertTile)) +
         2 * round_up_256(4) + round_up_256(slices_of((int)entries) * experts * sizeof(int));
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
  r.counts = reinterpret_cast<int*>(take(slices_of((int)entries) * experts * sizeof(int)));
}

void group_entries(const Routing& routing, int rows, int tile_rows, const Queue& queue) {
  const int entries = rows * routing.top, slices = (int)slices_of(entries);
  const size_t shared = (routing.end - routing.begin) * sizeof(int);
  if (!slices) return start(queue, group_kernel, 1, kGroupThreads, shared, routing, entries, tile_rows);
  start(queue, count_kernel, slices, kSliceThreads, shared, routing, entries);
  start(queue, place_kernel, slices, kSliceThreads, 2 * shared, routing, entries, tile_rows);
}

static void route_rows(const float* logits, const Router& router, const Routing& routing, const int* where, int rows,
                       bool groups, int tile_rows, const Queue& queue) {
  constexpr int kWarps = kThreads / 32;
  const size_t shared = kWarps * 2 * router.experts * sizeof(float);
  start(queue, route_kernel, ceil_div(rows, kWarps), kThreads, shared, logits, router, routing, where, rows, groups,
        tile_rows);
}

void choose_experts(const float* logits, const Router& router, const Routing& routing, const int* where, int rows,
                    const Queue& queue) {
  route_rows(logits, router, routing, where, rows, false, 0, queue);
}

void route(const float* logits, const Router& router, const Routing& routing, const int* where, int rows, int tile_rows,
           const Queue& queue) {
  const bool few = rows * routing.top <= kGroupedAtOnce;
  route_rows(logits, router, routing, where, rows, few, tile_rows, queue);
  if (!few) group_entries(routing, rows, tile_rows, queue);
}

void route(const GemmArgs& logits, const Router& router, const Routing& routing, const int* where, int rows,
           int tile_rows, const Queue& queue) {
  if (rows > kFewRows || router.experts > kFewExperts) {
    gemm_small_n(logits, rows, queue);
    return route(logits.y.values, router, routing, where, rows, tile_rows, queue);
  }
  const int warps = std::clamp(rows, 4, kFewThreads / 32);
  // Grouping needs a number for each expert, routing two for each warp and expert.
  const size_t shared = sizeof(float) * std::max(padded_columns(logits.w.k), 2 * warps * router.experts);
  const auto kernel = logits.w.k % kLaneColumns ? route_few_kernel<false> : route_few_kernel<true>;
  // An SM needs 4 us to read 32 rows of 2,880.
  const int parts = std::clamp(sm_count() / router.experts, 1, ceil_div(rows, 4)), each = ceil_div(rows, parts);
  start(queue, kernel, dim3(router.experts, ceil_div(rows, each)), 32 * warps, shared, logits, router, routing, where,
        rows, each, tile_rows);
}

void sigmoid_mul(float* x, const float* gate, int rows, int width, const Queue& queue) {
  start(queue, sigmoid_mul_kernel, dim3(ceil_div(width, kThreads), rows), kThreads, 0, x, gate, width);
}

}  // namespace as::cuda
