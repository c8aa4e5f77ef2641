// 16-bit split-K GEMMs by wgmma for decode batches. They are bound by the bandwidth of the weights, and have too many
// rows for every CTA to read all of them for only a few columns.
//
// A cluster of CTAs has 64 or 128 columns (rows of the weights) and up to 256 rows of activations; each CTA computes
// one split-K part (tiles.h). Some threads copy both operands to shared memory, several stages ahead. Then each CTA
// adds the parts of some values in ascending order, from the shared memory of all CTAs.
#include <algorithm>

#include "cuda/kernels/common/wgmma.cuh"
#include "cuda/kernels/gemm/epilogue.cuh"
#include "cuda/kernels/gemm/gemm_wgmma.h"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace {

// kRows: rows of activations; kGroups: warpgroups of 64 columns each; kBeside: CTAs of a cluster that compute the same
// split-K part of adjacent columns and share the rows that they copy; kAlone: an SM has one CTA.
template <int kRows_, int kGroups_, int kBeside_, bool kAlone_>
struct Shape {
  static constexpr int kRows = kRows_, kGroups = kGroups_, kBeside = kBeside_;
  static constexpr bool kAlone = kAlone_;
  static constexpr int kColumns = kBlock * kGroups;
  [[maybe_unused]] static constexpr int kStride = kColumns + 4;  // of sums; avoids bank conflicts between rows
  static constexpr int kStageBytes = (kColumns + kRows) * kRowBytes;
  static constexpr int kLeastStages = kRows <= 16 ? 5 : kRows <= 64 ? 4 : 3, kMaxStages = kAlone ? 8 : 12;
  static constexpr int kCopiers = kAlone ? 2 : 1;  // warps that copy weights; as many copy rows
  static constexpr int kThreads = 128 * kGroups + 64 * kCopiers;
  [[maybe_unused]] static constexpr int kAsked = kRows <= 32 ? 1 : 2;  // groups of columns that a thread prefetches
};

// Shared memory of a launch: the number of stages, and whether all rows of a split-K part have a buffer behind them.
struct Room {
  int stages;
  bool whole;
};
constexpr int kShort = 16;  // blocks of K of the longest split-K part whose rows may all have a buffer

