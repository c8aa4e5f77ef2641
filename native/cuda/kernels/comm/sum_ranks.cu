// All-reduce in rank order. Every rank reads all partial sums ("one-shot": with two ranks nothing moves fewer bytes).
//
// Partial sums of many rows are read from the memory of the other ranks' GPUs. A CTA continues once every rank has
// reached the same call, which means that its partial sums are complete. This also protects the two buffers: a rank
// that has reached call c + 1 has read all of call c, and writes its buffer again for call c + 2. Calls are counted
// from the number of previous steps, so recorded graphs need nothing from the host.
//
// Partial sums of few rows are pushed to the other ranks' memory, by the GEMM that computes them or here. Every value
// signals its own arrival: a place that has not been written holds a marker, and the reader restores the marker. So
// there is only one transfer over the link to wait for. Two sets of places are used alternately. A rank that ends call
// c + 1 has read what the others pushed for that call. They pushed it after they had ended call c and restored the
// markers of everything they had read.
//
// Where GPUs do not reach each other, a CTA copies its rows of the partial sums to host memory, and waits until the CTA
// of the same number of every other rank has done so. Flags of CTAs protect the buffers as those of ranks do, because
// the first CTA takes part in every call.
#include <algorithm>
#include <type_traits>
#include <utility>

#include "cuda/kernels/comm/peer_waits.cuh"
#include "cuda/kernels/comm/sum_ranks.h"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace {

constexpr int kThreads = 512, kEight = 8;
constexpr int kBlocks = 2;  // CTAs of an SM

// Signals that this rank has reached a call, and waits for the others, each by one thread.
__device__ void meet(const Peers& p, uint32_t call) {
  const int r = threadIdx.x;
  if (r < p.world && r != p.rank) {
    if (blockIdx.x == 0) tell(p.flags[r] + p.rank, call);
    const uint32_t* flag = p.flags[p.rank] + r;
    Wait wait(p, PeerWait::sum);
    while (!has_come(flag, call) && wait.goes_on(r)) {}
  }
  __syncthreads();
}

// The same by host memory, for the CTAs of this number. Only kHostCtas CTAs poll it: more would delay one another.
__device__ void meet_by_host(const Peers& p, uint32_t call) {
  const int r = threadIdx.x;
  __threadfence_system();
  __syncthreads();  // the CTA's rows are there
  if (r == p.rank) tell(p.reached(r) + blockIdx.x, call);
  if (r < p.world && r != p.rank) {
    Wait wait(p, PeerWait::sum);
    while (!has_come(p.reached(r) + blockIdx.x, call) && wait.goes_on(r)) {}
  }
  __syncthreads();
}

// Reads eight values of a float32 row; those from `width` on are zero. kWhole: all exist and are aligned. kShared:
// another GPU may have written them while this kernel ran, so the L1 cache is bypassed.
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

// A bit for each of two values that is kNotYet.
__device__ uint32_t marks_in(uint32_t pair) { return ((pair & 0x7fff7fffu) + 0x00010001u) & pair & 0x80008000u; }
// Replaces such values, which are NaNs, by another NaN.
__device__ uint32_t without_marks(uint32_t pair) { return pair ^ marks_in(pair); }

// Eight columns of a row of a rank's partial sums, not converted.
template <bool kTiles, bool kWhole>
struct Eight;
template <bool kWhole>
struct Eight<true, kWhole> {
  uint4 pairs;

