// 16-bit prefill GEMMs by wgmma.
//
// A CTA computes one tile at a time: 128 rows of activations and some columns (rows of the weights). CTAs are
// persistent: each computes one tile after the other, and an equal part of the tiles left for the end. A CTA begins a
// shared tile long before another CTA continues from its sums. Four threads copy both operands to shared memory,
// several stages ahead, and on into the next tile while the current one is written. Two warpgroups multiply, each 64
// rows with all columns. They add split-K parts (tiles.h) in registers. CTAs with adjacent tiles form a cluster, in
// which each copies a part of the shared operands for all, because the bandwidth of the L2 cache is the limit.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cuda/kernels/by_dtype16.h"
#include "cuda/kernels/common/cluster.cuh"
#include "cuda/kernels/gemm/epilogue_rows.cuh"
#include "cuda/kernels/gemm/gemm_one_wave.cuh"
#include "cuda/kernels/gemm/gemm_wgmma.h"
#include "cuda/kernels/gemm/operand_shares.cuh"
#include "cuda/kernels/gemm/tile_scheduler.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace {

constexpr int kMaxShared = 226 << 10;
[[maybe_unused]] constexpr int kCopiers = 4;  // threads that copy; each copies up to two parts of a tile
constexpr int kGroups = 2, kRows = kGroups * kBlock, kThreads = 128 * (1 + kGroups);  // kGroups warpgroups multiply
// One warpgroup is this many stages ahead of the other: one writes results while the other multiplies.
[[maybe_unused]] constexpr int kAhead = 2;
// Rows of a band of tiles. CTAs compute the tiles of one band at about the same time, so its rows stay in the L2 cache.
[[maybe_unused]] constexpr int kBandRows = 2048;

// A tile has kColumns columns. A cluster has kDown tiles of rows by kAcross tiles of columns. kWhole: there is one
// split-K part, so that no separate totals are needed.
template <int kColumns_, bool kWhole_, int kDown_, int kAcross_>
struct Shape {
  static constexpr int kTileRows = kRows, kColumns = kColumns_, kDown = kDown_, kAcross = kAcross_;
  [[maybe_unused]] static constexpr bool kWhole = kWhole_;
  static constexpr int kCluster = kDown * kAcross;
  static constexpr int kStageBytes = (kRows + kColumns) * kRowBytes, kStages = kMaxShared / kStageBytes;
  static constexpr int kShared = kStages * kStageBytes;
  [[maybe_unused]] static constexpr int kBand = kBandRows / (kDown * kRows);
  static int unit_of(const SplitK& k) { return kWhole ? 1 : k.length; }
  // Each CTA of a cluster copies whole groups of eight rows of the shared operands.
  static_assert(kColumns % (8 * kDown) == 0 && kRows % (8 * kAcross) == 0);
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Shared memory of a CTA besides stages. A copying thread computes the parts of tiles: the divisions would delay the
// warpgroups that multiply. There are never more than kParts in flight, because each has at least one stage.
template <int kStages>
struct Barriers {
  static constexpr int kParts = 16;
  static_assert(kParts >= kStages + 2);
  uint64_t full[kStages], empty[kStages];
  TilePart parts[kParts];
};

__device__ void warps_meet(int group) { asm volatile("bar.sync %0, 128;" ::"r"(2 + group) : "memory"); }

// hand_over() leaves a warpgroup's sums for another CTA; go_on_from() waits for the sums of a CTA and loads them.
template <int kCount>
__device__ void hand_over(const Scratch& scratch, int group, const float (&sums)[kCount]) {
  static_assert(kGroups * 128 * kCount <= kScratchFloats && kGroups <= kScratchFlags);
  const int thread = threadIdx.x % 128;
  float4* to = reinterpret_cast<float4*>(scratch.sums + blockIdx.x * kScratchFloats + group * 128 * kCount) + thread;
#pragma unroll
  for (int i = 0; i < kCount / 4; i++)
    __stcg(to + i * 128, make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]));
  warps_meet(group);
  if (thread == 0) set_flag(scratch.flags + blockIdx.x * kScratchFlags + group, 1);
}
template <int kCount>
__device__ void go_on_from(const Scratch& scratch, int block, int group, float (&sums)[kCount]) {
  const int thread = threadIdx.x % 128;
  if (thread == 0) {
    int* flag = scratch.flags + block * kScratchFlags + group;
    await_flag(flag, Waiter::gemm_prefill, scratch.given_up);
    set_flag(flag, 0);
  }
  warps_meet(group);
  const float4* from =
      reinterpret_cast<const float4*>(scratch.sums + block * kScratchFloats + group * 128 * kCount) + thread;
#pragma unroll
  for (int i = 0; i < kCount / 4; i++) {
    const float4 four = __ldcg(from + i * 128);
    sums[4 * i] = four.x, sums[4 * i + 1] = four.y, sums[4 * i + 2] = four.z, sums[4 * i + 3] = four.w;
  }
}