template <typename S>
__global__ void __launch_bounds__(S::kThreads, S::kAlone ? 1 : 2)
    gemm_split_k_kernel(const __grid_constant__ GemmArgs p, int rows, SplitK k, Room room) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kRows = S::kRows, kGroups = S::kGroups, kBeside = S::kBeside, kCopiers = S::kCopiers;
  extern __shared__ __align__(1024) char shared[];
  __shared__ uint64_t full[S::kMaxStages], empty[S::kMaxStages];
  const int k_part = blockIdx.x, column_block = blockIdx.y * kGroups, first_row = blockIdx.z * kRows;
  // Order of the CTAs of a cluster: those of the same columns are adjacent.
  const int beside = blockIdx.y % kBeside, first_rank = beside * k.count;
  const int first = k_part * k.length, blocks = min(k.length, k.blocks - first);
  const int group = warpgroup(), lane = threadIdx.x % 32;
  const uint32_t stages = shared_address(shared);
  if (threadIdx.x == 0) {
    for (int i = 0; i < room.stages; i++)
      barrier_init(&full[i], (room.whole ? 1 : 2) * kCopiers), barrier_init(&empty[i], kGroups * kBeside);
    barriers_are_there();
  }
  __syncthreads();
  if (kBeside > 1) cluster_barrier();
  // At the end the threads of the cluster take turns over groups of four columns; each prefetches its first groups.
  const int fours = (p.gated ? S::kColumns / 2 : S::kColumns) / 4, own = k_part * blockDim.x + threadIdx.x;
  const int count = min(kRows, rows - first_row) * fours, step = k.count * blockDim.x;
  const int width = p.gated ? p.y.width : p.w.n, first_column = column_block * (p.gated ? kBlock / 2 : kBlock);
  Added added[S::kAsked];
  const auto ask = [&] {
    await_previous();
    if (p.gated || !(p.bias || p.adds)) return;
#pragma unroll
    for (int j = 0; j < S::kAsked; j++)
      if (const int i = own + j * step, column = first_column + i % fours * 4; i < count && column < width)
        added[j] = read_added(p, first_row + i / fours, column);
  };
  // All threads copy the rows of a short split-K part: one thread would take longer to issue the copies than they take.
  const uint32_t whole = stages + room.stages * S::kStageBytes;
  const auto bring_rows = [&] {
    const char* from = reinterpret_cast<const char*>(p.x.tiles) + (size_t)first * kBlockBytes;
    await_previous();
    for (int i = threadIdx.x; i < blocks * kRows * (kRowBytes / 16); i += 128 * kGroups) {
      const int block = i * 16 / (kRows * kRowBytes), at = i * 16 % (kRows * kRowBytes);
      if (at < rows * kRowBytes)
        copy_16(whole + block * kRows * kRowBytes + at, from + (size_t)block * kBlockBytes + at);
    }
    commit_copies();
  };
  if (group == kGroups) {
    // Some warps copy weights, starting before the previous kernel has computed the rows; other warps copy rows. One
    // thread would take longer to issue all copies than they take. Every copying thread arrives at each stage, so that
    // none gets a full ring ahead.
    if (elected()) {
      const int groups = max(0, min(kGroups, blocks_of(p.w.n) - column_block));
      // The number of blocks of rows; up to 64 rows are a part of one block.
      const int row_blocks = kRows <= kBlock ? 1 : min(kRows / kBlock, blocks_of(rows) - first_row / kBlock);
      const int row_bytes = kRows <= kBlock ? min(kRows, rows - first_row) * kRowBytes : kBlockBytes;
      const size_t stride = (size_t)k.blocks * kBlockBytes;
      const int warp = threadIdx.x % 128 / 32, own = warp % kCopiers;
      const bool copies_rows = warp >= kCopiers;
      const char* from = copies_rows ? reinterpret_cast<const char*>(p.x.tiles) + first_row / kBlock * stride +
                                           first_row % kBlock * kRowBytes
                                     : reinterpret_cast<const char*>(p.w.tiles) + column_block * stride;
      from += (size_t)first * kBlockBytes;
      if (copies_rows) await_previous();
      DynamicPipeline ring{room.stages};
      for (int b = room.whole && copies_rows ? blocks : 0; b < blocks; b++, ring.next(), from += kBlockBytes) {
        uint64_t* barrier = &full[ring.stage];
        const uint32_t stage = stages + ring.stage * S::kStageBytes, x = stage + kGroups * kBlockBytes;
        barrier_wait(&empty[ring.stage], ring.parity ^ 1);
        if (copies_rows) {
          barrier_arrive(barrier);
          for (int i = own * kBeside + beside; i < row_blocks; i += kCopiers * kBeside) {
            const uint32_t to = x + i * kBlockBytes;
            if (kBeside == 1) copy_bulk(to, from + i * stride, row_bytes, barrier);
            else copy_bulk_to(to, from + i * stride, row_bytes, barrier, (1 | 1 << k.count) << k_part);
          }
        } else {
          if (own == 0) barrier_expect(barrier, groups * kBlockBytes + (room.whole ? 0 : row_blocks * row_bytes));
          else barrier_arrive(barrier);
          for (int i = own; i < groups; i += kCopiers)
            copy_bulk(stage + i * kBlockBytes, from + i * stride, kBlockBytes, barrier, evicted_first());
        }
      }
      // Not earlier: the next kernel would load its weights while these are still in flight, and memory would idle
      // after they have arrived.
      if (!copies_rows) let_next_begin();
    }
    __syncwarp();
    ask();
  } else {
    if (room.whole) bring_rows();
    ask();
    if (room.whole) {
      wait_copies<0>();
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      asm volatile("bar.sync 1, %0;" ::"n"(128 * kGroups) : "memory");
    }
    float d[kRows / 2];
    DynamicPipeline ring{room.stages};
    for (int b = 0, before = 0; b < blocks; b++, before = ring.stage, ring.next()) {
      barrier_wait(&full[ring.stage], ring.parity);
      const uint32_t stage = stages + ring.stage * S::kStageBytes, own = stage + group * kBlockBytes,
                     theirs = room.whole ? whole + b * kRows * kRowBytes : stage + kGroups * kBlockBytes;
      begin_wgmma();
#pragma unroll
      for (int step = 0; step < 4; step++)
        Tile<kRows>::multiply(d, further(descriptor(own), step * kStepBytes),
                              further(descriptor(theirs), step * kStepBytes), step > 0 || b > 0);
      commit_wgmma();
      wait_wgmma<1>();
      if (const int teller = threadIdx.x % 128; b > 0 && teller < kBeside) {
        if (kBeside == 1) barrier_arrive(&empty[before]);
        else barrier_arrive_at(&empty[before], k_part + teller * k.count);
      }
    }
    wait_wgmma<0>();
    settle(d);
    asm volatile("bar.sync 1, %0;" ::"n"(128 * kGroups) : "memory");  // all warps have read the stages
    float* sums = reinterpret_cast<float*>(shared);
#pragma unroll
    for (int i = 0; i < kRows / 2; i++)
      sums[(i / 4 * 8 + lane % 4 * 2 + i % 2) * S::kStride + threadIdx.x / 32 * 16 + lane / 4 + i % 4 / 2 * 8] = d[i];
  }
  __syncwarp();
  cluster_barrier();
  // Sums of four columns. All split-K parts are loaded before they are added.
  const auto total = [&](int row, int column) {
    const uint32_t at = stages + (row * S::kStride + column) * 4;
    float4 k_parts[kMaxSplitK];
#pragma unroll
    for (int i = 0; i < kMaxSplitK; i++)
      if (i < k.count) k_parts[i] = read_at(at, first_rank + i);
#pragma unroll
    for (int i = 1; i < kMaxSplitK; i++)
      if (i < k.count) k_parts[0] = sum_of(k_parts[0], k_parts[i]);
    return k_parts[0];
  };
  const auto end = [&](int i, const Added& added) {
    const int row = i / fours, c = i % fours * 4, column = first_column + c;
    if (column >= width) return;
    if (!p.gated) return finish_four<true>(p, first_row + row, column, total(row, c), added);
    const int at = c / 8 * 16 + c % 8;
    const float4 gates = total(row, at), ups = total(row, at + 8);
    const auto value = [&](int j, float gate, float up) {
      return column + j < width ? gated(p, column + j, gate, up) : 0;
    };
    put_four(p.y, first_row + row, column, width,
             make_float4(value(0, gates.x, ups.x), value(1, gates.y, ups.y), value(2, gates.z, ups.z),
                         value(3, gates.w, ups.w)));
  };
