// 16-bit GEMMs by wgmma where each CTA has one tile, for so few rows and so many columns that all tiles run at once or
// nearly so. Sums have one split-K part. Compared with persistent CTAs, tiles may have as many columns as give each SM
// one, the deepest pipeline, and no partial sums that others wait for.
//
// Four threads copy both operands to shared memory, and warpgroups multiply, each some blocks of 64 rows with all
// columns.
#pragma once
#include <array>
#include <utility>

#include "cuda/kernels/gemm/epilogue_rows.cuh"
#include "cuda/kernels/gemm/one_wave_plan.h"
#include "cuda/kernels/gemm/operand_shares.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {

template <int kGroups_, int kHeight_, int kColumns_>
struct OneWaveShape {
  static constexpr int kGroups = kGroups_, kHeight = kHeight_, kColumns = kColumns_;
  static constexpr int kRows = kGroups * kHeight * kBlock, kThreads = 128 * (1 + kGroups);
  static constexpr int kMaxShared = 226 << 10, kStageBytes = (kRows + kColumns) * kRowBytes;
  static constexpr int kStages = kMaxShared / kStageBytes < 12 ? kMaxShared / kStageBytes : 12;
  static constexpr int kShared = kStages * kStageBytes;
};

template <typename S, bool kGated>
__global__ void __launch_bounds__(S::kThreads, 1)
    gemm_one_wave_kernel(const __grid_constant__ GemmArgs p, int rows, int blocks) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kGroups = S::kGroups, kHeight = S::kHeight, kRows = S::kRows, kColumns = S::kColumns,
                kStages = S::kStages, kCopiers = 4;
  // The compiler gives all threads as many registers as fit; sums of more need those of the copying ones.
  constexpr bool kMovesRegisters = kGroups == 2 && kHeight * kColumns > 192;
  extern __shared__ __align__(1024) char shared[];
  __shared__ uint64_t full[kStages], empty[kStages];
  const int tile_row = blockIdx.x * kRows, tile_column = blockIdx.y * kColumns, group = warpgroup() - 1;
  const uint32_t stages = shared_address(shared);
  if (threadIdx.x == 0) {
    // A stage is full once all copying threads have issued their copies and the data has arrived. It is empty once all
    // warpgroups have read it.
    for (int i = 0; i < kStages; i++) barrier_init(&full[i], kCopiers), barrier_init(&empty[i], kGroups);
    barriers_are_there();
  }
  __syncthreads();
  if (group < 0) {
    if constexpr (kMovesRegisters) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    // A thread of each warp issues some copies: a single thread would take longer to issue all than they take.
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (elected()) {
      const Share weights(p.w.tiles, tile_column, p.w.n, kColumns, blocks, 0, 1);
      const Share own(p.x.tiles, tile_row, rows, kRows, blocks, 0, 1);
      const bool once = gridDim.x == 1;  // weights are read once
      const uint64_t policy = evicted_first();
      bool of_rows[2];
      Part first = part_of(weights, own, warp, of_rows[0]), second = part_of(weights, own, warp + kCopiers, of_rows[1]);
      const auto copy = [&](Part& part, bool of_rows, int stage) {
        if (!part.bytes) return;
        const uint32_t to = stages + stage * S::kStageBytes + (of_rows ? 0 : kRows * kRowBytes) + part.to;
        if (once && !of_rows) copy_bulk(to, part.from, part.bytes, &full[stage], policy);
        else copy_bulk(to, part.from, part.bytes, &full[stage]);
        part.from += kBlockBytes;
      };
      const auto expect = [&](int stage) {
        if (warp == 0) barrier_expect(&full[stage], weights.bytes + own.bytes);
        else barrier_arrive(&full[stage]);
      };
      // Copies of weights start before the previous kernel has computed the activations.
      const int begun = min(kStages, blocks);
      for (int i = 0; i < begun; i++) {
        expect(i);
        if (!of_rows[0]) copy(first, false, i);
        if (!of_rows[1]) copy(second, false, i);
      }
      await_previous();
      for (int i = 0; i < begun; i++) {
        if (of_rows[0]) copy(first, true, i);
        if (of_rows[1]) copy(second, true, i);
      }
      Pipeline<kStages> ring;
      for (int b = begun; b < blocks; b++, ring.next()) {
        barrier_wait(&empty[ring.stage], ring.parity);
        // Each copying thread arrives at all stages, even without copies: none gets a full ring ahead or behind.
        expect(ring.stage);
        copy(first, of_rows[0], ring.stage), copy(second, of_rows[1], ring.stage);
      }
      // Not earlier: the next kernel would load its weights while these are still in flight.
      let_next_begin();
    }
    return;
  }
  if constexpr (kMovesRegisters) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  await_previous();
  const int teller = threadIdx.x % 128, first_row = tile_row + group * kHeight * kBlock;
  Pipeline<kStages> ring;
  if (first_row >= rows) {
    for (int b = 0; b < blocks; b++, ring.next()) {
      barrier_wait(&full[ring.stage], ring.parity);
      asm volatile("bar.sync %0, 128;" ::"r"(2 + group) : "memory");  // a warp that is behind must not miss a phase
      if (teller == 0) barrier_arrive(&empty[ring.stage]);
    }
    return;
  }
  if (!kGated && p.adds)
    for (int i = 0; i < kHeight; i++) ask_for_added<kColumns>(p, rows, first_row + i * kBlock, tile_column);
  float d[kHeight][kColumns / 2];
  int last = -1;
  for (int b = 0; b < blocks; b++, ring.next()) {
    barrier_wait(&full[ring.stage], ring.parity);
    const uint32_t stage = stages + ring.stage * S::kStageBytes, own = stage + group * kHeight * kBlockBytes,
                   theirs = stage + kRows * kRowBytes;
    begin_wgmma();
#pragma unroll
    for (int step = 0; step < 4; step++)
#pragma unroll
      for (int i = 0; i < kHeight; i++)
        Tile<kColumns>::multiply(d[i], further(descriptor(own), i * kBlockBytes + step * kStepBytes),
                                 further(descriptor(theirs), step * kStepBytes), step > 0 || b > 0);
    commit_wgmma();
    wait_wgmma<1>();
    if (last >= 0 && teller == 0) barrier_arrive(&empty[last]);
    last = ring.stage;
  }
  wait_wgmma<0>();