// The final sums.
template <bool kWhole, int kValues, int kTotals>
__device__ const auto& of_parts(const float (&k_part)[kValues], const float (&total)[kTotals]) {
  if constexpr (kWhole) return k_part;
  else return total;
}

#endif

template <typename S, bool kGated>
__global__ void __launch_bounds__(kThreads, 1)
    gemm_prefill_kernel(const __grid_constant__ GemmArgs p, int rows, const __grid_constant__ SplitK k,
                        const __grid_constant__ Walk walk, Scratch scratch) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kColumns = S::kColumns, kDown = S::kDown, kAcross = S::kAcross, kCluster = S::kCluster;
  constexpr bool kWhole = S::kWhole;
  extern __shared__ __align__(1024) char shared[];
  __shared__ Barriers<S::kStages> barriers;
  const int rank = blockIdx.x % kCluster, down = rank / kAcross, across = rank % kAcross;
  const TileScheduler<S, false> parts(walk, k.blocks, blockIdx.x / S::kCluster, gridDim.x / S::kCluster,
                                      blockIdx.x % S::kCluster / S::kAcross, blockIdx.x % S::kAcross);
  const int count = parts.count();
  const uint32_t stages = shared_address(shared);
  let_next_begin();
  if (threadIdx.x == 0) {
    // A stage is full once all copying threads have issued their copies and the data has arrived. It is empty once the
    // warpgroups of all CTAs of the cluster have read it.
    for (int i = 0; i < S::kStages; i++)
      barrier_init(&barriers.full[i], kCopiers), barrier_init(&barriers.empty[i], kCluster * kGroups);
    barriers_are_there();
  }
  __syncthreads();
  cluster_barrier();
  const int group = warpgroup() - 1;
  Pipeline<S::kStages> ring;
  if (group < 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    // A thread of each warp issues some copies: a single thread would take longer to issue all than they take.
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (elected()) {
      // The CTAs of one row of a cluster are adjacent.
      const uint16_t beside = ((1 << kAcross) - 1) << (down * kAcross);
      uint16_t above = 0;
      for (int i = 0; i < kDown; i++) above |= 1 << (i * kAcross + across);
      for (int number = 0; number < count; number++) {
        const TilePart at = parts[number];
        if (warp == 0) barriers.parts[number % barriers.kParts] = at;
        const Share weights(p.w.tiles, at.column, p.w.n, kColumns, k.blocks, down, kDown);
        const Share own(p.x.tiles, at.row, rows, kRows, k.blocks, across, kAcross);
        bool of_rows[2];
        Part first = part_of(weights, own, warp, of_rows[0]),
             second = part_of(weights, own, warp + kCopiers, of_rows[1]);
        const auto copy = [&](Part& part, bool of_rows) {
          if (!part.bytes) return;
          uint64_t* barrier = &barriers.full[ring.stage];
          const uint32_t to = stages + ring.stage * S::kStageBytes + (of_rows ? 0 : kRows * kRowBytes) + part.to;
          const int sharers = of_rows ? kAcross : kDown;
          if (sharers > 1) copy_bulk_to(to, part.from, part.bytes, barrier, of_rows ? beside : above);
          else copy_bulk(to, part.from, part.bytes, barrier);
          part.from += kBlockBytes;
        };
        first.from += (size_t)at.begin * kBlockBytes, second.from += (size_t)at.begin * kBlockBytes;
        // Copies of weights start before the previous kernel has computed the activations.
        if (number || of_rows[0] || of_rows[1]) await_previous();
        for (int left = at.end - at.begin; left > 0; left--, ring.next()) {
          barrier_wait(&barriers.empty[ring.stage], ring.parity ^ 1);
          // Each copying thread arrives at all stages, even without copies: none gets a full ring ahead or behind.
          if (warp == 0) barrier_expect(&barriers.full[ring.stage], weights.bytes + own.bytes);
          else barrier_arrive(&barriers.full[ring.stage]);
          copy(first, of_rows[0]), copy(second, of_rows[1]);
        }
      }
    }
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    await_previous();
    // A stage is released to all CTAs of the cluster, by one thread each. If only the CTAs that copy for this one got
    // it, a CTA that waits for nothing (a tile beyond the last) could arrive twice before another arrives once.
    const int teller = threadIdx.x % 128;
    const auto release = [&](int stage) {
      if (teller < kCluster) barrier_arrive_at(&barriers.empty[stage], teller);
    };
    const TilePart begun = parts[0];
    const bool staggered = begun.end - begun.begin > kAhead;
    const auto let_other_begin = [&] {
      if (group == 0 && staggered) asm volatile("bar.arrive 1, 256;" ::: "memory");
    };
    if (group == 1 && staggered) asm volatile("bar.sync 1, 256;" ::: "memory");
    for (int number = 0; number < count; number++) {
      barrier_wait(&barriers.full[ring.stage], ring.parity);
      const TilePart& part = barriers.parts[number % barriers.kParts];
      const int last_block = part.end;
      int b = part.begin;
      if (part.row + group * kBlock >= rows || part.column >= p.w.n) {
        if (number == 0) let_other_begin();
        for (; b < last_block; b++, ring.next()) {
          barrier_wait(&barriers.full[ring.stage], ring.parity);
          warps_meet(group);  // one thread releases for all: a warp that is behind must not miss a phase
          release(ring.stage);
        }
        continue;
      }
      float d[kColumns / 2], total[kWhole ? 1 : kColumns / 2];
      [[maybe_unused]] bool goes_on = !kWhole && b > 0;
      if constexpr (!kWhole) {
#pragma unroll
        for (int i = 0; i < kColumns / 2; i++) total[i] = -0.0f;  // adding x to -0 gives x, even if x is -0
      }
      if (!kGated && p.adds && last_block == k.blocks)
        ask_for_added<kColumns>(p, rows, part.row + group * kBlock, part.column);
      do {
        const int end = kWhole ? last_block : min(b + k.length, last_block);
        int last = -1;
        // anew: std::true_type if sums begin with these products. Then d needs no registers before.
        const auto multiply = [&](auto anew) {
          barrier_wait(&barriers.full[ring.stage], ring.parity);
          const uint32_t stage = stages + ring.stage * S::kStageBytes, own = stage + group * kBlockBytes,
                         theirs = stage + kRows * kRowBytes;
          begin_wgmma();
#pragma unroll
          for (int step = 0; step < 4; step++)
            Tile<kColumns>::multiply(d, further(descriptor(own), step * kStepBytes),
                                     further(descriptor(theirs), step * kStepBytes),
                                     step > 0 || !decltype(anew)::value);
          commit_wgmma();
          wait_wgmma<1>();
          if (last >= 0) release(last);
          last = ring.stage;
          if (number == 0 && b == begun.begin + kAhead) let_other_begin();
          b++, ring.next();
        };
        if (kWhole && b > 0) {
          go_on_from(scratch, blockIdx.x - kCluster, group, d);
          settle(d);
          multiply(std::false_type());
        } else {
          multiply(std::true_type());
        }
        if constexpr (kWhole) {  // on both paths: otherwise the compiler serializes all wgmma instructions
          wait_wgmma<0>();
          settle(d);
        }
#pragma unroll 1
        while (b < end) multiply(std::false_type());
        wait_wgmma<0>();
        release(last);
        settle(d);
        if constexpr (!kWhole) {
          // The other CTA may have computed its split-K parts while this one computed the first that follows them.
          if (goes_on) go_on_from(scratch, blockIdx.x - kCluster, group, total), goes_on = false;
#pragma unroll
          for (int i = 0; i < kColumns / 2; i++) total[i] = __fadd_rn(total[i], d[i]);
        }
      } while (!kWhole && b < last_block);
      const float(&sums)[kColumns / 2] = of_parts<kWhole>(d, total);
      const TilePart end = barriers.parts[afresh((unsigned)number) % barriers.kParts];
      if (end.end < k.blocks) {
        hand_over(scratch, group, sums);
        continue;
      }
      const int first_row = end.row + group * kBlock;
      const auto results = [&](int sixteen, int h, float(&v)[4]) {
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = sums[sixteen * 8 + h * 2 + i / 2 * 4 + i % 2];
      };
      if constexpr (!kGated) epilogue_rows<kColumns, 4, false, true>(p, rows, first_row, end.column, results);
      else if (p.bias) write_gated<true, kColumns>(p, rows, first_row, end.column / 2, results);
      else write_gated<false, kColumns>(p, rows, first_row, end.column / 2, results);
    }
  }
  __syncwarp();
  cluster_barrier();  // other CTAs may still arrive at this one's barriers
