// Expert GEMMs on Hopper: of 16-bit weights for many entries of each expert, of MXFP4 for any number.
//
// A CTA computes a tile of an expert's entries and kGroups x 64 columns (rows of the weights) at a time. CTAs are
// persistent and compute one tile after the other from the list in GPU memory. One warpgroup copies several stages
// ahead and on into the next tile: weights in bulk, rows in 16-byte chunks, which gathers them. The other warpgroups
// multiply, each 64 columns with all entries of the tile. MXFP4 becomes bfloat16 in registers: wgmma's first operand,
// or for tiles of few entries mma.sync's, which gives the same bits in fewer instructions.
#include <algorithm>
#include <type_traits>

#include "cuda/kernels/common/wgmma.cuh"
#include "cuda/kernels/moe/copy_stages.cuh"
#include "cuda/kernels/moe/one_row.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace {

// kRows: entries of a tile; kGroups: warpgroups that multiply. kMx: weights in MXFP4. kChooses: the step has one row,
// every CTA chooses its experts itself, and one lists them.
template <int kRows_, int kGroups_, bool kMx_ = false, bool kChooses_ = false>
struct Shape {
  static constexpr bool kChooses = kChooses_;
  static constexpr int kRows = kRows_, kGroups = kGroups_, kCopiers = 128, kThreads = kCopiers + 128 * kGroups;
  static constexpr bool kMx = kMx_, kFew = kMx && kRows <= 16;
  // Blocks of K of a stage; bytes of the weights of a block and of a warpgroup's share of a stage.
  static constexpr int kDepth = !kMx   ? 1
                                : kFew ? 4
                                       : 2,
                       kWeightBlock = kMx ? kMxBlockBytes : kBlockBytes, kWeightBytes = kDepth * kWeightBlock;
  // Threads that copy a block of weights each, in different warps: one thread would start all copies too late.
  static constexpr int kAskers = kGroups;
  static_assert(kAskers <= kCopiers / 32);
  static constexpr int kRowsAt = (kGroups * kWeightBytes + 1023) / 1024 * 1024, kRowsBytes = kRows * kRowBytes;
  static constexpr int kStageBytes = kRowsAt + kDepth * kRowsBytes;
  static constexpr int kStages = (208 << 10) / kStageBytes;
  // Behind the stages each warpgroup has memory for write_staged(), if there are many entries.
  static constexpr bool kStaged = kRows >= 2 * kStagedRows;
  static constexpr int kShared = kStages * kStageBytes + (kStaged ? kGroups * kStagedBytes : 0);
  static_assert(kShared <= 227 << 10);
  // Rows that the copying threads copy at once, a chunk of a block each; copies of a thread for a stage.
  static constexpr int kAround = kCopiers / 8, kCopies = kDepth * kRows / kAround,
                       kPlaces = kCopies > kDepth ? kRows / kAround : 1;
  // Arrivals at an empty stage of a warpgroup: with MXFP4 each warp itself has read its weights.
  static constexpr int kEnds = kMx ? 4 : 1;
  static constexpr int kLag = 0;  // see copy_stages()
};

// Products of a warp's 16 columns in MXFP4 and few rows, from a stage. A sum is one chain of products.
template <typename S>
class FewRows {
 public:
  __device__ explicit FewRows(int group) {
    const int lane = threadIdx.x % 32, tile = group * S::kWeightBytes + threadIdx.x % 128 / 32 * kMxTileBytes;
    values_ = tile + MxQuants::values_at(), scales_ = tile + MxQuants::scales_at();
    for (int i = 0; i < 2; i++) x_[i] = S::kRowsAt + chunk_offset(lane % 8, 4 * i + lane / 8);
    // Keeps these in registers: the compiler would compute them again for every stage.
    asm volatile("" : "+r"(values_), "+r"(scales_), "+r"(x_[0]), "+r"(x_[1]));
  }
  // d += the first `there` blocks of K of a stage at this address. A whole stage has no branches, so that the compiler
  // reads a block's values, and recovers its weights, during the products of the blocks before it.
  __device__ __forceinline__ void multiply(uint32_t stage, int there, float (&d)[S::kRows / 2]) const {
    if (there == S::kDepth) {
      MxQuants quants[S::kDepth];
#pragma unroll
      for (int j = 0; j < S::kDepth; j++) quants[j] = read(stage, j);
#pragma unroll
      for (int j = 0; j < S::kDepth; j++) multiply(stage + j * S::kRowsBytes, quants[j], d);
    } else {
#pragma unroll 1
      for (int j = 0; j < there; j++) multiply(stage + j * S::kRowsBytes, read(stage, j), d);
    }
  }