  __device__ void read(const char* partials, int row, int column, int width) {
    pairs = __ldcg(reinterpret_cast<const uint4*>(partials + 2 * tile_offset(row, column, blocks_of(width))));
  }
  static __device__ void copy(const char* from, char* to, int row, int column, int width) {
    const size_t at = 2 * tile_offset(row, column, blocks_of(width));
    *reinterpret_cast<uint4*>(to + at) = *reinterpret_cast<const uint4*>(from + at);
  }
  // Reads values that have been pushed, or markers.
  __device__ void look(const char* place, int row, int column, int width) {
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(pairs.x), "=r"(pairs.y), "=r"(pairs.z), "=r"(pairs.w)
                 : "l"(place + 2 * tile_offset(row, column, blocks_of(width)))
                 : "memory");
  }
  __device__ bool has_come() const {
    return !(marks_in(pairs.x) | marks_in(pairs.y) | marks_in(pairs.z) | marks_in(pairs.w));
  }
  __device__ void push(char* place, int row, int column, int width) const {
    put(place, row, column, width, without_marks(pairs.x), without_marks(pairs.y), without_marks(pairs.z),
        without_marks(pairs.w));
  }
  static __device__ void mark(char* place, int row, int column, int width) {
    put(place, row, column, width, ~0u, ~0u, ~0u, ~0u);
  }
  __device__ void add_to(float (&sum)[kEight]) const {
    const uint32_t words[kEight / 2] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
    for (int i = 0; i < kEight; i++) sum[i] = __fadd_rn(sum[i], i % 2 ? high_of(words[i / 2]) : low_of(words[i / 2]));
  }

 private:
  static __device__ void put(char* place, int row, int column, int width, uint32_t a, uint32_t b, uint32_t c,
                             uint32_t d) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(
                     place + 2 * tile_offset(row, column, blocks_of(width))),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
  }
};
template <bool kWhole>
struct Eight<false, kWhole> {
  float values[kEight];

  __device__ void read(const char* partials, int row, int column, int width) {
    read_eight<kWhole, true>(reinterpret_cast<const float*>(partials) + (size_t)row * width, column, width, values);
  }
  static __device__ void copy(const char* from, char* to, int row, int column, int width) {
    const float* own = reinterpret_cast<const float*>(from) + (size_t)row * width + column;
    float* other = reinterpret_cast<float*>(to) + (size_t)row * width + column;
    if constexpr (kWhole) {
#pragma unroll
      for (int i = 0; i < kEight; i += 4)
        *reinterpret_cast<float4*>(other + i) = *reinterpret_cast<const float4*>(own + i);
    } else {
      for (int i = 0; i < min(kEight, width - column); i++) other[i] = own[i];
    }
  }
  __device__ void add_to(float (&sum)[kEight]) const {
#pragma unroll
    for (int i = 0; i < kEight; i++) sum[i] = __fadd_rn(sum[i], values[i]);
  }
};

// Calls work() with 0, 1, ... as compile-time constants.
template <int... kNumbers, typename Work>
__device__ void each(std::integer_sequence<int, kNumbers...>, Work work) {
  (work(std::integral_constant<int, kNumbers>()), ...);
}
template <int kCount, typename Work>
__device__ void each(Work work) {
  each(std::make_integer_sequence<int, kCount>(), work);
}