#pragma unroll
  for (int j = 0; j < S::kAsked; j++)
    if (const int i = own + j * step; i < count) end(i, added[j]);
  for (int i = own + S::kAsked * step; i < count; i += step) {
    const int column = first_column + i % fours * 4;
    end(i, !p.gated && column < width ? read_added(p, first_row + i / fours, column) : Added());
  }
  cluster_barrier();  // other CTAs may still read this one's sums
#endif
}

template <typename S>
size_t shared_bytes(const Room& room) {
  return room.stages * S::kStageBytes + (room.whole ? kShort * S::kRows * kRowBytes : 0);
}

// at_once: number of CTAs that divide all shared memory of an SM among their stages. 0: CTAs have few stages, so that
// the next kernel finds room beside them.
template <typename S>
Room room_of(int at_once, bool whole) {
  Room room{S::kLeastStages, whole};
  if (!at_once) return room;
  constexpr size_t kAll = 226 << 10, kFixed = 2 << 10;  // of an SM; of a CTA besides stages
  for (room.stages = S::kMaxStages; kAll / at_once < shared_bytes<S>(room) + kFixed; room.stages--) {}
  return room;
}

template <int kRows, int kGroups, int kBeside = 1, bool kAlone = false>
void start_split_k(const GemmArgs& p, int rows, const Queue& queue, int at_once = kAlone, bool whole = false) {
  using S = Shape<kRows, kGroups, kBeside, kAlone>;
  const SplitK k(p.w.k, p.w.max_split_k);
  const Room room = room_of<S>(at_once, whole);
  const size_t bytes = shared_bytes<S>(room);
  const int columns = ceil_div(p.w.n, S::kColumns * kBeside) * kBeside;
  start_clusters(queue, gemm_split_k_kernel<S>, dim3(k.count, columns, ceil_div(rows, kRows)), dim3(k.count, kBeside),
                 S::kThreads, bytes, p, rows, k, room);
}

