// Products in bfloat16 by wgmma where all that counts is how fast the weights stream by: some rows, as when sequences
// decode.
//
// A block of threads stays on its processor and has a range of units: pieces of K (tiles.h) of tiles of columns (rows
// of the weights), in order. One thread has blocks of both sides copied into shared memory, as far ahead as there is
// room, on and on through the units; warpgroups multiply, each 64 columns with all rows. Who has the first piece of a
// tile finishes it: further pieces are added in ascending order, its own in registers, others' (which that block of
// threads computed first of all) out of global memory. Where rows are so many that the second-level cache is the limit,
// two blocks of threads with columns side by side are a cluster, and each copies half of the rows for both.
#include <algorithm>

#include "cuda/kernels/linear_wgmma.h"
#include "cuda/kernels/wgmma.cuh"

namespace as {
namespace cuda {
namespace {

// kRows: of activations; kGroups: warpgroups, of 64 columns each; kPair: blocks of threads of a cluster.
template <int kRows_, int kGroups_, int kPair_>
struct Shape {
  static constexpr int kRows = kRows_, kGroups = kGroups_, kPair = kPair_;
  static constexpr int kThreads = 128 * (1 + kGroups);
  static constexpr int kPartBytes = kRows * kRowBytes, kStageBytes = kGroups * kBlockBytes + kPartBytes;
  static constexpr int kStages = (216 << 10) / kStageBytes < 12 ? (216 << 10) / kStageBytes : 12;
  static constexpr int kShared = kStages * kStageBytes;
  static constexpr int kValues = kRows / 2;  // of a thread
  static constexpr size_t kPartial = (size_t)kGroups * kBlock * kRows;

