// 16-bit stream-K GEMMs by wgmma for decode batches and many columns (rows of the weights), without split-K (tiles.h).
// They are bound by the bandwidth of the weights.
//
// CTAs are persistent. Each has an equal part of all blocks of the weights: some whole tiles of columns, the end of the
// tile before them and the beginning of the tile after them. Warpgroups multiply, each 64 columns with all rows. One
// thread of each also copies both operands to shared memory, as far ahead as there is room, across tiles. One CTA
// begins a shared tile before all its other tiles. Another CTA finishes that tile last, from the sums that the first
// left in global memory long before (compare Osama et al., "Stream-K", 2023). CTAs wait only for CTAs of lower numbers,
// which started earlier.
#include <algorithm>

#include "cuda/kernels/common/wgmma.cuh"
#include "cuda/kernels/gemm/epilogue_columns.cuh"
#include "cuda/kernels/gemm/gemm_wgmma.h"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace {

// kRows: rows of activations; kGroups: warpgroups of 64 columns each.
template <int kRows_, int kGroups_>
struct Shape {
  static constexpr int kRows = kRows_, kGroups = kGroups_, kThreads = 128 * kGroups;
  static constexpr int kStageBytes = kGroups * kBlockBytes + kRows * kRowBytes;
  static constexpr int kStages = (216 << 10) / kStageBytes < 12 ? (216 << 10) / kStageBytes : 12;
  static constexpr int kShared = kStages * kStageBytes;
  static constexpr int kValues = kRows / 2;  // sums of a thread
  static constexpr size_t kSums = (size_t)kGroups * kBlock * kRows;

  static int tiles(int n, int rows) { return (blocks_of(n) + kGroups - 1) / kGroups * ((rows + kRows - 1) / kRows); }
};

// A part of a tile: blocks [begin, end) of K.
struct Part {
  int tile, begin, end;
};
// The parts of tiles of a CTA, in the order in which it computes them.
struct TileScheduler {
  int blocks, begin, end;  // blocks of K of a tile; the CTA's part of all blocks of all tiles

  __device__ TileScheduler(int tiles, int blocks) : blocks(blocks) {
    const int64_t all = (int64_t)tiles * blocks;
    begin = (int)(all * blockIdx.x / gridDim.x), end = (int)(all * (blockIdx.x + 1) / gridDim.x);
  }
  __device__ int first_whole() const { return (begin + blocks - 1) / blocks; }
  __device__ int whole() const { return end / blocks - first_whole(); }
  __device__ int count() const { return (end % blocks != 0) + whole() + (begin % blocks != 0); }
  __device__ Part operator[](int i) const {
    if (end % blocks && i-- == 0) return {end / blocks, 0, end % blocks};
    if (i < whole()) return {first_whole() + i, 0, blocks};
    return {begin / blocks, begin % blocks, blocks};
  }
};