 private:
  __device__ __forceinline__ MxQuants read(uint32_t stage, int j) const {
    return {load_16(stage + values_ + j * S::kWeightBlock), load_4(stage + scales_ + j * S::kWeightBlock)};
  }
  __device__ __forceinline__ void multiply(uint32_t rows, const MxQuants& quants, float (&d)[S::kRows / 2]) const {
    uint32_t y[S::kRows / 8][4];
#pragma unroll
    for (int step = 0; step < 4; step++) {
      if (step % 2 == 0) {
#pragma unroll
        for (int t = 0; t < S::kRows / 8; t++) load_cores(y[t], rows + x_[step / 2] + t * 8 * kRowBytes);
      }
      uint32_t a[4];
      quants.fragment(step, a);
#pragma unroll
      for (int t = 0; t < S::kRows / 8; t++)
        multiply_add(reinterpret_cast<float(&)[4]>(d[4 * t]), a, y[t][step % 2 * 2], y[t][step % 2 * 2 + 1]);
    }
  }

  uint32_t values_, scales_, x_[2];  // a lane's offsets in a stage
};

template <typename S>
__global__ void __launch_bounds__(S::kThreads, 1)
    gemm_experts_prefill_kernel(const __grid_constant__ ExpertGemmArgs e, const __grid_constant__ ChosenRow row,
                                int columns, int blocks) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kRows = S::kRows, kGroups = S::kGroups, kStages = S::kStages;
  extern __shared__ __align__(1024) char shared[];
  __shared__ uint64_t full[kStages], empty[kStages];
  const GemmArgs& p = e.gemm;
  const Routing& r = e.routing;
  const uint32_t stages = shared_address(shared);
  if (threadIdx.x == 0) {
    // Arrivals at a full stage: one of each copying thread for its rows, one of each thread that copies weights.
    for (int i = 0; i < kStages; i++)
      barrier_init(&full[i], S::kCopiers + S::kAskers), barrier_init(&empty[i], S::kEnds * kGroups);
    barriers_are_there();
  }
  __syncthreads();
  // After such a GEMM the lists are there, and MXFP4, of which a step reads much, is copied before the rows are
  // written.
  const bool early = S::kMx && e.follows;
  bool there = true;
  if constexpr (S::kChooses) there = is_there(row);
  if (!early) await_previous();
  __shared__ std::conditional_t<S::kChooses, Chosen, char> chosen;
  if constexpr (S::kChooses) {
    __shared__ float scratch[2 * kMaxExperts];
    choose(row, there, r, scratch, chosen);
    if (blockIdx.x == 0) {
      if (threadIdx.x < 32) weigh(row, r, chosen), list_chosen(r, chosen);
      __threadfence();
      __syncthreads();
    }
  }
  let_next_begin();  // only here, so that the next kernel finds the lists that this kernel waited for, or wrote
  const auto tile_of = [&](int i) -> ExpertTile {
    if constexpr (S::kChooses) return {chosen.experts[i], i, 1};
    else return tile_at(r, i);
  };
  int tiles;
  if constexpr (S::kChooses) tiles = chosen.count;
  else tiles = __ldcg(r.tile_count);
  const int items = tiles * columns, column_blocks = blocks_of(p.w.n);
  const int group = warpgroup() - 1, thread = threadIdx.x % 128, stages_of_k = (blocks + S::kDepth - 1) / S::kDepth;
  if (group < 0) {
    constexpr int kAround = S::kAround;
    const char* x = reinterpret_cast<const char*>(p.x.tiles);
    const char* matrices =
        S::kMx ? reinterpret_cast<const char*>(p.w.quants.words) : reinterpret_cast<const char*>(p.w.tiles);
    const int chunk = thread % 8;
    // Copies the weights of stage number b of an item to a stage.
    const auto ask = [&](const ExpertTile& tile, int item, int b, int stage) {
      const int i = thread / 32, block = item % columns * kGroups + i;
      if (thread % 32 || i >= S::kAskers) return;
      const int bytes = block < column_blocks ? min(S::kDepth, blocks - b * S::kDepth) * S::kWeightBlock : 0;
      barrier_expect(&full[stage], bytes);
      if (bytes)
        copy_bulk(stages + stage * S::kStageBytes + i * S::kWeightBytes,
                  matrices + (((size_t)tile.expert * column_blocks + block) * blocks + b * S::kDepth) * S::kWeightBlock,
                  bytes, &full[stage]);
    };
    struct Places {
      int offsets[S::kPlaces];  // into x; -1: there is no such row
    };
    const auto rows_of = [&](const ExpertTile& tile) {
      Places rows;
#pragma unroll
      for (int i = 0; i < S::kPlaces; i++)
        rows.offsets[i] = row_offset<S::kChooses>(e, tile, (thread / 8 + i * kAround) % kRows, chunk, blocks);
      return rows;
    };
    const auto copy = [&](const Places& rows, int b, int stage) {
      const uint32_t to = stages + stage * S::kStageBytes + S::kRowsAt;
#pragma unroll
      for (int i = 0; i < S::kCopies; i++) {
        const int row = thread / 8 + i * kAround, block = b * S::kDepth + row / kRows,
                  from = rows.offsets[i % S::kPlaces];
        copy_16(to + row / kRows * S::kRowsBytes + chunk_offset(row % kRows, chunk),
                x + max(from, 0) + (size_t)min(block, blocks - 1) * kBlockBytes, from >= 0 && block < blocks);
      }
    };
    copy_stages<S>(full, empty, tile_of, items, columns, stages_of_k, early, ask, rows_of, copy);
  } else {
    Pipeline<kStages> ring;
    float d[kRows / 2];
    uint32_t weights[S::kFew ? 1 : S::kDepth][4][4];  // of blocks of K in MXFP4: recovered while others multiply
    const std::conditional_t<S::kFew, FewRows<S>, int> few(group);
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
      const ExpertTile tile = tile_of(item / columns);  // read early for the epilogue
      int last = 0;
      const bool ends = thread % (128 / S::kEnds) == 0;
      if constexpr (S::kFew) {
#pragma unroll
        for (int i = 0; i < kRows / 2; i++) d[i] = 0;
      }
      for (int b = 0; b < stages_of_k; b++, ring.next()) {
        barrier_wait(&full[ring.stage], ring.parity);
        // The descriptor of something at this offset in the stage, computed once for a warp.
        const auto at = [&](int offset) {
          return descriptor(stages + __shfl_sync(~0u, ring.stage, 0) * S::kStageBytes + offset);
        };
        if constexpr (S::kMx) {
          if constexpr (S::kFew) {
            few.multiply(stages + ring.stage * S::kStageBytes, min(S::kDepth, blocks - b * S::kDepth), d);
            __syncwarp();
            if (ends) barrier_arrive(&empty[ring.stage]);
          } else {
            const uint64_t theirs = at(S::kRowsAt);
            const char* tiles =
                shared + ring.stage * S::kStageBytes + group * S::kWeightBytes + thread / 32 * kMxTileBytes;
            fence_for_wgmma();
#pragma unroll
            for (int j = 0; j < S::kDepth; j++) {
              MxQuants quants;
              quants.load(tiles + j * S::kWeightBlock);
              if (b * S::kDepth + j >= blocks) quants.scales = 0;  // the rows are zero there, too
              wait_wgmma<1>();  // the product before the previous one reads its weights from the same registers
              if (j == 1 && b > 0 && ends) barrier_arrive(&empty[last]);
#pragma unroll
              for (int step = 0; step < 4; step++) quants.fragment(step, weights[j][step]);
              begin_wgmma();
#pragma unroll
              for (int step = 0; step < 4; step++)
                RegisterTile<kRows>::multiply(d, weights[j][step],
                                              further(theirs, j * S::kRowsBytes + step * kStepBytes),
                                              step > 0 || j > 0 || b > 0);
              commit_wgmma();
            }
          }
        } else {
          const uint64_t own = at(group * S::kWeightBytes), theirs = at(S::kRowsAt);
          fence_for_wgmma();
          begin_wgmma();
#pragma unroll
          for (int step = 0; step < 4; step++)
            Tile<kRows>::multiply(d, further(own, step * kStepBytes), further(theirs, step * kStepBytes),
                                  step > 0 || b > 0);
          commit_wgmma();
          wait_wgmma<1>();
          if (b > 0 && ends) barrier_arrive(&empty[last]);
        }
        last = ring.stage;
      }
      if constexpr (!S::kFew) {
        wait_wgmma<0>();
        settle(d);
        if (ends) barrier_arrive(&empty[last]);
      }
      const auto write = [&](int block) {
        if constexpr (S::kStaged)
          if (p.y.tiles && !p.gated)
            return write_staged(e, tile, block, d, shared + kStages * S::kStageBytes + group * kStagedBytes);
        write_sums(e, tile, block, d);
      };
      write(item % columns * kGroups + group);
      __syncwarp();
    }
  }
