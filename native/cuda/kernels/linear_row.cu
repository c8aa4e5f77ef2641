// Products of one row by wgmma, or of integers by mma.sync, whose sums are in pieces (tiles.h): what a single sequence
// decodes with, where a matrix is so small that what comes before and after its products counts. Of bfloat16, and of 8
// bits, floats or integers of one group.
//
// A cluster of blocks of threads has 64 columns (rows of the weights), each block one piece of K. A warp has weights
// copied into shared memory, on their way before the kernel before this one has made the row. The others have the
// piece's part of the row there as products take it: normed, if that is asked for, and made 8 bits, for which blocks
// tell each other the greatest. They multiply, and send sums to the cluster's first block, which adds them in ascending
// order.
#include <algorithm>

#include "cuda/kernels/byte_pieces.cuh"
#include "cuda/kernels/linear_wgmma.h"
#include "cuda/kernels/quantized.cuh"
#include "cuda/kernels/wgmma_registers.cuh"

namespace as {
namespace cuda {
namespace {

constexpr int kWorkers = 128, kThreads = kWorkers + 32, kWarps = kWorkers / 32;
constexpr int kStageBytes = 16 << 10;  // some blocks of K, which are adjacent in memory
constexpr int kMostStages = 12;

enum class Form { bf16, float8, integers };
// What the row is made of: bfloat16 in tiles, floats, or floats that are normed first.
enum class From { tiles, values, unnormed };
// kKept: parts of the row that a thread keeps in registers; kAlone: there is one piece.
template <Form kForm_, From kFrom_, int kKept_, bool kAlone_>
struct Shape {
  static constexpr Form kForm = kForm_;
  static constexpr From kFrom = kFrom_;
  static constexpr int kKept = kKept_;
  static constexpr bool kAlone = kAlone_;
  static constexpr int kBlockSize = kForm == Form::bf16 ? kBlockBytes : kByteBlock;
  static constexpr int kRowBlock = kBlockSize / kBlock;  // bytes of the row
  static constexpr int kStageBlocks = kStageBytes / kBlockSize;
  using Normed = std::conditional_t<kForm == Form::bf16, RoundedRow<kWorkers>, NormedPieces<kWorkers, kKept>>;
};

// What a block of threads has of the product: a piece of 64 columns.
struct Part {
  int piece, column_block, first, blocks;  // the last two: of K