  static int units(int n, int rows, const Pieces& k) {
    return (blocks_of(n) + kGroups * kPair - 1) / (kGroups * kPair) * ((rows + kRows - 1) / kRows) * k.count;
  }
};

// What a cluster has: units [begin, end) of all; unit: (tile of columns, tile of rows, piece of K).
struct Units {
  int begin, end;
  __device__ Units(int units, int cluster, int clusters) {
    begin = (int)((int64_t)units * cluster / clusters), end = (int)((int64_t)units * (cluster + 1) / clusters);
  }
};
// Whose a unit is.
__device__ int owner_of(int unit, int units, int clusters) {
  return (int)(((int64_t)(unit + 1) * clusters - 1) / units);
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
__device__ void set_flag(int* flag, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}
__device__ int get_flag(const int* flag) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}
#endif

template <typename S>
__global__ void __launch_bounds__(S::kThreads, 1)
    linear_stream_kernel(const __grid_constant__ Product p, int rows, Pieces k, Scratch scratch) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kRows = S::kRows, kGroups = S::kGroups, kPair = S::kPair;
  constexpr int kStages = S::kStages, kValues = S::kValues, kTogether = kValues < 8 ? kValues : 8;
  extern __shared__ __align__(1024) char shared[];
  __shared__ uint64_t full[kStages], empty[kStages];
  const int row_tiles = (rows + kRows - 1) / kRows, column_blocks = blocks_of(p.w.n);
  const int units = (column_blocks + kGroups * kPair - 1) / (kGroups * kPair) * row_tiles * k.count;
  const int rank = blockIdx.x % kPair, clusters = gridDim.x / kPair;
  const Units own(units, blockIdx.x / kPair, clusters);
  const uint32_t stages = shared_address(shared);
  let_next_begin();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; i++) barrier_init(&full[i], 1), barrier_init(&empty[i], kPair * kGroups);
    barriers_are_there();
  }
  __syncthreads();
  if constexpr (kPair > 1) cluster_barrier();
  const int group = threadIdx.x / 128 - 1, thread = threadIdx.x % 128, lane = threadIdx.x % 32;
  if (group < 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
    if (threadIdx.x == 0) {
      const char* weights = reinterpret_cast<const char*>(p.w.tiles);
      const char* x = reinterpret_cast<const char*>(p.x.tiles);
      const uint64_t policy = evicted_first();
      struct Step {
        int unit, b, end, column_block, groups, row, bytes;  // b: of K; bytes: of rows
      };
      const auto at_unit = [&](Step& s) {
        const int piece = s.unit % k.count, tile = s.unit / k.count;
        s.b = piece * k.length, s.end = min(s.b + k.length, k.blocks);
        s.column_block = (tile / row_tiles * kPair + rank) * kGroups;
        s.groups = max(0, min(kGroups, column_blocks - s.column_block));
        s.row = tile % row_tiles * kRows;
        // The rows' blocks that there are: of 64, or a part of one.
        s.bytes = kRows <= kBlock ? S::kPartBytes : min(kRows / kBlock, blocks_of(rows) - s.row / kBlock) * kBlockBytes;
      };
      const auto next = [&](Step& s) {
        if (++s.b == s.end && ++s.unit < own.end) at_unit(s);
      };
      const auto fetch_weights = [&](const Step& s, int stage) {
        barrier_expect(&full[stage], s.groups * kBlockBytes + s.bytes);
        for (int i = 0; i < s.groups; i++)
          copy_bulk(stages + stage * S::kStageBytes + i * kBlockBytes,
                    weights + ((size_t)(s.column_block + i) * k.blocks + s.b) * kBlockBytes, kBlockBytes, &full[stage],
                    policy);
      };
      const auto fetch_rows = [&](const Step& s, int stage) {
        const uint32_t to = stages + stage * S::kStageBytes + kGroups * kBlockBytes;
        const char* from = x + s.row % kBlock * kRowBytes;
        const int bytes = min(s.bytes, kBlockBytes) / kPair, behind = rank * bytes;
        for (int done = 0; done < s.bytes; done += kBlockBytes) {
          const char* block = from + ((size_t)(s.row / kBlock + done / kBlockBytes) * k.blocks + s.b) * kBlockBytes;
          if constexpr (kPair > 1)
            copy_bulk_to(to + done + behind, block + behind, bytes, &full[stage], (1 << kPair) - 1);
          else copy_bulk(to + done, block, bytes, &full[stage]);
        }
      };
      // Weights are on their way before the kernel before this one has made the rows.
      Step ahead{own.begin};
      at_unit(ahead);
      Step behind = ahead;
      int begun = 0;
      for (; begun < kStages && ahead.unit < own.end; begun++, next(ahead)) fetch_weights(ahead, begun);
      await_previous();
      for (int i = 0; i < begun; i++, next(behind)) fetch_rows(behind, i);
      for (int stage = 0, turn = 0; ahead.unit < own.end; next(ahead)) {
        barrier_wait(&empty[stage], turn);
        fetch_weights(ahead, stage), fetch_rows(ahead, stage);
        if (++stage == kStages) stage = 0, turn ^= 1;
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kGroups > 2 ? 160 : 208));
    await_previous();
    const auto meet = [] { asm volatile("bar.sync 1, %0;" ::"n"(128 * kGroups) : "memory"); };
    // Where a thread's sums of a partial result are: adjacent threads side by side.
    const auto partial_of = [&](int block, int index) {
      return scratch.sums + ((size_t)block * (kMostPieces - 1) + index) * S::kPartial + threadIdx.x - 128;
    };
    const auto release = [&](int stage) {
      if constexpr (kPair > 1) {
        if (thread < kPair) barrier_arrive_at(&empty[stage], thread);
      } else {
        if (thread == 0) barrier_arrive(&empty[stage]);
      }
    };
    int stage = 0, turn = 0;
    float d[kValues], total[kValues];
    for (int unit = own.begin; unit < own.end;) {
      const int tile = unit / k.count, first = unit % k.count, end = min(k.count, first + own.end - unit);
      for (int piece = first; piece < end; piece++) {
        const int blocks = min(k.length, k.blocks - piece * k.length);
        int before = 0;
        for (int b = 0; b < blocks; b++) {
          barrier_wait(&full[stage], turn);
          const uint32_t weights = stages + stage * S::kStageBytes + group * kBlockBytes,
                         x = stages + stage * S::kStageBytes + kGroups * kBlockBytes;
          begin_products();
#pragma unroll
          for (int step = 0; step < 4; step++)
            Tile<kRows>::multiply(d, descriptor(weights + step * kStepBytes), descriptor(x + step * kStepBytes),
                                  step > 0 || b > 0);
          commit_products();
          wait_products<1>();
          if (b > 0) release(before);
          before = stage;
          if (++stage == kStages) stage = 0, turn ^= 1;
        }
        wait_products<0>();
        settle(d);
        release(before);
        if (first > 0) {
          float* to = partial_of(blockIdx.x, piece - first);
#pragma unroll
          for (int i = 0; i < kValues; i++) __stcg(to + i * (128 * kGroups), d[i]);
        } else {
#pragma unroll
          for (int i = 0; i < kValues; i++) total[i] = piece ? __fadd_rn(total[i], d[i]) : d[i];
        }
      }
      unit += end - first;
      if (first > 0) {  // somebody else finishes this tile
        meet();
        if (threadIdx.x == 128) set_flag(scratch.flags + blockIdx.x, 1);
        continue;
      }
      for (int piece = end; piece < k.count;) {
        const int theirs = owner_of(tile * k.count + piece, units, clusters), other = theirs * kPair + rank,
                  until = min(k.count, Units(units, theirs, clusters).end - tile * k.count);
        if (threadIdx.x == 128) {
          while (!get_flag(scratch.flags + other)) {}
          set_flag(scratch.flags + other, 0);
        }
        meet();
        for (int index = 0; piece < until; piece++, index++) {
          const float* from = partial_of(other, index);
#pragma unroll
          for (int i = 0; i < kValues; i += kTogether) {
            float more[kTogether];
#pragma unroll
            for (int j = 0; j < kTogether; j++) more[j] = __ldcg(from + (i + j) * (128 * kGroups));
#pragma unroll
            for (int j = 0; j < kTogether; j++) total[i + j] = __fadd_rn(total[i + j], more[j]);
          }
        }
      }
      // Number i of a thread is of row i / 4 * 8 + lane % 4 * 2 + i % 2; gates and what they gate are side by side.
      const int row = tile % row_tiles * kRows + lane % 4 * 2;
      const int column_block = (tile / row_tiles * kPair + rank) * kGroups + group, core = thread / 32 * 16 + lane / 4;
      if (p.gated) {
        const int column = column_block * (kBlock / 2) + core / 16 * 8 + core % 16;
#pragma unroll
        for (int i = 0; i < kValues; i += 4)
#pragma unroll
          for (int j = 0; j < 2; j++)
            if (const int at = row + i / 4 * 8 + j; at < rows && column < p.y.width)
              finish_gated(p, at, column, total[i + j], total[i + 2 + j]);
      } else {
#pragma unroll
        for (int i = 0; i < kValues; i += kTogether)
          finish<kTogether>(p, rows, p.w.n, total + i, [&](int j) {
            return Place{row + (i + j) / 4 * 8 + j % 2, column_block * kBlock + core + j % 4 / 2 * 8};
          });
      }
    }
  }
  if constexpr (kPair > 1) {
    __syncwarp();
    cluster_barrier();  // the other block may still tell this one's barriers
  }
#endif
}