template <typename S>
__global__ void __launch_bounds__(S::kThreads, 1)
    gemm_stream_k_kernel(const __grid_constant__ GemmArgs p, int rows, SplitK k, Scratch scratch) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kRows = S::kRows, kGroups = S::kGroups, kStages = S::kStages, kValues = S::kValues;
  extern __shared__ __align__(1024) char shared[];
  __shared__ uint64_t full[kStages], empty[kStages];
  const int row_tiles = (rows + kRows - 1) / kRows, column_blocks = blocks_of(p.w.n);
  const TileScheduler parts((column_blocks + kGroups - 1) / kGroups * row_tiles, k.blocks);
  const int count = parts.count();
  const uint32_t stages = shared_address(shared);
  let_next_begin();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; i++) barrier_init(&full[i], kGroups), barrier_init(&empty[i], kGroups);
    barriers_are_there();
  }
  __syncthreads();
  const int group = warpgroup(), thread = threadIdx.x % 128;

  // The first thread of each warpgroup issues the copies of the group's weights and of some blocks of the rows. A
  // single thread would take longer to issue all copies than they take.
  struct Step {
    int number, b, end, column_block, row;  // number: of the part; b, end: blocks of K
  };
  const auto at_part = [&](Step& s) {
    const Part part = parts[s.number];
    s.b = part.begin, s.end = part.end;
    s.column_block = part.tile / row_tiles * kGroups, s.row = part.tile % row_tiles * kRows;
  };
  const auto next = [&](Step& s) {
    if (++s.b == s.end && ++s.number < count) at_part(s);
  };
  // The number of blocks of rows; up to 64 rows are a part of one block.
  const auto row_blocks = [&](const Step& s) {
    return kRows <= kBlock ? 1 : min(kRows / kBlock, blocks_of(rows) - s.row / kBlock);
  };
  const auto row_bytes = [&](const Step& s) {
    return kRows <= kBlock ? min(kRows, rows - s.row) * kRowBytes : kBlockBytes;
  };
  const auto fetch_weights = [&](const Step& s, int stage) {
    const bool there = s.column_block + group < column_blocks;
    const int own = (row_blocks(s) + kGroups - 1 - group) / kGroups;
    barrier_expect(&full[stage], (there ? kBlockBytes : 0) + own * row_bytes(s));
    if (there)
      copy_bulk(
          stages + stage * S::kStageBytes + group * kBlockBytes,
          reinterpret_cast<const char*>(p.w.tiles) + ((size_t)(s.column_block + group) * k.blocks + s.b) * kBlockBytes,
          kBlockBytes, &full[stage], evicted_first());
  };
  const auto fetch_rows = [&](const Step& s, int stage) {
    const uint32_t to = stages + stage * S::kStageBytes + kGroups * kBlockBytes;
    const char* from = reinterpret_cast<const char*>(p.x.tiles) +
                       ((size_t)(s.row / kBlock) * k.blocks + s.b) * kBlockBytes + s.row % kBlock * kRowBytes;
    for (int i = group; i < row_blocks(s); i += kGroups)
      copy_bulk(to + i * kBlockBytes, from + (size_t)i * k.blocks * kBlockBytes, row_bytes(s), &full[stage]);
  };
  Step ahead{0};
  if (thread == 0) {
    // Copies of weights start before the previous kernel has computed the activations.
    at_part(ahead);
    Step behind = ahead;
    int begun = 0;
    for (; begun < kStages && ahead.number < count; begun++, next(ahead)) fetch_weights(ahead, begun);
    await_previous();
    for (int i = 0; i < begun; i++, next(behind)) fetch_rows(behind, i);
  }
  await_previous();
  __syncwarp();

  // Where a thread leaves its sums for another CTA. Adjacent threads use adjacent addresses.
  const auto sums_of = [&](int block) { return scratch.sums + block * S::kSums + threadIdx.x; };
  int stage = 0, turn = 0, before = -1, before_turn = 0;
  float d[kValues];
  for (int number = 0; number < count; number++) {
    const Part part = parts[number];
    if (part.begin) {
      if (threadIdx.x == 0) {
        await_flag(scratch.flags + blockIdx.x - 1, Waiter::gemm_stream_k, scratch.given_up);
        set_flag(scratch.flags + blockIdx.x - 1, 0);
      }
      __syncthreads();
      const float* from = sums_of(blockIdx.x - 1);
#pragma unroll
      for (int i = 0; i < kValues; i++) d[i] = __ldcg(from + i * S::kThreads);
    }
    settle(d);
    for (int b = part.begin; b < part.end; b++) {
      barrier_wait(&full[stage], turn);
      const uint32_t weights = stages + stage * S::kStageBytes + group * kBlockBytes,
                     x = stages + stage * S::kStageBytes + kGroups * kBlockBytes;
      begin_wgmma();
#pragma unroll
      for (int step = 0; step < 4; step++)
        Tile<kRows>::multiply(d, further(descriptor(weights), step * kStepBytes),
                              further(descriptor(x), step * kStepBytes), step > 0 || b > 0);
      commit_wgmma();
      if (thread == 0 && before >= 0 && ahead.number < count) {  // refills the stage of the previous iteration
        barrier_wait(&empty[before], before_turn);
        fetch_weights(ahead, before), fetch_rows(ahead, before);
        next(ahead);
      }
      __syncwarp();
      wait_wgmma<0>();
      settle(d);
      if (thread == 0) barrier_arrive(&empty[stage]);
      before = stage, before_turn = turn;
      if (++stage == kStages) stage = 0, turn ^= 1;
    }
    if (part.end < k.blocks) {
      float* to = sums_of(blockIdx.x);
#pragma unroll
      for (int i = 0; i < kValues; i++) __stcg(to + i * S::kThreads, d[i]);
      __syncthreads();
      if (threadIdx.x == 0) set_flag(scratch.flags + blockIdx.x, 1);
      continue;
    }
    epilogue_columns<SumScales::none>(p, rows, part.tile % row_tiles * kRows, part.tile / row_tiles * kGroups + group,
                                      d, nullptr);
  }
#endif
}

template <typename S>
void start_stream_k(const GemmArgs& p, int rows, const Queue& queue) {
  static_assert(S::kSums <= kScratchFloats);
  // There are no more CTAs than tiles, so that at most two CTAs share a tile.
  const int blocks = std::min({S::tiles(p.w.n, rows), sm_count(), (int)kScratchCtas});
  start(queue, gemm_stream_k_kernel<S>, dim3(blocks), S::kThreads, S::kShared, p, rows, SplitK(p.w.k, p.w.max_split_k),
        queue.scratch);
}

// Tiles are as wide as possible while every SM has one, because each tile reads the rows again.
template <int kRows, int kMaxGroups>
void start_rows(const GemmArgs& p, int rows, const Queue& queue) {
  using Wide = Shape<kRows, kMaxGroups>;
  if (Wide::tiles(p.w.n, rows) >= sm_count()) start_stream_k<Wide>(p, rows, queue);
  else start_stream_k<Shape<kRows, 2>>(p, rows, queue);
}

}  // namespace

void gemm_stream_k(const GemmArgs& p, int rows, const Queue& queue) {
  if (rows <= 8) start_rows<8, 4>(p, rows, queue);
  else if (rows <= 16) start_rows<16, 4>(p, rows, queue);
  else if (rows <= 32) start_rows<32, 4>(p, rows, queue);
  else if (rows <= 64) start_rows<64, 4>(p, rows, queue);
  else if (rows <= 128) start_rows<128, 4>(p, rows, queue);
  else start_rows<256, 3>(p, rows, queue);
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
