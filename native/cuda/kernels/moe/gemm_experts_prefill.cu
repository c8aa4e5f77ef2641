// 16-bit expert GEMMs by wgmma, for many entries of each expert.
//
// A CTA computes a tile of an expert's entries and kGroups x 64 columns (rows of the weights) at a time. CTAs are
// persistent and compute one tile after the other from the list in GPU memory. One warpgroup copies several stages
// ahead and on into the next tile: weights in bulk, rows in 16-byte chunks, which gathers them. The other warpgroups
// multiply, each 64 columns with all entries of the tile.
#include <algorithm>

#include "cuda/kernels/common/wgmma.cuh"
#include "cuda/kernels/moe/gemm_experts.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace {

// kRows: entries of a tile; kGroups: warpgroups that multiply.
template <int kRows_, int kGroups_>
struct Shape {
  static constexpr int kRows = kRows_, kGroups = kGroups_, kCopiers = 128, kThreads = kCopiers + 128 * kGroups;
  // Threads that copy a block of weights each, in different warps: one thread would start all copies too late.
  static constexpr int kAskers = kGroups;
  static_assert(kAskers <= kCopiers / 32);
  static constexpr int kStageBytes = kGroups * kBlockBytes + kRows * kRowBytes;
  static constexpr int kStages = (208 << 10) / kStageBytes, kShared = kStages * kStageBytes;
  // Stages whose rows may still be in flight when those of another one are requested.
  static constexpr int kLag = 2;
  static_assert(kLag < kStages);
};

