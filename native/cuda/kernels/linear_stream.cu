// Products in bfloat16 by wgmma where all that counts is how fast the weights stream by: some rows, as when sequences
// decode.
//
// A block of threads stays on its processor and has a range of units: pieces of K (tiles.h) of tiles of columns (rows
// of the weights), in order. One thread has blocks of both sides copied into shared memory, as far ahead as there is
// room, on and on through the units; warpgroups multiply, each 64 columns with all rows. Who has the first piece of a
// tile finishes it: further pieces are added in ascending order, its own in registers, others' (which that block of
// threads computed first of all) out of global memory.
#include <algorithm>

#include "cuda/kernels/linear_wgmma.h"
#include "cuda/kernels/wgmma.cuh"

namespace as {
namespace cuda {
namespace {

// kRows: of activations; kGroups: warpgroups, of 64 columns each.
template <int kRows, int kGroups>
struct Shape {
  static constexpr int kColumns = kBlock * kGroups, kThreads = 128 * (1 + kGroups);
  static constexpr int kPartBytes = kRows * kRowBytes, kStageBytes = kGroups * kBlockBytes + kPartBytes;
  static constexpr int kStages = (216 << 10) / kStageBytes < 12 ? (216 << 10) / kStageBytes : 12;
  static constexpr int kShared = kStages * kStageBytes;
  static constexpr int kValues = kRows / 2;  // of a thread
  static constexpr size_t kPartial = (size_t)kColumns * kRows;
};

// What a block of threads has: units [begin, end) of all; unit: (tile of columns, tile of rows, piece of K).
struct Units {
  int begin, end;
  __device__ Units(int units, int block) {
    begin = (int)((int64_t)units * block / gridDim.x), end = (int)((int64_t)units * (block + 1) / gridDim.x);
  }
};
// Whose a unit is.
__device__ int owner_of(int unit, int units) { return (int)(((int64_t)(unit + 1) * gridDim.x - 1) / units); }

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

template <int kRows, int kGroups>
__global__ void __launch_bounds__(Shape<kRows, kGroups>::kThreads, 1)
    linear_stream_kernel(const __grid_constant__ Product p, int rows, Pieces k, Scratch scratch) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = Shape<kRows, kGroups>;
  constexpr int kStages = S::kStages, kValues = S::kValues, kTogether = kValues < 8 ? kValues : 8;
  extern __shared__ __align__(1024) char shared[];
  __shared__ uint64_t full[kStages], empty[kStages];
  const int row_tiles = (rows + kRows - 1) / kRows, column_blocks = blocks_of(p.w.n);
  const int units = (column_blocks + kGroups - 1) / kGroups * row_tiles * k.count;
  const Units own(units, blockIdx.x);
  const uint32_t stages = shared_address(shared);
  let_next_begin();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; i++) barrier_init(&full[i], 1), barrier_init(&empty[i], kGroups);
    barriers_are_there();
  }
  __syncthreads();
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
        s.column_block = tile / row_tiles * kGroups, s.groups = min(kGroups, column_blocks - s.column_block);
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
        for (int done = 0; done < s.bytes; done += kBlockBytes)
          copy_bulk(to + done, from + ((size_t)(s.row / kBlock + done / kBlockBytes) * k.blocks + s.b) * kBlockBytes,
                    min(s.bytes, kBlockBytes), &full[stage]);
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
          if (b > 0 && thread == 0) barrier_arrive(&empty[before]);
          before = stage;
          if (++stage == kStages) stage = 0, turn ^= 1;
        }
        wait_products<0>();
        settle(d);
        if (thread == 0) barrier_arrive(&empty[before]);
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
        const int other = owner_of(tile * k.count + piece, units),
                  until = min(k.count, Units(units, other).end - tile * k.count);
        if (threadIdx.x == 128) {
          while (!get_flag(scratch.flags + other)) {}
          set_flag(scratch.flags + other, 0);
        }
        meet();
        for (int index = 0; piece < until; piece++, index++) {
          const float* from = partial_of(other, index);
#pragma unroll
          for (int i = 0; i < kValues; i += kTogether) {
            float theirs[kTogether];
#pragma unroll
            for (int j = 0; j < kTogether; j++) theirs[j] = __ldcg(from + (i + j) * (128 * kGroups));
#pragma unroll
            for (int j = 0; j < kTogether; j++) total[i + j] = __fadd_rn(total[i + j], theirs[j]);
          }
        }
      }
      // Number i of a thread is of row i / 4 * 8 + lane % 4 * 2 + i % 2; gates and what they gate are side by side.
      const int row = tile % row_tiles * kRows + lane % 4 * 2;
      const int column_block = tile / row_tiles * kGroups + group, core = thread / 32 * 16 + lane / 4;
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
#endif
}

template <int kRows, int kGroups>
void start_stream(const Product& p, int rows, const Queue& queue) {
  using S = Shape<kRows, kGroups>;
  static_assert(S::kPartial * (kMostPieces - 1) <= kScratchFloats);
  const Pieces k(p.w.k);
  allow_shared(linear_stream_kernel<kRows, kGroups>, S::kShared);
  const int units = ceil_div(p.w.n, S::kColumns) * ceil_div(rows, kRows) * k.count;
  start(queue, linear_stream_kernel<kRows, kGroups>, dim3(std::min(units, std::min(processors(), kScratchBlocks))),
        S::kThreads, S::kShared, p, rows, k, queue.scratch);
  launched("linear in bfloat16, weights streaming");
}

}  // namespace

void linear_stream(const Product& p, int rows, const Queue& queue) {
  if (rows <= 8) start_stream<8, 2>(p, rows, queue);
  else if (rows <= 16) start_stream<16, 2>(p, rows, queue);
  else if (rows <= 32) start_stream<32, 2>(p, rows, queue);
  else if (rows <= 64) start_stream<64, 3>(p, rows, queue);
  else start_stream<128, 3>(p, rows, queue);
}

}  // namespace cuda
}  // namespace as