// Whether all clusters run at once.
template <int kRows, int kGroups, int kBeside, bool kAlone>
bool fits(const GemmArgs& p, int rows) {
  using S = Shape<kRows, kGroups, kBeside, kAlone>;
  const int count = SplitK(p.w.k, p.w.max_split_k).count;
  static int at_once[kMaxSplitK + 1] = {};
  if (!at_once[count]) {
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = count, attribute.val.clusterDim.y = kBeside, attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(count, kBeside), config.blockDim = dim3(S::kThreads);
    config.dynamicSmemBytes = shared_bytes<S>(room_of<S>(kAlone, false));
    config.attrs = &attribute, config.numAttrs = 1;
    int found = 0;
    allow_shared(gemm_split_k_kernel<S>, config.dynamicSmemBytes);
    if (cudaOccupancyMaxActiveClusters(&found, gemm_split_k_kernel<S>, &config) != cudaSuccess) cudaGetLastError();
    at_once[count] = found > 0 ? found : 1;
  }
  return ceil_div(p.w.n, S::kColumns * kBeside) * ceil_div(rows, kRows) <= at_once[count];
}

// Most weights are in flight before the previous kernel has computed the rows, if all CTAs have room for that at once.
template <int kRows>
void start_few(const GemmArgs& p, int rows, const Queue& queue) {
  const SplitK k(p.w.k, p.w.max_split_k);
  const int blocks = blocks_of(p.w.n) * k.count, wanted = (blocks + sm_count() - 1) / sm_count();
  const int at_once = wanted > 3 ? 0 : std::max(wanted, 2);
  constexpr int kFewWhole = 2;  // rows; for more rows, bulk copies by one thread are as fast as copies by all threads
  start_split_k<kRows, 1>(p, rows, queue, at_once, rows <= kFewWhole && at_once == 2 && k.length <= kShort);
}

}  // namespace

void gemm_split_k(const GemmArgs& p, int rows, const Queue& queue) {
  if (rows <= 8) return start_few<8>(p, rows, queue);
  if (rows <= 16) return start_few<16>(p, rows, queue);
  if (rows <= 32) return start_few<32>(p, rows, queue);
  if (rows <= 64) return start_few<64>(p, rows, queue);
  // Each cluster reads the rows once, and each tile of rows reads the weights once. So tiles are as large as possible
  // while all clusters run at once and most SMs have a CTA.
  const int blocks = ceil_div(p.w.n, 2 * kBlock) * SplitK(p.w.k, p.w.max_split_k).count;
  if (2 * blocks >= sm_count()) {
    if (rows > 128 && fits<256, 2, 1, true>(p, rows)) return start_split_k<256, 2, 1, true>(p, rows, queue);
    if (fits<128, 2, 2, true>(p, rows)) return start_split_k<128, 2, 2, true>(p, rows, queue);
    if (fits<128, 2, 2, false>(p, rows)) return start_split_k<128, 2, 2>(p, rows, queue);
  }
  start_split_k<128, 2>(p, rows, queue);
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
