// GEMV of split-K matrices (tiles.h) by wgmma, or by mma.sync for integers: decoding of a single sequence, where
// matrices are so small that the time before and after the multiply-adds counts. Weights are 16-bit, or 8-bit: floats
// with one scale or several scales a row, or integers with one group. With 8-bit weights and one scale there may also
// be a few rows that are already quantized.
//
// A cluster of CTAs has 64 columns (rows of the weights), each CTA one split-K part. One warp copies weights to shared
// memory, beginning before the previous kernel has computed the row. The others prepare the part's values of the row:
// normalized if requested, and quantized to 8 bits, for which the CTAs exchange their greatest values unless groups
// have scales of their own. They multiply, and send sums to the cluster's first CTA, which adds them in ascending
// order.
#include <algorithm>

#include "cuda/kernels/common/wgmma.cuh"
#include "cuda/kernels/gemm/epilogue.cuh"
#include "cuda/kernels/gemm/gemm_wgmma.h"
#include "cuda/kernels/gemm/gemv_plan.h"
#include "cuda/kernels/gemm/quantize_chunks.cuh"
#include "cuda/kernels/quantize/quantized.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace {

constexpr int kWorkers = 128, kThreads = kWorkers + 32, kWarps = kWorkers / 32;
constexpr int kStageBytes = GemvPlan::kStageBytes;  // some blocks of K, which are adjacent in memory
constexpr int kMaxStages = GemvPlan::kMaxStages, kRowTile = GemvPlan::kRowTile, kGroupBlocks = GemvPlan::kGroupBlocks;

enum class Form { dtype16, float8, float_groups, integers };
AS_BOTH constexpr int groups_of(int blocks) { return GemvPlan::groups_of(blocks); }
// Source of the row: 16-bit tiles, floats, or floats that are normalized first; or a few rows that are already 8-bit.
enum class From { tiles, values, unnormed, bytes };
// kKept: chunks of the row that a thread keeps in registers; kAlone: there is one split-K part.
template <Form kForm_, From kFrom_, int kKept_, bool kAlone_>
struct Shape {
  static constexpr Form kForm = kForm_;
  static constexpr bool kGroups = kForm == Form::float_groups;
  static constexpr From kFrom = kFrom_;
  static constexpr int kKept = kKept_;
  static constexpr bool kAlone = kAlone_;
  static constexpr int kBlockSize = kForm == Form::dtype16 ? kBlockBytes : kByteBlock;
  static constexpr int kRows = kFrom == From::bytes ? kRowTile : 1;
  static constexpr int kRowBlock = kBlockSize / kBlock;  // bytes of a row in a block
  static constexpr int kStageBlocks = kStageBytes / kBlockSize;
  using Normed = std::conditional_t<kForm == Form::dtype16, RoundedRow<kWorkers>, NormedChunks<kWorkers, kKept>>;
};

// The work of a CTA: a split-K part of 64 columns.
struct Part {
  int k_part, column_block, first, blocks;  // first, blocks: blocks of K

  __device__ explicit Part(const SplitK& k)
      : k_part(blockIdx.x),
        column_block(blockIdx.y),
        first(k_part * k.length),
        blocks(min(k.length, k.blocks - first)) {}
};

