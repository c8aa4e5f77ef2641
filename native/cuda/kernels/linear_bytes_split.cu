// Products of activations of 8 bits, integers (linear_integer.h) and floats (linear_float8.h), by wgmma for some rows
// and many, as linear_quantized_split.cu has those in bfloat16.
#include "cuda/kernels/linear_float8.h"
#include "cuda/kernels/linear_integer.h"
#include "cuda/kernels/wgmma_bytes.cuh"

namespace as {
namespace cuda {
namespace {

template <int kWeightBits>
struct Integers {
  using Sum = int;
  static constexpr int kBits = kWeightBits, kSetBytes = kScaleWords * 4;  // scales of a block of columns and a group
  static constexpr bool kFloats = false;
};
struct Floats {
  using Sum = float;
  static constexpr int kBits = 8, kSetBytes = 0;
  static constexpr bool kFloats = true;
};

// kRows: of activations; kGroups: warpgroups, of 64 columns each.
template <class Type, int kRows, int kGroups>
struct Shape {
  static constexpr int kBits = Type::kBits, kSetBytes = Type::kSetBytes;
  static constexpr int kColumns = kBlock * kGroups;
  [[maybe_unused]] static constexpr int kStride = kColumns + 4;  // of sums: rows lie in different banks
  static constexpr int kStages = kRows <= 16 ? 8 : 6;
  static constexpr int kPartBytes = kRows * kByteRow, kSumBytes = Type::kFloats ? 0 : kRows * 4;
  static constexpr int kGroupBytes = code_bytes(kBits) + kSetBytes;
  static constexpr int kStageBytes = (kPartBytes + kSumBytes + kGroups * kGroupBytes + 1023) / 1024 * 1024;
  static constexpr int kThreads = 128 * kGroups + 32;
  static constexpr int kShared = kStages * kStageBytes;
  static_assert(kRows * kStride * 4 <= kShared);
};

template <class Type, int kRows, int kGroups>
__global__ void __launch_bounds__(Shape<Type, kRows, kGroups>::kThreads)
    linear_split_kernel(const __grid_constant__ Product p, int rows, Pieces k, Segments segments) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = Shape<Type, kRows, kGroups>;
  constexpr int kStages = S::kStages, kBits = S::kBits, kSetBytes = S::kSetBytes;
  extern __shared__ __align__(1024) char shared[];
  __shared__ uint64_t full[kStages], empty[kStages];
  const int piece = blockIdx.x, column_block = blockIdx.y * kGroups, first_row = blockIdx.z * kRows;
  const int first = piece * k.length, blocks = min(k.length, k.blocks - first);
  const int group = threadIdx.x / 128, lane = threadIdx.x % 32;
  const uint32_t stages = shared_address(shared);
  const Codes& codes = p.w.codes;
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
      const int row_bytes = kRows <= kBlock ? S::kPartBytes : kByteBlock, stride = blocks_of(rows) * kBlock;
      const int sum_bytes = min(S::kSumBytes, (stride - first_row) * 4);
      const char* x = reinterpret_cast<const char*>(p.bytes.values) + first_row % kBlock * kByteRow;
      const auto fetch_weights = [&](int b) {
        const int stage = b % kStages;
        barrier_expect(&full[stage], groups * (code_bytes(kBits) + kSetBytes) + row_blocks * row_bytes + sum_bytes);
        for (int i = 0; i < groups; i++) {
          const uint32_t to = stages + stage * S::kStageBytes + S::kPartBytes + S::kSumBytes + i * S::kGroupBytes;
          copy_bulk(to,
                    reinterpret_cast<const char*>(codes.words) +
                        ((size_t)(column_block + i) * k.blocks + first + b) * code_bytes(kBits),
                    code_bytes(kBits), &full[stage]);
          if (kSetBytes)
            copy_bulk(to + code_bytes(kBits),
                      reinterpret_cast<const char*>(codes.scales) +
                          ((size_t)(column_block + i) * codes.groups + segments.group(first + b)) * kSetBytes,
                      kSetBytes, &full[stage]);
        }
      };
      const auto fetch_rows = [&](int b) {
        const int stage = b % kStages;
        const uint32_t to = stages + stage * S::kStageBytes;
        for (int i = 0; i < row_blocks; i++)
          copy_bulk(to + i * kByteBlock, x + ((size_t)(first_row / kBlock + i) * k.blocks + first + b) * kByteBlock,
                    row_bytes, &full[stage]);
        if (S::kSumBytes)
          copy_bulk(to + S::kPartBytes,
                    reinterpret_cast<const char*>(p.bytes.sums + (size_t)(first + b) * stride + first_row), sum_bytes,
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
    typename Type::Sum d[kRows / 2];
    float total[kRows / 2] = {};
    const auto release = [&](int b) {
      __syncwarp();
      if (lane == 0) barrier_arrive(&empty[b % kStages]);
    };
    const auto multiply = [&](int b, bool adds, uint32_t(&a)[2][4]) {
      const int stage = b % kStages;
      barrier_wait(&full[stage], b / kStages % 2);
      const char* own = shared + stage * S::kStageBytes + S::kPartBytes + S::kSumBytes + group * S::kGroupBytes;
      LaneCodes<kBits> lanes;
#pragma unroll
      for (int i = 0; i < LaneCodes<kBits>::kLoads; i++)
        lanes.loaded[i] = reinterpret_cast<const uint4*>(own)[(tile * LaneCodes<kBits>::kLoads + i) * 32 + lane];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        if constexpr (Type::kFloats) {
          const uint4& four = lanes.loaded[half];
          a[half][0] = four.x, a[half][1] = four.y, a[half][2] = four.z, a[half][3] = four.w;
        } else {
          integers<kBits>(lanes, half, a[half]);
        }
      }
      const uint32_t theirs = stages + stage * S::kStageBytes;
      begin_products();
#pragma unroll
      for (int half = 0; half < 2; half++)
        ByteTile<typename Type::Sum, kRows>::multiply(d, a[half], byte_descriptor(theirs + half * kStepBytes),
                                                      half > 0 || adds);
      commit_products();
      wait_products<1>();
      if (adds) release(b - 1);
    };
    uint32_t even[2][4], odd[2][4];  // one is made while the product of the other is under way
    for (int b = 0; b < blocks;) {
      const int begin = b, stop = min(segments.end(first + b) - first + 1, blocks);
      for (; b + 1 < stop; b += 2) {
        multiply(b, b > begin, even);
        multiply(b + 1, true, odd);
      }
      if (b < stop) multiply(b, b > begin, even), b++;
      wait_products<0>();
      settle(d);
      const char* last = shared + (b - 1) % kStages * S::kStageBytes + S::kPartBytes;
      if constexpr (Type::kFloats) {
#pragma unroll
        for (int i = 0; i < kRows / 2; i++) total[i] = __fadd_rn(total[i], d[i]);
      } else {
        const float2* of_rows = reinterpret_cast<const float2*>(last);
        const uint2 two = reinterpret_cast<const uint2*>(last + S::kSumBytes + group * S::kGroupBytes +
                                                         code_bytes(kBits))[tile * 8 + lane / 4];
#pragma unroll
        for (int i = 0; i < kRows / 2; i++) {
          const float2 activations = of_rows[i / 4 * 4 + lane % 4];
          add_segment(total[i], i % 4 / 2 ? two.y : two.x, d[i], i % 2 ? activations.y : activations.x);
        }
      }
      release(b - 1);
    }
    asm volatile("bar.sync 1, %0;" ::"n"(128 * kGroups) : "memory");  // nobody reads the stages any more
    float* sums = reinterpret_cast<float*>(shared);
#pragma unroll
    for (int i = 0; i < kRows / 2; i++)
      sums[(i / 4 * 8 + lane % 4 * 2 + i % 2) * S::kStride + threadIdx.x / 32 * 16 + lane / 4 + i % 4 / 2 * 8] =
          total[i];
  }
  await_previous();
  __syncwarp();
  cluster_barrier();
  // Sums of four columns: all pieces are asked for before they are added.
  const auto sum_up = [&](int row, int column, float(&sums)[4]) {
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
    const float scale = p.bytes.scales[first_row + row];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if (Type::kFloats)
        if (const int of = column_block * kBlock + column + j; of < p.w.n)
          sums[j] = __fmul_rn(sums[j], __uint_as_float(codes.scales[scale_of(of, 0, 1)]));
      sums[j] = __fmul_rn(sums[j], scale);
    }
  };
  const int width = (p.gated ? S::kColumns / 2 : S::kColumns) / 4, there = min(kRows, rows - first_row);
  for (int i = piece * blockDim.x + threadIdx.x; i < there * width; i += k.count * blockDim.x) {
    const int row = i / width, c = i % width * 4;
    float sums[4], ups[4];
    if (p.gated) {
      const int column = column_block * (kBlock / 2) + c, gate = c / 8 * 16 + c % 8;
      sum_up(row, gate, sums), sum_up(row, gate + 8, ups);
#pragma unroll
      for (int j = 0; j < 4; j++)
        if (column + j < p.y.width) finish_gated(p, first_row + row, column + j, sums[j], ups[j]);
    } else {
      sum_up(row, c, sums);
      finish<4>(p, rows, p.w.n, sums, [&](int j) { return Place{first_row + row, column_block * kBlock + c + j}; });
    }
  }
  cluster_barrier();  // others may still read
#endif
}

template <class Type, int kRows, int kGroups>
void start_split(const Product& p, int rows, const Queue& queue) {
  using S = Shape<Type, kRows, kGroups>;
  const auto kernel = linear_split_kernel<Type, kRows, kGroups>;
  const Pieces k(p.w.k, p.w.most_pieces);
  allow_shared(kernel, S::kShared);
  start_clusters(queue, kernel, dim3(k.count, ceil_div(p.w.n, S::kColumns), ceil_div(rows, kRows)), dim3(k.count),
                 S::kThreads, S::kShared, p, rows, k, Segments(p.w, k));
  launched("linear with activations of 8 bits, pieces side by side");
}

template <class Type>
void start_rows(const Product& p, int rows, const Queue& queue) {
  if (Type::kFloats && rows <= 8) start_split<Floats, 8, 1>(p, rows, queue);
  else if (rows <= 16) start_split<Type, 16, 1>(p, rows, queue);
  else if (rows <= 32) start_split<Type, 32, 1>(p, rows, queue);
  else if (rows <= 64) start_split<Type, 64, 2>(p, rows, queue);
  else start_split<Type, 128, 2>(p, rows, queue);
}

}  // namespace

void linear_integer_split(const Product& p, int rows, const Queue& queue) {
  if (p.w.codes.bits == 4) start_rows<Integers<4>>(p, rows, queue);
  else start_rows<Integers<8>>(p, rows, queue);
}

void linear_float8_split(const Product& p, int rows, const Queue& queue) { start_rows<Floats>(p, rows, queue); }

}  // namespace cuda
}  // namespace as
