// Products of quantized weights by wgmma for some rows and many columns (rows of the weights), whose sums over K are
// one piece: as linear_stream.cu has those of bfloat16. A block of threads stays on its processor and has an equal part
// of all blocks of the weights, of tiles of columns one after the other; a tile that two have is begun by the one, and
// the other goes on from the sums that it has left in global memory. One warp has codes and rows copied into shared
// memory; the others widen codes in registers, which are the product's first operand.
#include <algorithm>

#include "cuda/kernels/linear_quantized.h"
#include "cuda/kernels/quantized.cuh"
#include "cuda/kernels/wgmma_registers.cuh"

namespace as {
namespace cuda {
namespace {

constexpr int kSetBytes = kScaleWords * 4;  // scales of a block of columns and a group

// kRows: of activations; kGroups: warpgroups, of 64 columns each; kFine: scales change within a block of K.
template <int kBits_, int kRows_, int kGroups_, bool kFine_>
struct Shape {
  static constexpr int kBits = kBits_, kRows = kRows_, kGroups = kGroups_;
  static constexpr bool kFine = kFine_;
  static constexpr int kThreads = 128 * kGroups + 32;
  static constexpr int kPartBytes = kRows * kRowBytes, kGroupBytes = code_bytes(kBits) + (kFine ? 4 : 1) * kSetBytes;
  static constexpr int kStageBytes = (kPartBytes + kGroups * kGroupBytes + 1023) / 1024 * 1024;
  static constexpr int kStages = std::min((216 << 10) / kStageBytes, 16);
  static constexpr int kShared = kStages * kStageBytes;
  static constexpr int kValues = kRows / 2;  // of a thread
  static constexpr size_t kSums = (size_t)kGroups * kBlock * kRows;

  static int tiles(int n, int rows) { return (blocks_of(n) + kGroups - 1) / kGroups * ((rows + kRows - 1) / kRows); }
};

// A part of a tile: blocks [begin, end) of K.
struct Part {
  int tile, begin, end;
};
// The parts that a block of threads has, in the order in which it computes them: first the one that another waits for.
struct Parts {
  int blocks, begin, end;  // of K; what is its own of all blocks of all tiles