template <typename S>
__global__ void __launch_bounds__(S::kThreads, 1)
    gemm_experts_prefill_kernel(const __grid_constant__ ExpertGemmArgs e, int columns, int blocks) {
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
      barrier_init(&full[i], S::kCopiers + S::kAskers), barrier_init(&empty[i], kGroups);
    barriers_are_there();
  }
  __syncthreads();
  await_previous();
  let_next_begin();  // only here, so that the next kernel finds the lists that this kernel waited for
  const int items = __ldcg(r.tile_count) * columns, column_blocks = blocks_of(p.w.n);
  const int group = (int)threadIdx.x / 128 - 1, thread = threadIdx.x % 128;
  Pipeline<kStages> ring;
  if (group < 0) {
    constexpr int kAround = S::kCopiers / 8;  // rows that the threads copy at once, a chunk of a block each
    const char* x = reinterpret_cast<const char*>(p.x.tiles);
    const int chunk = thread % 8;
    Pipeline<kStages> told;
    int untold = 0;
    const auto tell = [&] {
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // wgmma reads the copies by the async proxy
      barrier_arrive(&full[told.stage]);
      told.next();
    };
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
      const ExpertTile tile = tile_at(r, item / columns);
      const int first_block = item % columns * kGroups, groups = min(kGroups, column_blocks - first_block);
      const char* weights = reinterpret_cast<const char*>(p.w.tiles) +
                            ((size_t)tile.expert * column_blocks + first_block) * blocks * kBlockBytes;
      int rows[kRows / kAround];  // offsets into x; -1: there is no such row
#pragma unroll
      for (int i = 0; i < kRows / kAround; i++) rows[i] = row_offset(e, tile, thread / 8 + i * kAround, chunk, blocks);
      for (int b = 0; b < blocks; b++, ring.next()) {
        barrier_wait(&empty[ring.stage], ring.parity ^ 1);
        const uint32_t to = stages + ring.stage * S::kStageBytes;
        if (const int i = thread / 32; thread % 32 == 0 && i < S::kAskers) {
          barrier_expect(&full[ring.stage], i < groups ? kBlockBytes : 0);
          if (i < groups)
            copy_bulk(to + i * kBlockBytes, weights + ((size_t)i * blocks + b) * kBlockBytes, kBlockBytes,
                      &full[ring.stage]);
        }
#pragma unroll
        for (int i = 0; i < kRows / kAround; i++)
          copy_16(to + kGroups * kBlockBytes + chunk_offset(thread / 8 + i * kAround, chunk),
                  x + max(rows[i], 0) + (size_t)b * kBlockBytes, rows[i] >= 0);
        commit_copies();
        if (untold < S::kLag) {
          untold++;
        } else {
          wait_copies<S::kLag>();
          tell();
        }
      }
    }
    wait_copies<0>();
    while (untold-- > 0) tell();
  } else {
    float d[kRows / 2];
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
      const ExpertTile tile = tile_at(r, item / columns);  // read early for the epilogue
      int last = 0;
      for (int b = 0; b < blocks; b++, ring.next()) {
        barrier_wait(&full[ring.stage], ring.parity);
        const uint32_t stage = stages + ring.stage * S::kStageBytes, own = stage + group * kBlockBytes,
                       theirs = stage + kGroups * kBlockBytes;
        begin_wgmma();
#pragma unroll
        for (int step = 0; step < 4; step++)
          Tile<kRows>::multiply(d, descriptor(own + step * kStepBytes), descriptor(theirs + step * kStepBytes),
                                step > 0 || b > 0);
        commit_wgmma();
        wait_wgmma<1>();
        if (b > 0 && thread == 0) barrier_arrive(&empty[last]);
        last = ring.stage;
      }
      wait_wgmma<0>();
      settle(d);
      if (thread == 0) barrier_arrive(&empty[last]);
      // Number i of a thread belongs to entry i / 4 * 8 + lane % 4 * 2 + i % 2; gate and up columns are interleaved.
      const int lane = thread % 32, warp = thread / 32, first = lane % 4 * 2, width = p.y.width;
      const int block = item % columns * kGroups + group;
      const float* bias = bias_of(e, tile.expert);
      const auto each_entry = [&](auto write) {
#pragma unroll
        for (int i = 0; i < kRows / 2; i += 4)
#pragma unroll
          for (int j = 0; j < 2; j++)
            if (const int slot = first + i / 4 * 8 + j; slot < tile.count)
              write(tile.first + slot, d[i + j], d[i + 2 + j]);
      };
      if (p.gated) {
        const int column = block * (kBlock / 2) + warp * 8 + lane / 4;
        const bool there = column < width;
        const float gate_bias = bias && there ? bias[column] : 0, up_bias = bias && there ? bias[width + column] : 0;
        if (there)
          each_entry([&](int entry, float gate, float up) {
            if (bias) gate = __fadd_rn(gate, gate_bias), up = __fadd_rn(up, up_bias);
            put(p.y, entry, column, gated_by(e.gating, gate, up));
          });
      } else {
        const int column = block * kBlock + warp * 16 + lane / 4;
        float added[2] = {};
#pragma unroll
        for (int h = 0; h < 2; h++)
          if (bias && column + 8 * h < width) added[h] = bias[column + 8 * h];
        each_entry([&](int entry, float low, float high) {
          if (column < width) put(p.y, entry, column, bias ? __fadd_rn(low, added[0]) : low);
          if (column + 8 < width) put(p.y, entry, column + 8, bias ? __fadd_rn(high, added[1]) : high);
        });
      }
      __syncwarp();
    }
  }
#endif
}

template <typename S>
void start_prefill(const ExpertGemmArgs& p, int entries, const Queue& queue) {
  const int columns = ceil_div(blocks_of(p.gemm.w.n), S::kGroups);
  allow_shared(gemm_experts_prefill_kernel<S>, S::kShared);
  const int grid = std::min(max_items(p, entries, S::kRows, columns), sm_count());
  start(queue, gemm_experts_prefill_kernel<S>, grid, S::kThreads, S::kShared, p, columns, blocks_of(p.gemm.w.k));
  launched("gemm_experts_prefill");
}

}  // namespace

void gemm_experts_prefill(const ExpertGemmArgs& p, int entries, int tile_rows, const Queue& queue) {
  if (tile_rows == 64) start_prefill<Shape<64, 4>>(p, entries, queue);
  else start_prefill<Shape<128, 4>>(p, entries, queue);
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