#endif
}

template <typename S>
struct Kernel {
  static constexpr int kEnd = S::kWhole ? 2500 : 5000;  // nanoseconds of a tile's first copies and epilogue
  // How many clusters run at once.
  static int clusters() {
    static const int count = clusters_at_once(gemm_prefill_kernel<S, false>, S::kCluster, kThreads, S::kShared);
    return count;
  }
  // nanoseconds: of one block of K.
  static int64_t plan(const Matrix& w, int rows, int nanoseconds, Walk* walk) {
    const SplitK k(w.k, w.max_split_k);
    *walk = walk_of<S>(rows, k, w.n);
    const bool room = clusters() * S::kCluster <= kScratchCtas;
    return plan_walk(*walk, k.blocks, clusters(),
                     {(int64_t)k.blocks * nanoseconds + kEnd, (int64_t)walk->unit * nanoseconds, kEnd}, room,
                     room && !S::kWhole);
  }
  static int64_t cost(const Matrix& w, int rows, int nanoseconds) {
    Walk walk;
    return plan(w, rows, nanoseconds, &walk);
  }
  static void start(const GemmArgs& p, int rows, int nanoseconds, const Queue& queue) {
    Walk walk;
    plan(p.w, rows, nanoseconds, &walk);
    const auto kernel = p.gated ? gemm_prefill_kernel<S, true> : gemm_prefill_kernel<S, false>;
    const int blocks = S::kCluster * (walk.whole == walk.count() ? std::min(walk.count(), clusters()) : clusters());
    start_clusters(queue, kernel, dim3(blocks), dim3(S::kCluster), kThreads, S::kShared, p, rows,
                   SplitK(p.w.k, p.w.max_split_k), walk, queue.scratch);
  }
};