  __device__ Parts(int tiles, int blocks) : blocks(blocks) {
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
  constexpr int kRows = S::kRows, kGroups = S::kGroups, kStages = S::kStages, kValues = S::kValues, kBits = S::kBits;
  extern __shared__ __align__(1024) char shared[];
  __shared__ uint64_t full[kStages], empty[kStages];
  const int row_tiles = (rows + kRows - 1) / kRows, column_blocks = blocks_of(p.w.n);
  const Parts parts((column_blocks + kGroups - 1) / kGroups * row_tiles, k.blocks);
  const int count = parts.count();
  const uint32_t stages = shared_address(shared);
  const Codes& codes = p.w.codes;
  const int sets = S::kFine ? kBlock / codes.group : 1;
  let_next_begin();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; i++) barrier_init(&full[i], 1), barrier_init(&empty[i], 4 * kGroups);
    barriers_are_there();
  }
  __syncthreads();
  const int group = threadIdx.x / 128, lane = threadIdx.x % 32;
  if (group == kGroups) {
    if (lane) return;
    struct Step {
      int number, b, end, column_block, row;  // number of the part; b: of K
    };
    const auto at_part = [&](Step& s) {
      const Part part = parts[s.number];
      s.b = part.begin, s.end = part.end;
      s.column_block = part.tile / row_tiles * kGroups, s.row = part.tile % row_tiles * kRows;
    };
    const auto next = [&](Step& s) {
      if (++s.b == s.end && ++s.number < count) at_part(s);
    };
    // The rows' blocks that there are: of 64, or a part of one.
    const auto row_bytes = [&](const Step& s) {
      return kRows <= kBlock ? S::kPartBytes : min(kRows / kBlock, blocks_of(rows) - s.row / kBlock) * kBlockBytes;
    };
    const auto fetch_weights = [&](const Step& s, int stage) {
      const int groups = min(kGroups, column_blocks - s.column_block);
      const int of = S::kFine ? s.b * sets : s.b * kBlock / codes.group, there = min(sets, codes.groups - of);
      barrier_expect(&full[stage], groups * (code_bytes(kBits) + there * kSetBytes) + row_bytes(s));
      uint32_t to = stages + stage * S::kStageBytes + S::kPartBytes;
      const char* from =
          reinterpret_cast<const char*>(codes.words) + ((size_t)s.column_block * k.blocks + s.b) * code_bytes(kBits);
      const char* scales =
          reinterpret_cast<const char*>(codes.scales) + ((size_t)s.column_block * codes.groups + of) * kSetBytes;
      for (int i = 0; i < groups; i++, to += S::kGroupBytes) {
        copy_bulk(to, from + (size_t)i * k.blocks * code_bytes(kBits), code_bytes(kBits), &full[stage]);
        copy_bulk(to + code_bytes(kBits), scales + (size_t)i * codes.groups * kSetBytes, there * kSetBytes,
                  &full[stage]);
      }
    };
    const auto fetch_rows = [&](const Step& s, int stage) {
      const uint32_t to = stages + stage * S::kStageBytes;
      const char* from = reinterpret_cast<const char*>(p.x.tiles) +
                         ((size_t)(s.row / kBlock) * k.blocks + s.b) * kBlockBytes + s.row % kBlock * kRowBytes;
      const int bytes = row_bytes(s);
      for (int done = 0; done < bytes; done += kBlockBytes, from += (size_t)k.blocks * kBlockBytes)
        copy_bulk(to + done, from, min(bytes, kBlockBytes), &full[stage]);
    };
    // Weights are on their way before the kernel before this one has made the rows.
    Step ahead{0};
    at_part(ahead);
    Step behind = ahead;
    int begun = 0;
    for (; begun < kStages && ahead.number < count; begun++, next(ahead)) fetch_weights(ahead, begun);
    await_previous();
    for (int i = 0; i < begun; i++, next(behind)) fetch_rows(behind, i);
    for (int stage = 0, turn = 0; ahead.number < count; next(ahead)) {
      barrier_wait(&empty[stage], turn);
      fetch_weights(ahead, stage), fetch_rows(ahead, stage);
      if (++stage == kStages) stage = 0, turn ^= 1;
    }
    return;
  }
  await_previous();