  __device__ explicit Part(const Pieces& k)
      : piece(blockIdx.x), column_block(blockIdx.y), first(piece * k.length), blocks(min(k.length, k.blocks - first)) {}
};

// What a block of threads has in shared memory beside stages and its part of the row.
template <class S>
struct Shared {
  uint64_t full[kMostStages], empty[kMostStages], tops_there, sums_there;
  uint32_t tops[kMostPieces * kWarps];  // of the parts of the row
  float sums[kMostPieces][kBlock];
  int integers[kWarps];  // sums of parts of the row
  typename S::Normed::Shared norming;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// A word for a block of threads of the cluster, where there is one: without, such instructions are illegal.
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

// By one thread.
template <class S>
__device__ __forceinline__ void copy_weights(const Product& p, const Part& part, const Pieces& k, int count,
                                             uint32_t stages, Shared<S>& s) {
  const char* from = S::kForm == Form::bf16 ? reinterpret_cast<const char*>(p.w.tiles)
                                            : reinterpret_cast<const char*>(p.w.codes.words);
  from += ((size_t)part.column_block * k.blocks + part.first) * S::kBlockSize;
  StageRing ring{count};
  for (int b = 0; b < part.blocks; b += S::kStageBlocks, ring.next(), from += kStageBytes) {
    const int bytes = min(S::kStageBlocks, part.blocks - b) * S::kBlockSize;
    barrier_wait(&s.empty[ring.stage], ring.parity ^ 1);
    barrier_expect(&s.full[ring.stage], bytes);
    copy_bulk(stages + ring.stage * kStageBytes, from, bytes, &s.full[ring.stage], evicted_first());
  }
  // Not before: what comes next would have its own weights brought while these are still on their way, and memory would
  // idle once they are there.
  let_next_begin();
}

// The piece's part of the row into shared memory, as products take it; returns the row's scale. ask: for what sums are
// added to, which is on its way then, too.
template <class S, typename Ask>
__device__ __forceinline__ float make_row(const Product& p, const Part& part, const Pieces& k, char* row, Shared<S>& s,
                                          Ask ask) {
  constexpr int kParts = S::kRowBlock / 16, kKept = S::kKept;  // 16 bytes of the row each, of a block
  const int begin = part.first * kParts, parts = part.blocks * kParts, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto begin_row = [&] {
    if constexpr (!S::kAlone) cluster_wait();
    await_previous();
  };
  if constexpr (S::kForm == Form::bf16 && S::kFrom == From::unnormed) {
    typename S::Normed normed(p.norm, p.w.k);
    begin_row();
    normed.make(p.unnormed, s.norming);
    ask();
    normed.put(row, begin, parts);
    return 1;
  } else if constexpr (S::kForm == Form::bf16) {
    const char* from = reinterpret_cast<const char*>(p.x.tiles) + (size_t)part.first * kBlockBytes;
    begin_row();
    for (int at = threadIdx.x; at < parts; at += kWorkers)
      copy_16(shared_address(row) + at * 16, from + (size_t)(at / kParts) * kBlockBytes + at % kParts * 16);
    commit_copies();
    ask();
    wait_copies<0>();
    return 1;
  } else {
    using Scale = ByteScale<S::kForm == Form::float8>;
    int sum = 0;  // of integers
    const auto store = [&](const Scale& scale, int at, const auto& x) {
      *reinterpret_cast<uint4*>(row + at * 16) = scale.bytes(x, sum);
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
      const Scale scale(normed.make(p.unnormed, s.norming));
      ask();
#pragma unroll
      for (int i = 0; i < kKept; i++)
        if (const int at = normed.place(i) - begin; at >= 0 && at < parts) store(scale, at, normed[i]);
      return end_row(scale);
    } else {
      using Piece = cuda::Piece<S::kFrom == From::tiles>;
      Piece kept[kKept];
      const auto read = [&](int at, Piece& to) { to.read(p.x, 0, at < parts ? (begin + at) * kPieceColumns : p.w.k); };
      // Pieces beyond those that a thread keeps, which are read twice.
      const auto others = [&](auto work) {
        for (int at = kKept * kWorkers + threadIdx.x; at < parts; at += kWorkers) {
          Piece x;
          read(at, x), work(at, x);
        }
      };
      begin_row();
#pragma unroll
      for (int i = 0; i < kKept; i++) read(i * kWorkers + threadIdx.x, kept[i]);
      uint32_t most = 0;
#pragma unroll
      for (int i = 0; i < kKept; i++) most = kept[i].top(most);
      others([&](int, const Piece& x) { most = x.top(most); });
      most = __reduce_max_sync(0xffffffffu, most);
      if (lane < k.count) tell<S>(&s.tops[part.piece * kWarps + warp], lane, most, &s.tops_there);
      ask();
      await_told<S>(&s.tops_there);
      for (int i = 0; i < k.count * kWarps; i++) most = max(most, s.tops[i]);
      const Scale scale(most);
#pragma unroll
      for (int i = 0; i < kKept; i++)
        if (const int at = i * kWorkers + threadIdx.x; at < parts) store(scale, at, kept[i]);
      others([&](int at, const Piece& x) { store(scale, at, x); });
      return end_row(scale);
    }
  }
}

// Sums of the piece, of columns lane / 4 and eight further of the warp's 16.
template <class S>
__device__ __forceinline__ float2 multiply(int blocks, int count, uint32_t stages, uint32_t x, Shared<S>& s) {
  const int lane = threadIdx.x % 32;
  StageRing ring{count};
  float d[4];
  const auto add = [&](uint32_t weights, bool adds) {
#pragma unroll
    for (int i = 0; i < S::kRowBlock / kStepBytes; i++) {
      const uint64_t of_row = row_descriptor(x + i * kStepBytes);
      if constexpr (S::kForm == Form::bf16)
        Tile<8>::multiply(d, descriptor(weights + i * kStepBytes), of_row, i > 0 || adds);
      else Float8Tile<8>::multiply(d, byte_descriptor(weights + i * kStepBytes), of_row, i > 0 || adds);
    }
    x += S::kRowBlock;
  };
  for (int b = 0, last = 0; b < blocks; b += S::kStageBlocks, last = ring.stage, ring.next()) {
    barrier_wait(&s.full[ring.stage], ring.parity);
    const uint32_t stage = stages + ring.stage * kStageBytes;
    if (b + S::kStageBlocks <= blocks) {
      begin_products();
#pragma unroll
      for (int j = 0; j < S::kStageBlocks; j++) add(stage + j * S::kBlockSize, j > 0 || b > 0);
      commit_products();
    } else {
      for (int j = 0; b + j < blocks; j++) {
        begin_products();
        add(stage + j * S::kBlockSize, j > 0 || b > 0);
        commit_products();
      }
    }
    wait_products<1>();
    if (b > 0 && lane == 0) barrier_arrive(&s.empty[last]);
  }
  wait_products<0>();
  settle(d);
  return make_float2(d[0], d[2]);
}
// The same of integers; scales: of these columns.
template <class S>
__device__ __forceinline__ float2 multiply_integers(int blocks, int count, uint2 scales, const char* stages, uint32_t x,
                                                    Shared<S>& s) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  StageRing ring{count};
  int d[4] = {}, sum = 0;
  for (int b = 0; b < blocks; b += S::kStageBlocks, ring.next()) {
    barrier_wait(&s.full[ring.stage], ring.parity);
    const char* stage = stages + ring.stage * kStageBytes + warp * (kByteBlock / 4);
#pragma unroll
    for (int j = 0; j < S::kStageBlocks; j++) {
      if (b + j >= blocks) break;
      uint32_t a[2][4], y[4];
      load_integers<8>(stage + j * kByteBlock, a);
      load_cores(y, x + (b + j) * kByteRow + lane / 8 * 16);
      multiply_add(d, a[0], y[0], y[1]), multiply_add(d, a[1], y[2], y[3]);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(&s.empty[ring.stage]);
  }
#pragma unroll
  for (int i = 0; i < kWarps; i++) sum += s.integers[i];
  float2 two = {};
  add_segment(two.x, scales.x, d[0], (float)sum), add_segment(two.y, scales.y, d[2], (float)sum);
  return two;
}
#endif

template <class S>
__global__ void __launch_bounds__(kThreads) linear_row_kernel(const __grid_constant__ Product p, Pieces k, int count) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char shared[];
  __shared__ Shared<S> s;
  const Part part(k);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t stages = shared_address(shared);
  if (threadIdx.x == 0) {
    for (int i = 0; i < count; i++) barrier_init(&s.full[i], 1), barrier_init(&s.empty[i], kWarps);
    barrier_init(&s.tops_there, 1), barrier_init(&s.sums_there, 1);
    barriers_are_there();
    barrier_expect(&s.tops_there, k.count * kWarps * 4);
    if (part.piece == 0) barrier_expect(&s.sums_there, k.count * kBlock * 4);
  }
  __syncthreads();
  if constexpr (!S::kAlone) cluster_arrive();
  if (warp == kWarps) {
    if (elected()) copy_weights<S>(p, part, k, count, stages, s);
    __syncwarp();
    if constexpr (!S::kAlone) cluster_wait();
    return;
  }
  // The cluster's first block ends with a column a thread, or of gates and what they gate both: `place` of the 64, and
  // eight further.
  const int columns = p.gated ? kBlock / 2 : kBlock, column = part.column_block * columns + threadIdx.x;
  const int place = p.gated ? threadIdx.x / 8 * 16 + threadIdx.x % 8 : threadIdx.x;
  const bool ends = part.piece == 0 && (int)threadIdx.x < columns && column < (p.gated ? p.y.width : p.w.n);
  const uint32_t* scales = p.w.codes.scales + part.column_block * kScaleWords;
  float of_columns[2] = {}, before = 0, bias = 0;
  uint2 of_codes = {};
  if constexpr (S::kForm == Form::float8) {
    if (ends)
#pragma unroll
      for (int i = 0; i < 2; i++)
        if (i == 0 || p.gated) of_columns[i] = __uint_as_float(scales[scale_of(place + 8 * i, 0, 1)]);
  } else if constexpr (S::kForm == Form::integers) {
    of_codes = *reinterpret_cast<const uint2*>(scales + warp * kTileRows + lane / 4 * 2);
  }
  char* const row = shared + count * kStageBytes;
  const float scale = make_row<S>(p, part, k, row, s, [&] {
    if (!ends || p.gated) return;
    if (p.bias) bias = p.bias[column];
    if (p.adds) before = p.y.values[column];
  });
  row_is_there<kWorkers>();
  float2 two;
  if constexpr (S::kForm == Form::integers)
    two = multiply_integers<S>(part.blocks, count, of_codes, shared, shared_address(row), s);
  else two = multiply<S>(part.blocks, count, stages, shared_address(row), s);
  if (lane % 4 == 0) {
    float* to = s.sums[part.piece] + warp * kTileRows + lane / 4;
    tell<S>(to, 0, __float_as_uint(two.x), &s.sums_there), tell<S>(to + 8, 0, __float_as_uint(two.y), &s.sums_there);
  }
  if (!S::kAlone && !ends) return;
  await_told<S>(&s.sums_there);
  if (!ends) return;
  const auto total = [&](int i) {
    float all = s.sums[0][place + 8 * i];
    for (int j = 1; j < k.count; j++) all = __fadd_rn(all, s.sums[j][place + 8 * i]);
    if constexpr (S::kForm == Form::float8) all = __fmul_rn(all, of_columns[i]);
    return S::kForm == Form::bf16 ? all : __fmul_rn(all, scale);
  };
  if (p.gated) return finish_gated(p, 0, column, total(0), total(1));
  float sum = total(0);
  if (p.bias) sum = __fadd_rn(sum, bias);
  if (p.adds) sum = __fadd_rn(before, sum);
  put(p.y, 0, column, sum);
#endif
}

// Stages of a block of threads: all that run on a processor at once share its memory. 0: it has none.
struct Room {
  Pieces k;
  int stages;
  size_t shared;