// A CTA computes a row at a time; a thread computes eight columns of it, and further ones of rows with more than 4,096
// columns. kRanks: most ranks. kPushed: other ranks push their partial sums. A CTA pushes all its rows before it waits
// for any.
template <bool kTiles, int kRanks, bool kWhole, bool kPushed>
__global__ void __launch_bounds__(kThreads, kRanks <= 4 ? kBlocks : 1)
    sum_kernel(const __grid_constant__ RankSum s, int rows) {
  const Peers& peers = s.peers;
  const int width = s.y.width, first = kEight * threadIdx.x, stride = kEight * blockDim.x;
  const auto weights_of = [&](int column, float(&weights)[kEight]) {
    read_eight<kWhole>(s.norm.weight, column, width, weights);
    if (s.norm.unit_offset)
#pragma unroll
      for (int i = 0; i < kEight; i++) weights[i] += 1.0f;
  };
  let_next_begin();
  float weights[kEight];  // prefetched while the CTA waits for ranks
  if (s.norm.weight && first < width) weights_of(first, weights);
  await_previous();
  const size_t half = s.call % 2 * peers.buffer_bytes;
  Wait wait(peers, PeerWait::sum);
  if constexpr (!kPushed) {
    const uint32_t call = (uint32_t)*peers.step * s.calls + s.call + 1;
    if (peers.sent) {
      for (int row = blockIdx.x; row < rows; row += gridDim.x)
        for (int column = first; column < width; column += stride)
          Eight<kTiles, kWhole>::copy(peers.partials[peers.rank] + half, peers.sent + half, row, column, width);
      meet_by_host(peers, call);
    } else {
      meet(peers, call);
    }
  } else if (!s.on_its_way) {
    for (int row = blockIdx.x; row < rows; row += gridDim.x)
      for (int column = first; column < width; column += stride) {
        Eight<kTiles, kWhole> own;
        own.read(peers.partials[peers.rank] + half, row, column, width);
        for (int r = 0; r < peers.world; r++)
          if (r != peers.rank) own.push(peers.place(r, peers.rank, s.call), row, column, width);
      }
  }
  for (int row = blockIdx.x; row < rows; row += gridDim.x) {
    float* y = s.y.values + (size_t)row * width;
    float squares = 0, kept[kEight];
    for (int column = first; column < width; column += stride) {
      Eight<kTiles, kWhole> partials[kRanks];
      float before[kEight], x[kEight] = {};
      if (kPushed && s.adds) read_eight<kWhole>(y, column, width, before);
      each<kRanks>([&](auto number) {
        constexpr int r = decltype(number)::value;
        if (r >= peers.world) return;
        if constexpr (kPushed)
          if (r != peers.rank) return partials[r].look(peers.place(peers.rank, r, s.call), row, column, width);
        partials[r].read(peers.partials[r] + half, row, column, width);
      });
      if constexpr (kPushed)
        each<kRanks>([&](auto number) {
          constexpr int r = decltype(number)::value;
          if (r >= peers.world || r == peers.rank) return;
          char* place = peers.place(peers.rank, r, s.call);
          while (!partials[r].has_come() && wait.goes_on(r)) partials[r].look(place, row, column, width);
          partials[r].mark(place, row, column, width);
        });
      if (!kPushed && s.adds) read_eight<kWhole>(y, column, width, before);
#pragma unroll
      for (int r = 0; r < kRanks; r++)
        if (r < peers.world) partials[r].add_to(x);
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
  const int most = sum.peers.sent ? kHostCtas : kBlocks * sm_count();
  const int blocks = std::clamp(rows, 1, most);  // at least one, which signals even without rows
  const bool whole = sum.y.width % kEight == 0;
  const auto choose = [&](auto few, auto some, auto many) {
    start(queue, sum.peers.world <= 2 ? few : sum.peers.world <= 4 ? some : many, blocks, threads, 0, sum, rows);
  };
  const auto start_tiles = [&](auto is_whole, auto pushed) {
    constexpr bool kWhole = is_whole(), kPushed = pushed();
    choose(sum_kernel<true, 2, kWhole, kPushed>, sum_kernel<true, 4, kWhole, kPushed>,
           sum_kernel<true, kMaxRanks, kWhole, kPushed>);
  };
  const auto start_values = [&](auto is_whole) {
    constexpr bool kWhole = is_whole();
    choose(sum_kernel<false, 2, kWhole, false>, sum_kernel<false, 4, kWhole, false>,
           sum_kernel<false, kMaxRanks, kWhole, false>);
  };
  const std::true_type yes;
  const std::false_type no;
  if (sum.is_dtype16 && pushes(sum.peers, rows)) whole ? start_tiles(yes, yes) : start_tiles(no, yes);
  else if (sum.is_dtype16) whole ? start_tiles(yes, no) : start_tiles(no, no);
  else whole ? start_values(yes) : start_values(no);
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