  const int thread = threadIdx.x % 128, tile = thread / 32;
  const auto meet = [] { asm volatile("bar.sync 1, %0;" ::"n"(128 * kGroups) : "memory"); };
  // Where a thread's sums are for another block of threads: adjacent threads side by side.
  const auto sums_of = [&](int block) { return scratch.sums + block * S::kSums + threadIdx.x; };
  int stage = 0, turn = 0;
  float d[kValues];
  uint32_t a[4][4];
  for (int number = 0; number < count; number++) {
    const Part part = parts[number];
    if (part.begin) {
      if (threadIdx.x == 0) {
        while (!get_flag(scratch.flags + blockIdx.x - 1)) {}
        set_flag(scratch.flags + blockIdx.x - 1, 0);
      }
      meet();
      const float* from = sums_of(blockIdx.x - 1);
#pragma unroll
      for (int i = 0; i < kValues; i++) d[i] = __ldcg(from + i * 128 * kGroups);
    }
    settle(d);
    for (int b = part.begin; b < part.end; b++) {
      const int there = p.w.k - b * kBlock;
      barrier_wait(&full[stage], turn);
      const char* own = shared + stage * S::kStageBytes + S::kPartBytes + group * S::kGroupBytes;
      LaneCodes<kBits> lanes;
#pragma unroll
      for (int i = 0; i < LaneCodes<kBits>::kLoads; i++)
        lanes.loaded[i] = reinterpret_cast<const uint4*>(own)[(tile * LaneCodes<kBits>::kLoads + i) * 32 + lane];
      Affine scales[2];
#pragma unroll
      for (int step = 0; step < 4; step++) {
        if (S::kFine || step == 0) {
          const int set = S::kFine ? step * sets / 4 : 0;
          const uint2 two =
              reinterpret_cast<const uint2*>(own + code_bytes(kBits) + set * kSetBytes)[tile * 8 + lane / 4];
          scales[0].set(two.x), scales[1].set(two.y);
        }
        lanes.fragment(step, scales, a[step]);
        if (there < kBlock) cut_fragment(a[step], there - step * 16);
      }
      const uint32_t x = stages + stage * S::kStageBytes;
      begin_products();
#pragma unroll
      for (int step = 0; step < 4; step++)
        RegisterTile<kRows>::multiply(d, a[step], descriptor(x + step * kStepBytes), step > 0 || b > 0);
      commit_products();
      wait_products<0>();
      settle(d);
      __syncwarp();
      if (lane == 0) barrier_arrive(&empty[stage]);
      if (++stage == kStages) stage = 0, turn ^= 1;
    }
    if (part.end < k.blocks) {
      float* to = sums_of(blockIdx.x);
#pragma unroll
      for (int i = 0; i < kValues; i++) __stcg(to + i * 128 * kGroups, d[i]);
      __threadfence();
      meet();
      if (threadIdx.x == 0) set_flag(scratch.flags + blockIdx.x, 1);
      continue;
    }
    // Number i of a thread is of row i / 4 * 8 + lane % 4 * 2 + i % 2; gates and what they gate are side by side.
    const int row = part.tile % row_tiles * kRows + lane % 4 * 2;
    const int column_block = part.tile / row_tiles * kGroups + group, core = tile * 16 + lane / 4;
    if (p.gated) {
      const int column = column_block * (kBlock / 2) + core / 16 * 8 + core % 16;
#pragma unroll
      for (int i = 0; i < kValues; i += 4)
#pragma unroll
        for (int j = 0; j < 2; j++)
          if (const int at = row + i / 4 * 8 + j; at < rows && column < p.y.width)
            finish_gated(p, at, column, d[i + j], d[i + 2 + j]);
    } else {
      constexpr int kTogether = kValues < 8 ? kValues : 8;
#pragma unroll
      for (int i = 0; i < kValues; i += kTogether)
        finish<kTogether>(p, rows, p.w.n, d + i, [&](int j) {
          return Place{row + (i + j) / 4 * 8 + j % 2, column_block * kBlock + core + j % 4 / 2 * 8};
        });
    }
  }
#endif
}

template <typename S>
void start_stream(const Product& p, int rows, const Queue& queue) {
  static_assert(S::kSums <= kScratchFloats);
  allow_shared(linear_stream_kernel<S>, S::kShared);
  // A tile has two blocks of threads at most.
  const int blocks = std::min({S::tiles(p.w.n, rows), processors(), (int)kScratchBlocks});
  start(queue, linear_stream_kernel<S>, dim3(blocks), S::kThreads, S::kShared, p, rows, Pieces(p.w.k, p.w.most_pieces),
        queue.scratch);
  launched("linear with quantized weights, streaming");
}

template <int kBits, bool kFine>
void start_rows(const Product& p, int rows, const Queue& queue) {
  if (rows <= 8) start_stream<Shape<kBits, 8, 4, kFine>>(p, rows, queue);
  else if (rows <= 16) start_stream<Shape<kBits, 16, 4, kFine>>(p, rows, queue);
  else if (rows <= 32) start_stream<Shape<kBits, 32, 4, kFine>>(p, rows, queue);
  else if (rows <= 64) start_stream<Shape<kBits, 64, 4, kFine>>(p, rows, queue);
  else start_stream<Shape<kBits, 128, 2, kFine>>(p, rows, queue);
}

}  // namespace

void linear_quantized_stream(const Product& p, int rows, const Queue& queue) {
  const bool fine = p.w.codes.groups > 1 && p.w.codes.group < kBlock;
  if (p.w.codes.bits == 4) fine ? start_rows<4, true>(p, rows, queue) : start_rows<4, false>(p, rows, queue);
  else fine ? start_rows<8, true>(p, rows, queue) : start_rows<8, false>(p, rows, queue);
}

}  // namespace cuda
}  // namespace as