// Nanoseconds of a block of K on an H200. Where all SMs are busy for long and draw all power, wide tiles are faster
// than measurements of a single GEMM show: narrower ones from 112 columns on are given about 5 % more than measured.
template <int kColumns, Sums kSums, int kDown, int kAcross>
constexpr Choice choice(int nanoseconds) {
  using K = Kernel<Shape<kColumns, kSums == Sums::whole, kDown, kAcross>>;
  return {kColumns, kSums, kDown, kAcross, nanoseconds, K::cost, K::start};
}
int64_t cost_of_one_wave(const Matrix& w, int rows, int) { return OneWavePlan(w, rows, sm_count()).nanoseconds; }
void start_one_wave(const GemmArgs& p, int rows, int, const Queue& queue) {
  kOneWaveStarts[OneWavePlan(p.w, rows, sm_count()).tile](p, rows, queue);
}
constexpr Choice kTiles[] = {
    choice<192, Sums::chained, 2, 1>(471), choice<160, Sums::chained, 2, 1>(410),
    choice<144, Sums::chained, 2, 1>(375), choice<128, Sums::chained, 2, 1>(340),
    choice<128, Sums::chained, 2, 2>(335), choice<112, Sums::chained, 2, 1>(315),
    choice<80, Sums::chained, 2, 1>(215),  choice<64, Sums::chained, 2, 1>(190),
    choice<48, Sums::chained, 2, 1>(155),  choice<256, Sums::whole, 2, 1>(760),
    choice<256, Sums::whole, 2, 2>(780),   choice<192, Sums::whole, 2, 1>(590),
    choice<144, Sums::whole, 2, 1>(440),   {144, Sums::whole, 1, 1, 0, cost_of_one_wave, start_one_wave}};

}  // namespace

int prefill_clusters(DType16) { return Kernel<Shape<256, true, 2, 1>>::clusters(); }

void gemm_prefill(const GemmArgs& p, int rows, const Queue& queue) { start_best(kTiles, p, rows, queue); }

}  // namespace AS_DTYPE16
}  // namespace as::cuda