// Shared memory of a CTA besides stages and its part of the row.
template <class S>
struct Shared {
  uint64_t full[kMaxStages], empty[kMaxStages], tops_there, sums_there;
  uint32_t tops[kMaxSplitK * kWarps];  // greatest values of the parts of the row
  float sums[kMaxSplitK][S::kRows * kBlock];
  int integers[kWarps];  // sums of each warp's part of the row
  typename S::Normed::Shared norming;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Sends a word to a CTA of the cluster. With one split-K part there is no cluster, and such instructions are illegal.
template <class S>
__device__ __forceinline__ void tell(void* to, int block, uint32_t word, const uint64_t* barrier) {
  if constexpr (S::kAlone) *static_cast<uint32_t*>(to) = word;
  else send(to, block, word, barrier);
}
template <class S>
__device__ __forceinline__ void await_told(const uint64_t* barrier) {
  if constexpr (S::kAlone) meet<kWorkers>();
  else await_sent(barrier);
}

// Called by one thread. of_groups: for the scales of the part's groups, which arrive with the first stage.
template <class S>
__device__ __forceinline__ void copy_weights(const GemmArgs& p, const Part& part, const SplitK& k, int count,
                                             uint32_t stages, uint32_t of_groups, Shared<S>& s) {
  const char* from = S::kForm == Form::dtype16 ? reinterpret_cast<const char*>(p.w.tiles)
                                               : reinterpret_cast<const char*>(p.w.quants.words);
  from += ((size_t)part.column_block * k.blocks + part.first) * S::kBlockSize;
  DynamicPipeline ring{count};
  for (int b = 0; b < part.blocks; b += S::kStageBlocks, ring.next(), from += kStageBytes) {
    const int bytes = min(S::kStageBlocks, part.blocks - b) * S::kBlockSize;
    const int of_scales = S::kGroups && b == 0 ? groups_of(part.blocks) * kScaleWords * 4 : 0;
    barrier_wait(&s.empty[ring.stage], ring.parity ^ 1);
    barrier_expect(&s.full[ring.stage], bytes + of_scales);
    copy_bulk(stages + ring.stage * kStageBytes, from, bytes, &s.full[ring.stage], evicted_first());
    if (!of_scales) continue;
    const size_t first = (size_t)part.column_block * p.w.quants.groups + part.first / kGroupBlocks;
    copy_bulk(of_groups, reinterpret_cast<const char*>(p.w.quants.scales + first * kScaleWords), of_scales,
              &s.full[ring.stage], evicted_first());
  }
}

// Prepares the split-K part's values of the row in shared memory for multiplication; returns the row's scale. ask()
// prefetches what the epilogue adds to the sums. of_groups: where scales of the row's groups are stored.
template <class S, typename Ask>
__device__ __forceinline__ float make_row(const GemmArgs& p, int rows, const Part& part, const SplitK& k, char* row,
                                          float* of_groups, Shared<S>& s, Ask ask) {
  constexpr int kParts = S::kRowBlock / 16, kKept = S::kKept;  // kParts: of 16 bytes, in a row of a block
  const int begin = part.first * kParts, parts = part.blocks * kParts, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto begin_row = [&] {
    if constexpr (!S::kAlone) cluster_wait();
    await_previous();
  };
  if constexpr (S::kForm == Form::dtype16 && S::kFrom == From::unnormed) {
    typename S::Normed normed(p.norm, p.w.k);
    begin_row();
    normed.make(p.unnormed, s.norming);
    ask();
    normed.put(row, begin, parts);
    return 1;
  } else if constexpr (S::kForm == Form::dtype16) {
    const char* from = reinterpret_cast<const char*>(p.x.tiles) + (size_t)part.first * kBlockBytes;
    begin_row();
    for (int at = threadIdx.x; at < parts; at += kWorkers)
      copy_16(shared_address(row) + at * 16, from + (size_t)(at / kParts) * kBlockBytes + at % kParts * 16);
    commit_copies();
    ask();
    wait_copies<0>();
    return 1;
  } else if constexpr (S::kFrom == From::bytes) {
    const char* from = reinterpret_cast<const char*>(p.bytes.values) + (size_t)part.first * kByteBlock;
    constexpr int kAll = kRowTile * kParts;  // parts in a block of all rows
    begin_row();
    for (int at = threadIdx.x; at < part.blocks * kAll; at += kWorkers)
      if (at % kAll < rows * kParts)
        copy_16(shared_address(row) + at * 16, from + (size_t)(at / kAll) * kByteBlock + at % kAll * 16);
    commit_copies();
    ask();
    wait_copies<0>();
    return 1;
  } else {
    using Scale = ByteScale<S::kForm != Form::integers>;
    int sum = 0;  // of quantized values, for integers
    const auto store = [&](const Scale& scale, int at, const auto& x) {
      *reinterpret_cast<uint4*>(row + at * 16) = scale.bytes(x, sum);
    };
    // The same with the scale of the chunk's group. All lanes of a warp call it, also for chunks of other parts.
    const auto store_grouped = [&](int at, const auto& x) {
      const Scale scale = scale_of_group(x);
      if (at >= 0 && at < parts) store(scale, at, x), of_groups[at / (kFloatGroup / kChunkColumns)] = scale.scale;
    };
    const auto end_row = [&](const Scale& scale) {
      if constexpr (S::kForm == Form::integers) {
        sum = __reduce_add_sync(0xffffffffu, sum);
        if (lane == 0) s.integers[warp] = sum;
      }
      return scale.scale;
    };
    if constexpr (S::kFrom == From::unnormed) {
      typename S::Normed normed(p.norm, p.w.k);
      begin_row();
      if constexpr (S::kGroups) {
        normed.S::Normed::Base::make(p.unnormed, s.norming);
        ask();
#pragma unroll
        for (int i = 0; i < kKept; i++) store_grouped(normed.place(i) - begin, normed[i]);
        return 1;
      }
      const Scale scale(normed.make(p.unnormed, s.norming));
      ask();
#pragma unroll
      for (int i = 0; i < kKept; i++)
        if (const int at = normed.place(i) - begin; at >= 0 && at < parts) store(scale, at, normed[i]);
      return end_row(scale);
    } else {
      using Chunk = cuda::Chunk<S::kFrom == From::tiles>;
      Chunk kept[kKept];
      const auto read = [&](int at, Chunk& to) { to.read(p.x, 0, at < parts ? (begin + at) * kChunkColumns : p.w.k); };
      // Calls work() for the chunks beyond those that a thread keeps. They are read twice, unless groups have scales.
      const auto others = [&](auto work) {
        for (int at = kKept * kWorkers + threadIdx.x; at - (S::kGroups ? lane : 0) < parts; at += kWorkers) {
          Chunk x;
          read(at, x), work(at, x);
        }
      };
      begin_row();
#pragma unroll
      for (int i = 0; i < kKept; i++) read(i * kWorkers + threadIdx.x, kept[i]);
      if constexpr (S::kGroups) {
        ask();
#pragma unroll
        for (int i = 0; i < kKept; i++) store_grouped(i * kWorkers + threadIdx.x, kept[i]);
        others(store_grouped);
        return 1;
      }
      uint32_t most = 0;
#pragma unroll
      for (int i = 0; i < kKept; i++) most = kept[i].top(most);
      others([&](int, const Chunk& x) { most = x.top(most); });
      most = __reduce_max_sync(0xffffffffu, most);
      if (lane < k.count) tell<S>(&s.tops[part.k_part * kWarps + warp], lane, most, &s.tops_there);
      ask();
      await_told<S>(&s.tops_there);
      for (int i = 0; i < k.count * kWarps; i++) most = max(most, s.tops[i]);
      const Scale scale(most);
#pragma unroll
      for (int i = 0; i < kKept; i++)
        if (const int at = i * kWorkers + threadIdx.x; at < parts) store(scale, at, kept[i]);
      others([&](int at, const Chunk& x) { store(scale, at, x); });
      return end_row(scale);
    }
  }
}

// Sums of the split-K part. Sum i belongs to row lane % 4 * 2 + i % 2 and column lane / 4 + i / 2 * 8 of the warp's 16.
template <class S>
__device__ __forceinline__ void multiply(int blocks, int count, uint32_t stages, uint32_t x, Shared<S>& s,
                                         float (&d)[4]) {
  const int lane = threadIdx.x % 32;
  DynamicPipeline ring{count};
  const auto add = [&](uint32_t weights, bool adds) {
#pragma unroll
    for (int i = 0; i < S::kRowBlock / kStepBytes; i++) {
      const uint32_t at = x + i * kStepBytes;
      const uint64_t rows = S::kFrom == From::bytes ? byte_descriptor(at) : row_descriptor(at);
      if constexpr (S::kForm == Form::dtype16)
        Tile<8>::multiply(d, descriptor(weights + i * kStepBytes), rows, i > 0 || adds);
      else Float8Tile<8>::multiply(d, byte_descriptor(weights + i * kStepBytes), rows, i > 0 || adds);
    }
    x += S::kRows * S::kRowBlock;
  };
  for (int b = 0, last = 0; b < blocks; b += S::kStageBlocks, last = ring.stage, ring.next()) {
    barrier_wait(&s.full[ring.stage], ring.parity);
    const uint32_t stage = stages + ring.stage * kStageBytes;
    if (b + S::kStageBlocks <= blocks) {
      begin_wgmma();
#pragma unroll
      for (int j = 0; j < S::kStageBlocks; j++) add(stage + j * S::kBlockSize, j > 0 || b > 0);
      commit_wgmma();
    } else {
      for (int j = 0; b + j < blocks; j++) {
        begin_wgmma();
        add(stage + j * S::kBlockSize, j > 0 || b > 0);
        commit_wgmma();
      }
    }
    wait_wgmma<1>();
    if (b > 0 && lane == 0) barrier_arrive(&s.empty[last]);
  }
  wait_wgmma<0>();
  settle(d);
}
// The same with groups. of_weights: scales of the columns' groups; of_row: those of the row's.
template <class S>
__device__ __forceinline__ void multiply_groups(int blocks, int count, uint32_t stages, uint32_t x,
                                                const float* of_weights, const float* of_row, Shared<S>& s,
                                                float (&sums)[4]) {
  constexpr int kStageGroups = S::kStageBlocks / kGroupBlocks;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  DynamicPipeline ring{count};
#pragma unroll
  for (int i = 0; i < 4; i++) sums[i] = 0;
  of_weights += warp * kTileRows + lane / 4 * 2;
  for (int b = 0; b < blocks; b += S::kStageBlocks, ring.next()) {
    barrier_wait(&s.full[ring.stage], ring.parity);
    const uint32_t stage = stages + ring.stage * kStageBytes;
    float d[kStageGroups][4];
    const auto add = [&](int j) {  // block j of the stage
#pragma unroll
      for (int i = 0; i < 2; i++)
        Float8Tile<8>::multiply(d[j / kGroupBlocks], byte_descriptor(stage + j * kByteBlock + i * kStepBytes),
                                row_descriptor(x + (b + j) * kByteRow + i * kStepBytes), i + j % kGroupBlocks > 0);
    };
    if (b + S::kStageBlocks <= blocks) {
      begin_wgmma();
#pragma unroll
      for (int j = 0; j < S::kStageBlocks; j++) add(j);
      commit_wgmma();
    } else {
#pragma unroll
      for (int j = 0; j < S::kStageBlocks; j++) {
        if (b + j >= blocks) break;
        begin_wgmma();
        add(j);
        commit_wgmma();
        wait_wgmma<0>();
        settle(d[j / kGroupBlocks]);
      }
    }
    wait_wgmma<0>();
    if (lane == 0) barrier_arrive(&s.empty[ring.stage]);
#pragma unroll
    for (int g = 0; g < kStageGroups; g++) {
      settle(d[g]);
      const int group = b / kGroupBlocks + g;
      if (b + g * kGroupBlocks >= blocks) break;
      const float2 two = *reinterpret_cast<const float2*>(of_weights + group * kScaleWords);
#pragma unroll
      for (int i = 0; i < 4; i++) add_group(sums[i], i / 2 ? two.y : two.x, of_row[group], d[g][i]);
    }
  }
}
// The same for integers. scales: of these columns; of_rows: sums of these rows over the split-K part.
template <class S>
__device__ __forceinline__ void multiply_integers(int blocks, int count, uint2 scales, float2 of_rows,
                                                  const char* stages, uint32_t x, Shared<S>& s, float (&sums)[4]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  DynamicPipeline ring{count};
  int d[4] = {};
  for (int b = 0; b < blocks; b += S::kStageBlocks, ring.next()) {
    barrier_wait(&s.full[ring.stage], ring.parity);
    const char* stage = stages + ring.stage * kStageBytes + warp * (kByteBlock / 4);
#pragma unroll
    for (int j = 0; j < S::kStageBlocks; j++) {
      if (b + j >= blocks) break;
      uint32_t a[2][4], y[4];
      load_integers<8>(stage + j * kByteBlock, a);
      const uint32_t block = x + (b + j) * S::kRows * kByteRow;
      load_cores(y, S::kFrom == From::bytes ? block + byte_chunk(lane % 8, lane / 8) : block + lane / 8 * 16);
      multiply_add(d, a[0], y[0], y[1]), multiply_add(d, a[1], y[2], y[3]);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(&s.empty[ring.stage]);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    sums[i] = 0;
    add_segment(sums[i], i / 2 ? scales.y : scales.x, d[i], i % 2 ? of_rows.y : of_rows.x);
  }
}
#endif

template <class S>
__global__ void __launch_bounds__(kThreads)
    gemv_kernel(const __grid_constant__ GemmArgs p, int rows, SplitK k, int count) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char shared[];
  __shared__ Shared<S> s;
  const Part part(k);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t stages = shared_address(shared);
  // The scales of groups are behind the row: of the weights, then of the row.
  const int of_groups = count * kStageBytes + k.length * S::kRowBlock + kBehindRow;
  if (S::kRows == 1) rows = 1;
  let_next_begin();  // the next kernel prefetches its weights as soon as there is room
  if (threadIdx.x == 0) {
    for (int i = 0; i < count; i++) barrier_init(&s.full[i], 1), barrier_init(&s.empty[i], kWarps);
    barrier_init(&s.tops_there, 1), barrier_init(&s.sums_there, 1);
    barriers_are_there();
    barrier_expect(&s.tops_there, k.count * kWarps * 4);
    if (part.k_part == 0) barrier_expect(&s.sums_there, k.count * rows * kBlock * 4);
  }
  __syncthreads();
  if constexpr (!S::kAlone) cluster_arrive();
  if (warp == kWarps) {
    if (elected()) copy_weights<S>(p, part, k, count, stages, stages + of_groups, s);
    __syncwarp();
    if constexpr (!S::kAlone) cluster_wait();
    return;
  }
  // At the end each thread of the cluster's first CTA computes one column of a row at a time, from `place` of the 64;
  // if gated, its up value is at `place` + 8. A thread prefetches the operands of its first column.
  struct End {
    int row, column, place;
    bool there;
    float of_columns[2], bias, before;
  };
  const int columns = p.gated ? kBlock / 2 : kBlock;
  const uint32_t* scales = p.w.quants.scales + part.column_block * kScaleWords;
  const auto end_of = [&](int i) {
    End e = {i / columns, i % columns};
    e.place = p.gated ? e.column / 8 * 16 + e.column % 8 : e.column;
    e.column += part.column_block * columns;
    e.there = part.k_part == 0 && i < rows * columns && e.column < (p.gated ? p.y.width : p.w.n);
    if constexpr (S::kForm == Form::float8)
#pragma unroll
      for (int j = 0; j < 2; j++)
        if (e.there && (j == 0 || p.gated)) e.of_columns[j] = __uint_as_float(scales[scale_of(e.place + 8 * j, 0, 1)]);
    return e;
  };
  const auto ask = [&](End& e) {
    if (!e.there || p.gated) return;
    if (p.bias) e.bias = p.bias[e.column];
    if (p.adds) e.before = p.y.values[(size_t)e.row * p.y.width + e.column];
  };
  End own = end_of(threadIdx.x);
  uint2 of_quants = {};
  if constexpr (S::kForm == Form::integers)
    of_quants = *reinterpret_cast<const uint2*>(scales + warp * kTileRows + lane / 4 * 2);
  char* const row = shared + count * kStageBytes;
  const float* const of_weights = reinterpret_cast<const float*>(shared + of_groups);
  float* const of_row = reinterpret_cast<float*>(shared + of_groups) + groups_of(k.length) * kScaleWords;
  const float scale = make_row<S>(p, rows, part, k, row, of_row, s, [&] { ask(own); });
  row_is_there<kWorkers>();
  float d[4];
  if constexpr (S::kForm == Form::integers) {
    float2 of_rows = {};
    if constexpr (S::kFrom == From::bytes) {  // stored at the last block of their segment
      const size_t end = (size_t)(part.first + part.blocks - 1) * (blocks_of(rows) * kBlock);
      of_rows = *reinterpret_cast<const float2*>(p.bytes.sums + end + lane % 4 * 2);
    } else {
      int sum = 0;
#pragma unroll
      for (int i = 0; i < kWarps; i++) sum += s.integers[i];
      of_rows.x = (float)sum;
    }
    multiply_integers<S>(part.blocks, count, of_quants, of_rows, shared, shared_address(row), s, d);
  } else if constexpr (S::kGroups) {
    multiply_groups<S>(part.blocks, count, stages, shared_address(row), of_weights, of_row, s, d);
  } else {
    multiply<S>(part.blocks, count, stages, shared_address(row), s, d);
  }
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (const int at = lane % 4 * 2 + i % 2; at < rows)
      tell<S>(&s.sums[part.k_part][at * kBlock + warp * kTileRows + lane / 4 + i / 2 * 8], 0, __float_as_uint(d[i]),
              &s.sums_there);
  if (!S::kAlone && !own.there) return;
  await_told<S>(&s.sums_there);
  for (int i = threadIdx.x; own.there; ask(own)) {
    const auto total = [&](int j) {
      const int at = own.row * kBlock + own.place + 8 * j;
      float all = s.sums[0][at];
      for (int k_part = 1; k_part < k.count; k_part++) all = __fadd_rn(all, s.sums[k_part][at]);
      if constexpr (S::kForm == Form::float8) all = __fmul_rn(all, own.of_columns[j]);
      if constexpr (S::kForm == Form::dtype16 || S::kGroups) return all;
      return __fmul_rn(all, S::kFrom == From::bytes ? p.bytes.scales[own.row] : scale);
    };
    if (p.gated) {
      finish_gated(p, own.row, own.column, total(0), total(1));
    } else {
      float sum = total(0);
      if (p.bias) sum = __fadd_rn(sum, own.bias);
      if (p.adds) sum = __fadd_rn(own.before, sum);
      put(p.y, own.row, own.column, sum);
    }
    if (S::kRows == 1) break;
    own = end_of(i += kWorkers);
  }
#endif
}

template <Form kForm, From kFrom, int kKept>
void start_row(const GemmArgs& p, const GemvPlan& room, const Queue& queue, int rows = 1) {
  const int count = room.k.count;
  const auto kernel =
      count == 1 ? gemv_kernel<Shape<kForm, kFrom, kKept, true>> : gemv_kernel<Shape<kForm, kFrom, kKept, false>>;
  start_clusters(queue, kernel, dim3(count, blocks_of(p.w.n)), dim3(count), kThreads, room.shared, p, rows, room.k,
                 room.stages);
}

template <Form kForm>
void start_bytes(const GemmArgs& p, const GemvPlan& room, const Queue& queue) {
  if (p.unnormed && p.w.k <= 2 * kWorkers * kChunkColumns) start_row<kForm, From::unnormed, 2>(p, room, queue);
  else if (p.unnormed) start_row<kForm, From::unnormed, 4>(p, room, queue);
  else if (p.x.tiles) start_row<kForm, From::tiles, 4>(p, room, queue);
  else start_row<kForm, From::values, 2>(p, room, queue);
}

}  // namespace

void gemv(const GemmArgs& p, const Queue& queue) {
  const GemvPlan room(p.w, 1, sm_count());
  if constexpr (kAllFormats) {
    if (p.w.has_float_groups()) return start_bytes<Form::float_groups>(p, room, queue);
    if (p.w.kind == Kind::float8) return start_bytes<Form::float8>(p, room, queue);
    if (p.w.kind == Kind::integers) return start_bytes<Form::integers>(p, room, queue);
  }
  if (p.unnormed) start_row<Form::dtype16, From::unnormed, 0>(p, room, queue);
  else start_row<Form::dtype16, From::tiles, 0>(p, room, queue);
}

void gemm_few_rows_8bit(const GemmArgs& p, int rows, const Queue& queue) {
  const GemvPlan room(p.w, kRowTile, sm_count());
  if constexpr (kAllFormats) {
    if (p.w.kind == Kind::float8) start_row<Form::float8, From::bytes, 0>(p, room, queue, rows);
    else start_row<Form::integers, From::bytes, 0>(p, room, queue, rows);
  }
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
