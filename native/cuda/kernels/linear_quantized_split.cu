// Products of quantized weights by wgmma for some rows, as linear_split.cu has those of bfloat16: a cluster of blocks
// of threads has 64 or 128 columns, each block one piece of K. Codes and rows are copied into shared memory several
// stages ahead; a warp widens its 16 columns in registers, which are the product's first operand, while the product
// before is under way.
#include "cuda/kernels/linear_quantized.h"
#include "cuda/kernels/quantized.cuh"
#include "cuda/kernels/wgmma_registers.cuh"

namespace as {
namespace cuda {
namespace {

constexpr int kSetBytes = kScaleWords * 4;  // scales of a block of columns and a group

// kRows: of activations; kGroups: warpgroups, of 64 columns each; kFine: scales change within a block of K.
template <int kBits, int kRows, int kGroups, bool kFine>
struct Shape {
  static constexpr int kColumns = kBlock * kGroups;
  [[maybe_unused]] static constexpr int kStride = kColumns + 4;  // of sums: rows lie in different banks
  static constexpr int kStages = kRows <= 16 ? 8 : kRows <= 32 ? 6 : 4;
  static constexpr int kPartBytes = kRows * kBlock * 2, kGroupBytes = code_bytes(kBits) + (kFine ? 4 : 1) * kSetBytes;
  static constexpr int kStageBytes = (kPartBytes + kGroups * kGroupBytes + 1023) / 1024 * 1024;
  static constexpr int kThreads = 128 * kGroups + 32;
  static constexpr int kShared = kStages * kStageBytes;
  static_assert(kRows * kStride * 4 <= kShared);
};

template <int kBits, int kRows, int kGroups, bool kFine>
__global__ void __launch_bounds__(Shape<kBits, kRows, kGroups, kFine>::kThreads)
    linear_split_kernel(const __grid_constant__ Product p, int rows, Pieces k) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = Shape<kBits, kRows, kGroups, kFine>;
  constexpr int kStages = S::kStages;
  extern __shared__ __align__(1024) char shared[];
  __shared__ uint64_t full[kStages], empty[kStages];
  const int piece = blockIdx.x, column_block = blockIdx.y * kGroups, first_row = blockIdx.z * kRows;
  const int first = piece * k.length, blocks = min(k.length, k.blocks - first);
  const int group = threadIdx.x / 128, lane = threadIdx.x % 32;
  const uint32_t stages = shared_address(shared);
  const Codes& codes = p.w.codes;
  const int sets = kFine ? kBlock / codes.group : 1;
  let_next_begin();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; i++) barrier_init(&full[i], 1), barrier_init(&empty[i], 4 * kGroups);
    barriers_are_there();
  }
  __syncthreads();
  if (group == kGroups) {
    if (lane == 0) {
      const int groups = min(kGroups, blocks_of(p.w.n) - column_block);
      // Of rows there are so many blocks, or a part of one.
      const int row_blocks = kRows <= kBlock ? 1 : min(kRows / kBlock, blocks_of(rows) - first_row / kBlock);
      const int row_bytes = kRows <= kBlock ? S::kPartBytes : kBlockBytes;
      const char* x = reinterpret_cast<const char*>(p.x.tiles) + first_row % kBlock * kRowBytes;
      const auto fetch_weights = [&](int b) {
        const int stage = b % kStages, of = kFine ? (first + b) * sets : (first + b) * kBlock / codes.group;
        const int there = min(sets, codes.groups - of);
        barrier_expect(&full[stage], groups * (code_bytes(kBits) + there * kSetBytes) + row_blocks * row_bytes);
        for (int i = 0; i < groups; i++) {
          const uint32_t to = stages + stage * S::kStageBytes + S::kPartBytes + i * S::kGroupBytes;
          copy_bulk(to,
                    reinterpret_cast<const char*>(codes.words) +
                        ((size_t)(column_block + i) * k.blocks + first + b) * code_bytes(kBits),
                    code_bytes(kBits), &full[stage]);
          copy_bulk(to + code_bytes(kBits),
                    reinterpret_cast<const char*>(codes.scales) +
                        ((size_t)(column_block + i) * codes.groups + of) * kSetBytes,
                    there * kSetBytes, &full[stage]);
        }
      };
      const auto fetch_rows = [&](int b) {
        const int stage = b % kStages;
        for (int i = 0; i < row_blocks; i++)
          copy_bulk(stages + stage * S::kStageBytes + i * kBlockBytes,
                    x + ((size_t)(first_row / kBlock + i) * k.blocks + first + b) * kBlockBytes, row_bytes,
                    &full[stage]);
      };
      // Weights are on their way before the kernel before this one has made the rows.
      const int ahead = min(kStages, blocks);
      for (int b = 0; b < ahead; b++) fetch_weights(b);
      await_previous();
      for (int b = 0; b < ahead; b++) fetch_rows(b);
      for (int b = ahead; b < blocks; b++) {
        barrier_wait(&empty[b % kStages], (b / kStages - 1) % 2);
        fetch_weights(b), fetch_rows(b);
      }
    }
    __syncwarp();
  } else {
    const int tile = threadIdx.x / 32 % 4;
    float d[kRows / 2];
    const auto release = [&](int b) {
      __syncwarp();
      if (lane == 0) barrier_arrive(&empty[b % kStages]);
    };
    const auto multiply = [&](int b, uint32_t(&a)[4][4]) {
      const int stage = b % kStages, there = p.w.k - (first + b) * kBlock;
      barrier_wait(&full[stage], b / kStages % 2);
      const char* own = shared + stage * S::kStageBytes + S::kPartBytes + group * S::kGroupBytes;
      LaneCodes<kBits> lanes;
#pragma unroll
      for (int i = 0; i < LaneCodes<kBits>::kLoads; i++)
        lanes.loaded[i] = reinterpret_cast<const uint4*>(own)[(tile * LaneCodes<kBits>::kLoads + i) * 32 + lane];
      Affine scales[2];
#pragma unroll
      for (int step = 0; step < 4; step++) {
        if (kFine || step == 0) {
          const int set = kFine ? step * sets / 4 : 0;
          const uint2 two =
              reinterpret_cast<const uint2*>(own + code_bytes(kBits) + set * kSetBytes)[tile * 8 + lane / 4];
          scales[0].set(two.x), scales[1].set(two.y);
        }
        lanes.fragment(step, scales, a[step]);
        if (there < kBlock) cut_fragment(a[step], there - step * 16);
      }
      const uint32_t theirs = stages + stage * S::kStageBytes;
      begin_products();
#pragma unroll
      for (int step = 0; step < 4; step++)
        RegisterTile<kRows>::multiply(d, a[step], descriptor(theirs + step * kStepBytes), step > 0 || b > 0);
      commit_products();
      wait_products<1>();
      if (b > 0) release(b - 1);
    };
    uint32_t even[4][4], odd[4][4];  // one is widened while the product of the other is under way
    for (int b = 0; b < blocks; b += 2) {
      multiply(b, even);
      if (b + 1 < blocks) multiply(b + 1, odd);
    }
    wait_products<0>();
    settle(d);
    asm volatile("bar.sync 1, %0;" ::"n"(128 * kGroups) : "memory");  // nobody reads the stages any more
    float* sums = reinterpret_cast<float*>(shared);
#pragma unroll
    for (int i = 0; i < kRows / 2; i++)
      sums[(i / 4 * 8 + lane % 4 * 2 + i % 2) * S::kStride + threadIdx.x / 32 * 16 + lane / 4 + i % 4 / 2 * 8] = d[i];
  }
  await_previous();
  __syncwarp();
  cluster_barrier();
  // Sums of four columns: all pieces are asked for before they are added.
  const auto total = [&](int row, int column, float(&sums)[4]) {
    const uint32_t at = stages + (row * S::kStride + column) * 4;
    float4 pieces[kMostPieces];
#pragma unroll
    for (int i = 0; i < kMostPieces; i++)
      if (i < k.count) pieces[i] = read_at(at, i);
    sums[0] = pieces[0].x, sums[1] = pieces[0].y, sums[2] = pieces[0].z, sums[3] = pieces[0].w;
#pragma unroll
    for (int i = 1; i < kMostPieces; i++)
      if (i < k.count) {
        sums[0] = __fadd_rn(sums[0], pieces[i].x), sums[1] = __fadd_rn(sums[1], pieces[i].y);
        sums[2] = __fadd_rn(sums[2], pieces[i].z), sums[3] = __fadd_rn(sums[3], pieces[i].w);
      }
  };
  const int width = (p.gated ? S::kColumns / 2 : S::kColumns) / 4, there = min(kRows, rows - first_row);
  for (int i = piece * blockDim.x + threadIdx.x; i < there * width; i += k.count * blockDim.x) {
    const int row = i / width, c = i % width * 4;
    float sums[4], ups[4];
    if (p.gated) {
      const int column = column_block * (kBlock / 2) + c, gate = c / 8 * 16 + c % 8;
      total(row, gate, sums), total(row, gate + 8, ups);
#pragma unroll
      for (int j = 0; j < 4; j++)
        if (column + j < p.y.width) finish_gated(p, first_row + row, column + j, sums[j], ups[j]);
    } else {
      total(row, c, sums);
      finish<4>(p, rows, p.w.n, sums, [&](int j) { return Place{first_row + row, column_block * kBlock + c + j}; });
    }
  }
  cluster_barrier();  // others may still read
#endif
}