// All clusters are at work at the same time, as they wait for each other.
template <typename S>
int most_clusters() {
  static const int most = [] {
    allow_shared(linear_stream_kernel<S>, S::kShared);
    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = S::kPair, cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(kScratchBlocks / S::kPair * S::kPair), config.blockDim = dim3(S::kThreads);
    config.dynamicSmemBytes = S::kShared, config.attrs = &cluster, config.numAttrs = 1;
    int found = 0;
    cudaOccupancyMaxActiveClusters(&found, linear_stream_kernel<S>, &config);
    return std::clamp(found, 1, kScratchBlocks / S::kPair);
  }();
  return most;
}

template <typename S>
void start_stream(const Product& p, int rows, const Queue& queue) {
  static_assert(S::kPartial * (kMostPieces - 1) <= kScratchFloats);
  const Pieces k(p.w.k);
  const int clusters = std::min(S::units(p.w.n, rows, k), most_clusters<S>());
  start_clusters(queue, linear_stream_kernel<S>, dim3(clusters * S::kPair), dim3(S::kPair), S::kThreads, S::kShared, p,
                 rows, k, queue.scratch);
  launched("linear in bfloat16, weights streaming");
}

// What the busiest cluster copies, in bytes.
template <typename S>
int64_t cost(const Product& p, int rows) {
  const Pieces k(p.w.k);
  const int turns = ceil_div(S::units(p.w.n, rows, k), most_clusters<S>());
  return (int64_t)turns * k.length * (S::kGroups * kBlockBytes + S::kPartBytes / S::kPair);
}

template <int kRows>
void start_rows(const Product& p, int rows, const Queue& queue) {
  constexpr int kPair = kRows <= 16 ? 1 : 2;
  using Two = Shape<kRows, 2, kPair>;
  using Three = Shape<kRows, 3, kPair>;
  if (cost<Three>(p, rows) < cost<Two>(p, rows)) start_stream<Three>(p, rows, queue);
  else start_stream<Two>(p, rows, queue);
}

}  // namespace

void linear_stream(const Product& p, int rows, const Queue& queue) {
  if (rows <= 8) start_rows<8>(p, rows, queue);
  else if (rows <= 16) start_rows<16>(p, rows, queue);
  else if (rows <= 32) start_rows<32>(p, rows, queue);
  else if (rows <= 64) start_rows<64>(p, rows, queue);
  else start_rows<128>(p, rows, queue);
}

}  // namespace cuda
}  // namespace as
