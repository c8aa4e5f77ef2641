// Products of one row of activations of 8 bits, of floats or integers of one group, whose sums are in pieces (tiles.h):
// what a single sequence decodes with, where a matrix is so small that what comes before and after its products counts.
//
// A cluster of blocks of threads has 64 columns (rows of the weights), each block one piece of K. A warp has weights
// copied into shared memory, on their way before the kernel before this one has made the row. The others make 8 bits of
// the piece's part of the row, for which they tell each other the greatest, multiply, and send sums to the cluster's
// first block, which adds them in ascending order.
#include <algorithm>

#include "cuda/kernels/byte_pieces.cuh"
#include "cuda/kernels/quantized.cuh"
#include "cuda/kernels/wgmma_registers.cuh"

namespace as {
namespace cuda {

bool linear_byte_row_stream(const Product& p, const Queue& queue);  // linear_bytes_stream.cu

namespace {

constexpr int kWorkers = 128, kThreads = kWorkers + 32, kWarps = kWorkers / 32;
constexpr int kStageBlocks = 4, kStageBytes = kStageBlocks * kByteBlock;  // of K; adjacent in memory
constexpr int kMostStages = 12;

// kKept: pieces that a thread keeps in registers.
template <bool kFloats, bool kNorms, bool kTiles, int kKept>
__global__ void __launch_bounds__(kThreads)
    linear_bytes_row_kernel(const __grid_constant__ Product p, Pieces k, int count) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char shared[];
  __shared__ uint64_t full[kMostStages], empty[kMostStages], tops_there, sums_there;
  __shared__ uint32_t tops[kMostPieces * kWarps];
  __shared__ float sums[kMostPieces][kBlock];
  __shared__ int integers[kWarps];
  __shared__ typename NormedPieces<kWorkers, kKept>::Shared norming;
  const int piece = blockIdx.x, column_block = blockIdx.y, first = piece * k.length;
  const int blocks = min(k.length, k.blocks - first), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t stages = shared_address(shared);
  if (threadIdx.x == 0) {
    for (int i = 0; i < count; i++) barrier_init(&full[i], 1), barrier_init(&empty[i], kWarps);
    barrier_init(&tops_there, 1), barrier_init(&sums_there, 1);
    barriers_are_there();
    barrier_expect(&tops_there, k.count * kWarps * 4);
    if (piece == 0) barrier_expect(&sums_there, k.count * kBlock * 4);
  }
  __syncthreads();
  cluster_arrive();
  StageRing ring{count};
  const Codes& codes = p.w.codes;
  if (warp == kWarps) {
    if (elected()) {
      const char* from =
          reinterpret_cast<const char*>(codes.words) + ((size_t)column_block * k.blocks + first) * kByteBlock;
      for (int b = 0; b < blocks; b += kStageBlocks, ring.next(), from += kStageBytes) {
        const int bytes = min(kStageBlocks, blocks - b) * kByteBlock;
        barrier_wait(&empty[ring.stage], ring.parity ^ 1);
        barrier_expect(&full[ring.stage], bytes);
        copy_bulk(stages + ring.stage * kStageBytes, from, bytes, &full[ring.stage], evicted_first());
      }
      // Not before: what comes next would have its own weights brought while these are still on their way, and memory
      // would idle once they are there.
      let_next_begin();
    }
    __syncwarp();
    cluster_wait();
    return;
  }
  // The cluster's first block ends with a column a thread, or of gates and what they gate both.
  const int column = column_block * (p.gated ? kBlock / 2 : kBlock) + threadIdx.x;
  const bool ends =
      piece == 0 && (int)threadIdx.x < (p.gated ? kBlock / 2 : kBlock) && column < (p.gated ? p.y.width : p.w.n);
  const int place = p.gated ? threadIdx.x / 8 * 16 + threadIdx.x % 8 : threadIdx.x;
  const uint32_t* scales = codes.scales + column_block * kScaleWords;
  float of_columns[2] = {};
  uint2 of_codes = {};
  if constexpr (kFloats) {
    if (ends)
#pragma unroll
      for (int i = 0; i < 2; i++)
        if (i == 0 || p.gated) of_columns[i] = __uint_as_float(scales[scale_of(place + 8 * i, 0, 1)]);
  } else {
    of_codes = *reinterpret_cast<const uint2*>(scales + warp * kTileRows + lane / 4 * 2);
  }
  const int begin = first * (kBlock / kPieceColumns), pieces = blocks * (kBlock / kPieceColumns);
  char* const row = shared + count * kStageBytes;
  float scale = 0, before = 0, bias = 0;
  int own_sum = 0;
  const auto ask = [&] {
    if (!ends || p.gated) return;
    if (p.bias) bias = p.bias[column];
    if (p.adds) before = p.y.values[column];
  };
  const auto store = [&](const auto& scale, int at, const auto& x) {
    *reinterpret_cast<uint4*>(row + at * kPieceColumns) = scale.bytes(x, own_sum);
  };
  if constexpr (kNorms) {
    NormedPieces<kWorkers, kKept> normed(p.norm, p.w.k);
    cluster_wait();
    await_previous();
    const ByteScale<kFloats> found(normed.make(p.unnormed, norming));
    ask();
#pragma unroll
    for (int i = 0; i < kKept; i++)
      if (const int at = normed.place(i) - begin; at >= 0 && at < pieces) store(found, at, normed[i]);
    scale = found.scale;
  } else {
    Piece<kTiles> kept[kKept];
    const auto read = [&](int at, Piece<kTiles>& to) {
      to.read(p.x, 0, at < pieces ? (begin + at) * kPieceColumns : p.w.k);
    };
    cluster_wait();
    await_previous();
#pragma unroll
    for (int i = 0; i < kKept; i++) read(i * kWorkers + threadIdx.x, kept[i]);
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < kKept; i++) most = kept[i].top(most);
    for (int at = kKept * kWorkers + threadIdx.x; at < pieces; at += kWorkers) {
      Piece<kTiles> x;
      read(at, x), most = x.top(most);
    }
    most = __reduce_max_sync(0xffffffffu, most);
    if (lane < k.count) send(&tops[piece * kWarps + warp], lane, most, &tops_there);
    ask();
    await_sent(&tops_there);
    for (int i = 0; i < k.count * kWarps; i++) most = max(most, tops[i]);
    const ByteScale<kFloats> found(most);
#pragma unroll
    for (int i = 0; i < kKept; i++)
      if (const int at = i * kWorkers + threadIdx.x; at < pieces) store(found, at, kept[i]);
    for (int at = kKept * kWorkers + threadIdx.x; at < pieces; at += kWorkers) {
      Piece<kTiles> x;
      read(at, x), store(found, at, x);
    }
    scale = found.scale;
  }
  if constexpr (!kFloats) {
    own_sum = __reduce_add_sync(0xffffffffu, own_sum);
    if (lane == 0) integers[warp] = own_sum;
  }
  row_is_there<kWorkers>();
  uint32_t x = shared_address(row);
  float two[2];  // of columns lane / 4 and eight further, of the warp's 16
  if constexpr (kFloats) {
    float d[4];
    const auto multiply = [&](uint32_t codes, bool adds) {
#pragma unroll
      for (int i = 0; i < 2; i++)
        Float8Tile<8>::multiply(d, byte_descriptor(codes + i * kStepBytes), row_descriptor(x + i * kStepBytes),
                                i > 0 || adds);
      x += kBlock;
    };
    for (int b = 0, last = 0; b < blocks; b += kStageBlocks, last = ring.stage, ring.next()) {
      barrier_wait(&full[ring.stage], ring.parity);
      const uint32_t stage = stages + ring.stage * kStageBytes;
      if (b + kStageBlocks <= blocks) {
        begin_products();
#pragma unroll
        for (int j = 0; j < kStageBlocks; j++) multiply(stage + j * kByteBlock, j > 0 || b > 0);
        commit_products();
      } else {
        for (int j = 0; b + j < blocks; j++) {
          begin_products();
          multiply(stage + j * kByteBlock, j > 0 || b > 0);
          commit_products();
        }
      }
      wait_products<1>();
      if (b > 0 && lane == 0) barrier_arrive(&empty[last]);
    }
    wait_products<0>();
    settle(d);
    two[0] = d[0], two[1] = d[2];
  } else {
    int d[4] = {};
    for (int b = 0; b < blocks; b += kStageBlocks, ring.next()) {
      barrier_wait(&full[ring.stage], ring.parity);
      const char* stage = shared + ring.stage * kStageBytes + warp * (kByteBlock / 4);
#pragma unroll
      for (int j = 0; j < kStageBlocks; j++) {
        if (b + j >= blocks) break;
        uint32_t a[2][4], y[4];
        load_integers<8>(stage + j * kByteBlock, a);
        load_cores(y, x + (b + j) * kBlock + lane / 8 * kPieceColumns);
        multiply_add(d, a[0], y[0], y[1]), multiply_add(d, a[1], y[2], y[3]);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(&empty[ring.stage]);
    }
    int sum = 0;
#pragma unroll
    for (int i = 0; i < kWarps; i++) sum += integers[i];
    two[0] = two[1] = 0;
    add_segment(two[0], of_codes.x, d[0], (float)sum), add_segment(two[1], of_codes.y, d[2], (float)sum);
  }
  if (lane % 4 == 0)
#pragma unroll
    for (int i = 0; i < 2; i++)
      send(&sums[piece][warp * kTileRows + lane / 4 + 8 * i], 0, __float_as_uint(two[i]), &sums_there);
  if (!ends) return;
  await_sent(&sums_there);
  const auto total = [&](int i) {
    float all = sums[0][place + 8 * i];
    for (int j = 1; j < k.count; j++) all = __fadd_rn(all, sums[j][place + 8 * i]);
    if constexpr (kFloats) all = __fmul_rn(all, of_columns[i]);
    return __fmul_rn(all, scale);
  };
  if (p.gated) return finish_gated(p, 0, column, total(0), total(1));
  float sum = total(0);
  if (p.bias) sum = __fadd_rn(sum, bias);
  if (p.adds) sum = __fadd_rn(before, sum);
  put(p.y, 0, column, sum);
#endif
}

template <bool kFloats, bool kNorms, bool kTiles, int kKept>
void start_row(const Product& p, const Pieces& k, int stages, size_t shared, const Queue& queue) {
  const auto kernel = linear_bytes_row_kernel<kFloats, kNorms, kTiles, kKept>;
  allow_shared(kernel, shared);
  start_clusters(queue, kernel, dim3(k.count, blocks_of(p.w.n)), dim3(k.count), kThreads, shared, p, k, stages);
  launched("linear of one row of 8 bits");
}

template <bool kFloats>
void start_from(const Product& p, const Pieces& k, int stages, size_t shared, const Queue& queue) {
  if (p.unnormed && p.w.k <= 2 * kWorkers * kPieceColumns)
    start_row<kFloats, true, false, 2>(p, k, stages, shared, queue);
  else if (p.unnormed) start_row<kFloats, true, false, 4>(p, k, stages, shared, queue);
  else if (p.x.tiles) start_row<kFloats, false, true, 4>(p, k, stages, shared, queue);
  else start_row<kFloats, false, false, 2>(p, k, stages, shared, queue);
}

// All blocks of threads run at once, and have all of a processor's memory for their stages.
bool linear_byte_row_split(const Product& p, const Queue& queue) {
  const Pieces k(p.w.k, p.w.most_pieces);
  const Codes& codes = p.w.codes;
  if (k.count == 1 || k.count > kMostPieces || !codes.in_rows || codes.groups > 1) return false;
  constexpr size_t kAll = 226 << 10, kFixed = 3 << 10;  // of a processor; beside stages, of a block of threads
  const int at_once = ceil_div((size_t)blocks_of(p.w.n) * k.count, processors());
  const size_t row = k.length * kBlock + kBehindRow;
  if (at_once > 3) return false;
  int stages = std::min(ceil_div(k.length, kStageBlocks), kMostStages);
  while (stages > 0 && kAll / at_once < stages * kStageBytes + row + kFixed) stages--;
  if (stages < 3 && stages * kStageBlocks < k.length) return false;
  const size_t shared = stages * kStageBytes + row;
  codes.floats ? start_from<true>(p, k, stages, shared, queue) : start_from<false>(p, k, stages, shared, queue);
  return true;
}

}  // namespace

bool linear_byte_row(const Product& p, const Queue& queue) {
  if (queue.capability != 90 || !p.w.takes_bytes() || (p.unnormed && p.w.k > kNormedBytes)) return false;
  return linear_byte_row_split(p, queue) || (p.unnormed && linear_byte_row_stream(p, queue));
}

}  // namespace cuda
}  // namespace as