#endif
}

template <typename S>
void start_prefill(const ExpertGemmArgs& p, int entries, const Queue& queue, const ChosenRow& row = {}) {
  const int columns = ceil_div(blocks_of(p.gemm.w.n), S::kGroups);
  const int grid = std::min(max_items(p, entries, S::kRows, columns), sm_count());
  start(queue, gemm_experts_prefill_kernel<S>, grid, S::kThreads, S::kShared, p, row, columns, blocks_of(p.gemm.w.k));
}

// With few tiles, few columns each keep more SMs busy: the warpgroups that multiply in a CTA.
int groups_of(const ExpertGemmArgs& p, int entries) {
  for (int groups : {2, 3})
    if (max_items(p, entries, 8, ceil_div(blocks_of(p.gemm.w.n), groups)) <= sm_count()) return groups;
  return 4;
}

template <bool kAll = kAllFormats>
void start_tile(const ExpertGemmArgs& p, int entries, int tile_rows, const Queue& queue) {
  if constexpr (kAll) {
    if (p.gemm.w.kind == Kind::mxfp4) {
      const int groups = tile_rows <= 8 ? groups_of(p, entries) : 0;
      if (groups == 2) start_prefill<Shape<8, 2, true>>(p, entries, queue);
      else if (groups == 3) start_prefill<Shape<8, 3, true>>(p, entries, queue);
      else if (groups == 4) start_prefill<Shape<8, 4, true>>(p, entries, queue);
      else if (tile_rows <= 16) start_prefill<Shape<16, 4, true>>(p, entries, queue);
      else if (tile_rows <= 32) start_prefill<Shape<32, 4, true>>(p, entries, queue);
      else if (tile_rows <= 48) start_prefill<Shape<48, 4, true>>(p, entries, queue);
      else if (tile_rows <= 64) start_prefill<Shape<64, 3, true>>(p, entries, queue);
      else start_prefill<Shape<128, 3, true>>(p, entries, queue);
      return;
    }
  }
  if (tile_rows == 64) start_prefill<Shape<64, 4>>(p, entries, queue);
  else start_prefill<Shape<128, 4>>(p, entries, queue);
}

}  // namespace

void gemm_chosen_experts(const ExpertGemmArgs& p, const ChosenRow& row, const Queue& queue) {
  if constexpr (kAllFormats) {
    const int entries = p.routing.top, groups = groups_of(p, entries);
    if (groups == 2) start_prefill<Shape<8, 2, true, true>>(p, entries, queue, row);
    else if (groups == 3) start_prefill<Shape<8, 3, true, true>>(p, entries, queue, row);
    else start_prefill<Shape<8, 4, true, true>>(p, entries, queue, row);
  }
}

void gemm_experts_prefill(const ExpertGemmArgs& p, int entries, int tile_rows, const Queue& queue) {
  start_tile(p, entries, tile_rows, queue);
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