#pragma unroll
  for (int i = 0; i < kHeight; i++) settle(d[i]);
#pragma unroll
  for (int block = 0; block < kHeight; block++) {
    const auto results = [&](int sixteen, int h, float(&v)[4]) {
#pragma unroll
      for (int i = 0; i < 4; i++) v[i] = d[block][sixteen * 8 + h * 2 + i / 2 * 4 + i % 2];
    };
    const int row = first_row + block * kBlock;
    if constexpr (!kGated) epilogue_rows<kColumns, 4, false>(p, rows, row, tile_column, results);
    else if (p.bias) write_gated<true, kColumns>(p, rows, row, tile_column / 2, results);
    else write_gated<false, kColumns>(p, rows, row, tile_column / 2, results);
  }
#endif
}

using StartOneWave = void (*)(const GemmArgs&, int rows, const Queue&);
template <int kTile>
void start_one_wave(const GemmArgs& p, int rows, const Queue& queue) {
  constexpr OneWaveTile kOf = kOneWaveTiles[kTile];
  using S = OneWaveShape<kOf.groups, kOf.height, kOf.columns>;
  // CTAs that read the same weights are adjacent.
  const dim3 grid(ceil_div(rows, S::kRows), ceil_div(p.w.n, S::kColumns));
  start(queue, p.gated ? gemm_one_wave_kernel<S, true> : gemm_one_wave_kernel<S, false>, grid, S::kThreads, S::kShared,
        p, rows, blocks_of(p.w.k));
}
template <int... kTiles>
constexpr std::array<StartOneWave, kOneWaveTileCount> one_wave_starts(std::integer_sequence<int, kTiles...>) {
  return {start_one_wave<kTiles>...};
}
constexpr auto kOneWaveStarts = one_wave_starts(std::make_integer_sequence<int, kOneWaveTileCount>());

}  // namespace AS_DTYPE16
}  // namespace as::cuda
