// Sums over ranks, in rank order: every rank reads all partial sums out of the memory of the GPUs that they are of
// ("one-shot": with two ranks nothing moves less, and it waits once).
//
// Blocks go on once every rank has come to the same call, which means that its partial sums are there. That alone keeps
// the two buffers apart, too: who has come to call c + 1 has read all of call c, and writes its buffer for call c + 2.
// Calls are counted by how many steps came before, so that a recorded step needs nothing of the host.
#include <algorithm>

#include "cuda/kernels/device.cuh"

namespace as {
namespace cuda {
namespace {

constexpr int kThreads = 512, kEight = 8;
constexpr int kBlocks = 2;  // of threads, of a processor
constexpr int kLooks = 64;  // at a flag, between two at the clock

__device__ uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

__device__ void tell(uint32_t* flag, uint32_t call) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(call) : "memory");
}

__device__ bool has_come(const uint32_t* flag, uint32_t call) {
  uint32_t seen;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
  return (int32_t)(seen - call) >= 0;
}

// Says that this rank has come to a call, and waits for the others, each by a thread: for so long as a rank may take;
// once one has not come, for none. The sums are of no use then, and the host says so (Exchange::check_waits).
__device__ void meet(const Peers& p, uint32_t call) {
  const int r = threadIdx.x;
  if (r < p.world && r != p.rank) {
    if (blockIdx.x == 0) tell(p.flags[r] + p.rank, call);
    const uint32_t* flag = p.flags[p.rank] + r;
    volatile int* failed = p.failed;
    const uint64_t began = nanoseconds();
    for (int look = 1; !has_come(flag, call); look++) {
      if (look % kLooks) continue;
      if (*failed) break;
      if (nanoseconds() - began > p.limit) {
        *failed = 1 + r;
        __threadfence_system();
        break;
      }
    }
  }
  __syncthreads();
}

// Eight values of a row of floats from a column on; what is beyond its width is zero. kWhole: nothing is, and all is
// aligned. kShared: another GPU may have written them while this kernel ran, so not by the L1 cache.
template <bool kWhole, bool kShared = false>
__device__ void read_eight(const float* row, int column, int width, float (&x)[kEight]) {
  if constexpr (kWhole) {
    const float4* from = reinterpret_cast<const float4*>(row + column);
    const float4 low = kShared ? __ldcg(from) : from[0], high = kShared ? __ldcg(from + 1) : from[1];
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w, x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
  } else {
#pragma unroll
    for (int i = 0; i < kEight; i++)
      x[i] = column + i < width ? kShared ? __ldcg(row + column + i) : row[column + i] : 0.0f;
  }
}

// Eight columns of a row of a rank's partial sums, as they come.
template <bool kTiles, bool kWhole>
struct Eight;
template <bool kWhole>
struct Eight<true, kWhole> {
  uint4 pairs;

  __device__ void read(const char* partials, int row, int column, int width) {
    pairs = __ldcg(reinterpret_cast<const uint4*>(partials + 2 * tile_offset(row, column, blocks_of(width))));
  }
  __device__ void add_to(float (&sum)[kEight]) const {
    const uint32_t words[kEight / 2] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
    for (int i = 0; i < kEight; i++)
      sum[i] = __fadd_rn(sum[i], __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16));
  }
};
template <bool kWhole>
struct Eight<false, kWhole> {
  float values[kEight];

  __device__ void read(const char* partials, int row, int column, int width) {
    read_eight<kWhole, true>(reinterpret_cast<const float*>(partials) + (size_t)row * width, column, width, values);
  }
  __device__ void add_to(float (&sum)[kEight]) const {
#pragma unroll
    for (int i = 0; i < kEight; i++) sum[i] = __fadd_rn(sum[i], values[i]);
  }
};

// A block has a row at a time; a thread eight columns of it, and every so many further ones of rows beyond 4,096.
// kRanks: at most.
template <bool kTiles, int kRanks, bool kWhole>
__global__ void __launch_bounds__(kThreads, kRanks <= 4 ? kBlocks : 1)
    sum_kernel(const __grid_constant__ RankSum s, int rows) {
  const int width = s.y.width, first = kEight * threadIdx.x, stride = kEight * blockDim.x;
  const auto weights_of = [&](int column, float(&weights)[kEight]) {
    read_eight<kWhole>(s.norm.weight, column, width, weights);
    if (s.norm.unit_offset)
#pragma unroll
      for (int i = 0; i < kEight; i++) weights[i] += 1.0f;
  };
  let_next_begin();
  float weights[kEight];  // on their way while ranks are waited for
  if (s.norm.weight && first < width) weights_of(first, weights);
  await_previous();
  meet(s.peers, (uint32_t)*s.peers.step * s.calls + s.call + 1);
  const size_t half = s.call % 2 * s.peers.half;
  for (int row = blockIdx.x; row < rows; row += gridDim.x) {
    float* y = s.y.values + (size_t)row * width;
    float squares = 0, kept[kEight];
    for (int column = first; column < width; column += stride) {
      Eight<kTiles, kWhole> partials[kRanks];
#pragma unroll
      for (int r = 0; r < kRanks; r++)
        if (r < s.peers.world) partials[r].read(s.peers.partials[r] + half, row, column, width);
      float before[kEight], x[kEight] = {};
      if (s.adds) read_eight<kWhole>(y, column, width, before);
#pragma unroll
      for (int r = 0; r < kRanks; r++)
        if (r < s.peers.world) partials[r].add_to(x);
#pragma unroll
      for (int i = 0; i < kEight; i++) {
        if (s.adds) x[i] = __fadd_rn(before[i], x[i]);
        if (kWhole || column + i < width) squares = fmaf(x[i], x[i], squares);
        if (column == first) kept[i] = x[i];
      }
      put_eight(s.y, row, column, width, x);
    }
    if (!s.norm.weight) continue;
    const float factor = 1.0f / sqrtf(block_sum<kThreads>(squares, blockDim.x) / width + s.norm.eps);
    for (int column = first; column < width; column += stride) {
      if (column > first) read_eight<kWhole>(y, column, width, kept), weights_of(column, weights);
#pragma unroll
      for (int i = 0; i < kEight; i++) kept[i] = kept[i] * factor * weights[i];
      put_eight(s.normed, row, column, width, kept);
      if (column > first) weights_of(first, weights);
    }
  }
}

}  // namespace

void sum_ranks(const RankSum& sum, int rows, const Queue& queue) {
  const int threads = std::clamp(ceil_div(sum.y.width, 32 * kEight) * 32, 32, kThreads);
  const int blocks = std::clamp(rows, 1, kBlocks * processors());  // one to meet, whatever there is to add
  const bool whole = sum.y.width % kEight == 0;
  const auto choose = [&](auto few, auto some, auto many) {
    start(queue, sum.peers.world <= 2 ? few : sum.peers.world <= 4 ? some : many, blocks, threads, 0, sum, rows);
  };
  constexpr int kMost = kMostRanks;
  if (sum.bf16 && whole) choose(sum_kernel<true, 2, true>, sum_kernel<true, 4, true>, sum_kernel<true, kMost, true>);
  else if (sum.bf16) choose(sum_kernel<true, 2, false>, sum_kernel<true, 4, false>, sum_kernel<true, kMost, false>);
  else if (whole) choose(sum_kernel<false, 2, true>, sum_kernel<false, 4, true>, sum_kernel<false, kMost, true>);
  else choose(sum_kernel<false, 2, false>, sum_kernel<false, 4, false>, sum_kernel<false, kMost, false>);
  launched("sum over ranks");
}

}  // namespace cuda
}  // namespace as