  explicit Room(const Product& p) : k(p.w.k, p.w.most_pieces) {
    constexpr size_t kAll = 226 << 10, kFixed = 3 << 10;  // of a processor; beside stages, of a block of threads
    constexpr int kMostAtOnce = 3;
    const bool bf16 = p.w.kind == Kind::bf16;
    const int at_once = ceil_div((size_t)blocks_of(p.w.n) * k.count, processors()),
              stage_blocks = kStageBytes / (bf16 ? kBlockBytes : kByteBlock);
    const size_t row = k.length * (bf16 ? kRowBytes : kByteRow) + kBehindRow;
    stages = at_once > kMostAtOnce ? 0 : std::min(ceil_div(k.length, stage_blocks), kMostStages);
    while (stages > 0 && kAll / at_once < stages * kStageBytes + row + kFixed) stages--;
    if (stages < 3 && stages * stage_blocks < k.length) stages = 0;
    shared = stages * kStageBytes + row;
  }
};

template <Form kForm, From kFrom, int kKept>
void start_row(const Product& p, const Room& room, const Queue& queue) {
  const int count = room.k.count;
  const auto kernel = count == 1 ? linear_row_kernel<Shape<kForm, kFrom, kKept, true>>
                                 : linear_row_kernel<Shape<kForm, kFrom, kKept, false>>;
  allow_shared(kernel, room.shared);
  start_clusters(queue, kernel, dim3(count, blocks_of(p.w.n)), dim3(count), kThreads, room.shared, p, room.k,
                 room.stages);
  launched("linear of one row");
}

template <Form kForm>
void start_bytes(const Product& p, const Room& room, const Queue& queue) {
  if (p.unnormed && p.w.k <= 2 * kWorkers * kPieceColumns) start_row<kForm, From::unnormed, 2>(p, room, queue);
  else if (p.unnormed) start_row<kForm, From::unnormed, 4>(p, room, queue);
  else if (p.x.tiles) start_row<kForm, From::tiles, 4>(p, room, queue);
  else start_row<kForm, From::values, 2>(p, room, queue);
}

}  // namespace

bool has_linear_row(const Product& p, const Queue& queue) {
  const int pieces = p.w.most_pieces;
  if (queue.capability != 90 || p.y.copy) return false;
  const bool fits = p.w.kind == Kind::bf16
                        ? !p.unnormed || p.w.k <= kNormedColumns
                        : p.w.codes.in_rows && p.w.codes.groups == 1 && (!p.unnormed || p.w.k <= kNormedBytes);
  return fits && pieces > 1 && pieces <= kMostPieces && Room(p).stages > 0;
}

void linear_row(const Product& p, const Queue& queue) {
  const Room room(p);
  if (p.w.kind == Kind::float8) start_bytes<Form::float8>(p, room, queue);
  else if (p.w.kind == Kind::integers) start_bytes<Form::integers>(p, room, queue);
  else if (p.unnormed) start_row<Form::bf16, From::unnormed, 0>(p, room, queue);
  else start_row<Form::bf16, From::tiles, 0>(p, room, queue);
}

}  // namespace cuda
}  // namespace as