template <int kBits, int kRows, int kGroups, bool kFine>
void start_split(const Product& p, int rows, const Queue& queue) {
  using S = Shape<kBits, kRows, kGroups, kFine>;
  const auto kernel = linear_split_kernel<kBits, kRows, kGroups, kFine>;
  const Pieces k(p.w.k, p.w.most_pieces);
  allow_shared(kernel, S::kShared);
  start_clusters(queue, kernel, dim3(k.count, ceil_div(p.w.n, S::kColumns), ceil_div(rows, kRows)), dim3(k.count),
                 S::kThreads, S::kShared, p, rows, k);
  launched("linear with quantized weights, pieces side by side");
}

template <int kBits, bool kFine>
void start_rows(const Product& p, int rows, const Queue& queue) {
  if (rows <= 8) start_split<kBits, 8, 1, kFine>(p, rows, queue);
  else if (rows <= 16) start_split<kBits, 16, 1, kFine>(p, rows, queue);
  else if (rows <= 32) start_split<kBits, 32, 1, kFine>(p, rows, queue);
  else if (rows <= 64) start_split<kBits, 64, 2, kFine>(p, rows, queue);
  else start_split<kBits, 128, 2, kFine>(p, rows, queue);
}

}  // namespace

void linear_quantized_split(const Product& p, int rows, const Queue& queue) {
  const bool fine = p.w.codes.groups > 1 && p.w.codes.group < kBlock;
  if (p.w.codes.bits == 4) fine ? start_rows<4, true>(p, rows, queue) : start_rows<4, false>(p, rows, queue);
  else fine ? start_rows<8, true>(p, rows, queue) : start_rows<8, false>(p, rows, queue);
}

}  // namespace cuda
}  // namespace as
