// Products of quantized weights with few rows of activations in bfloat16, of matrices with few columns (rows of the
// weights): a cluster of blocks of threads has 64 columns, each block one piece of K (tiles.h), and so small that
// several fit a processor. In the end all add up the pieces in ascending order, each a share of the values, out of each
// other's memory, which takes a fraction of the time that the way through global memory does.
#include "cuda/kernels/linear_quantized.h"
#include "cuda/kernels/quantized_stream.cuh"

namespace as {
namespace cuda {
namespace {

constexpr int kMostTogether = 4;  // blocks of threads on a processor

template <class Format_, int kRows_>
struct SplitShape {
  using Format = Format_;
  static constexpr int kRows = kRows_, kThreads = kGroupThreads + 32;
  static constexpr int kTogether = kRows <= 16 ? kMostTogether : 3;
  // Of a stage, which is a step of two blocks, in this order.
  static constexpr int kRowsBytes = kRows * kRowBytes, kCodesBytes = code_bytes(Format::kBits);
  static constexpr int kSetBytes = kScaleWords * 4;
  static constexpr int kGroupsAt = kStepBlocks * kRowsBytes, kSetsAt = kStepBlocks * kCodesBytes;
  static constexpr int kGroupBytes = kSetsAt + kStepBlocks * Format::kSets * kSetBytes;
  static constexpr int kStageBytes = kGroupsAt + kGroupBytes;
  static constexpr int kMost = (216 << 10) / kTogether - 2048,
                       kStages = kMost / kStageBytes < 8 ? kMost / kStageBytes : 8;
  static constexpr int kShared = kStages * kStageBytes;
  [[maybe_unused]] static constexpr int kStride = kBlock + 4;  // of sums: rows lie in different banks
  static_assert(kStages >= 3 && kStageBytes % 1024 % kRowBytes == 0 && kRows * kStride * 4 <= kShared);
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Copies a piece's steps into the stages: one thread.
template <class S>
class PieceCopies {
 public:
  __device__ PieceCopies(const Product& p, const Pieces& k, int rows, int first, int blocks, int column_block,
                         int first_row)
      : sets_(p.w.codes, k.blocks),
        codes_(reinterpret_cast<const char*>(p.w.codes.words) +
               ((size_t)column_block * k.blocks + first) * S::kCodesBytes),
        scales_(reinterpret_cast<const char*>(p.w.codes.scales) + (size_t)column_block * sets_.count * S::kSetBytes),
        x_(reinterpret_cast<const char*>(p.x.tiles) + ((size_t)(first_row / kBlock) * k.blocks + first) * kBlockBytes +
           first_row % kBlock * kRowBytes),
        rows_(min(S::kRows, rows - first_row)),
        blocks_(blocks) {
    const int before = sets_.blocks == 1 ? first : first / sets_.blocks;
    set_ = before * sets_.each, left_ = (before + 1) * sets_.blocks - first;
  }
  // Steps in ascending order.
  __device__ void fetch_weights(int step, uint32_t to, uint64_t* full) {
    const int blocks = min(kStepBlocks, blocks_ - step * kStepBlocks);
    const int sets = min(left_ == 1 && blocks > 1 ? 2 * sets_.each : sets_.each, sets_.count - set_);
    const uint64_t policy = evicted_first();
    barrier_expect(full, blocks * (rows_ * kRowBytes + S::kCodesBytes) + sets * S::kSetBytes);
    copy_bulk(to + S::kGroupsAt, codes_ + (size_t)step * kStepBlocks * S::kCodesBytes, blocks * S::kCodesBytes, full,
              policy);
    copy_bulk(to + S::kGroupsAt + S::kSetsAt, scales_ + (size_t)set_ * S::kSetBytes, sets * S::kSetBytes, full, policy);
    for (left_ -= kStepBlocks; left_ <= 0; left_ += sets_.blocks) set_ += sets_.each;
  }
  __device__ void fetch_rows(int step, uint32_t to, uint64_t* full) const {
    for (int j = 0; j < min(kStepBlocks, blocks_ - step * kStepBlocks); j++)
      copy_bulk(to + j * S::kRowsBytes, x_ + (size_t)(step * kStepBlocks + j) * kBlockBytes, rows_ * kRowBytes, full);
  }

 private:
  const ScaleSets sets_;
  const char *codes_, *scales_, *x_;
  const int rows_, blocks_;
  int set_, left_;  // left_: blocks of the set, from the step's first on
};
#endif

template <class S>
__global__ void __launch_bounds__(S::kThreads, S::kTogether)
    quantized_split_kernel(const __grid_constant__ Product p, int rows, const __grid_constant__ Pieces k) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kRows = S::kRows, kStages = S::kStages, kWarps = kGroupThreads / 32;
  extern __shared__ __align__(1024) char shared[];
  __shared__ uint64_t full[kStages], empty[kStages];
  const int piece = blockIdx.x, column_block = blockIdx.y, first_row = blockIdx.z * kRows;
  const int first = piece * k.length, blocks = min(k.length, k.blocks - first);
  const int steps = (blocks + kStepBlocks - 1) / kStepBlocks, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t stages = shared_address(shared), full_at = shared_address(full), empty_at = shared_address(empty);
  asm volatile("" : "+r"(stages), "+r"(full_at), "+r"(empty_at));  // as in quantized_stream.cuh
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; i++) barrier_init(&full[i], 1), barrier_init(&empty[i], kWarps);
    barriers_are_there();
  }
  __syncthreads();
  // In the end each thread of the cluster has every so many fours of columns, the first of which it asks for ahead.
  const int fours = (p.gated ? kBlock / 2 : kBlock) / 4, own = piece * S::kThreads + threadIdx.x;
  const int count = min(kRows, rows - first_row) * fours, width = p.gated ? p.y.width : p.w.n;
  const int first_column = column_block * (p.gated ? kBlock / 2 : kBlock);
  const auto ask = [&](int i) {
    const int column = first_column + i % fours * 4;
    return i < count && !p.gated && column < width ? read_added(p, first_row + i / fours, column) : Added();
  };
  Added added;
  if (warp == kWarps) {
    if (lane == 0) {
      PieceCopies<S> copies(p, k, rows, first, blocks, column_block, first_row);
      // Weights are on their way before the kernel before this one has made the rows.
      const int begun = min(kStages, steps);
      for (int i = 0; i < begun; i++) copies.fetch_weights(i, stages + i * S::kStageBytes, &full[i]);
      await_previous();
      for (int i = 0; i < begun; i++) copies.fetch_rows(i, stages + i * S::kStageBytes, &full[i]);
      Ring<kStages> ring;
      for (int step = begun; step < steps; step++, ring.next()) {
        const uint32_t to = stages + ring.stage * S::kStageBytes;
        barrier_wait(&empty[ring.stage], ring.parity);
        copies.fetch_weights(step, to, &full[ring.stage]), copies.fetch_rows(step, to, &full[ring.stage]);
      }
      let_next_begin();  // whose weights would be in the way of these
    }
    __syncwarp();
    await_previous();
    added = ask(own);
  } else {
    await_previous();
    added = ask(own);
    const ScaleSets sets(p.w.codes, k.blocks);
    const bool regular = sets.regular();
    const StepProducts<S> products(sets, sets.second(), 0, warp, lane);
    // Steps of two whole blocks, of regular sets; others are computed block by block.
    const int whole_steps = regular ? min(blocks, p.w.k / kBlock - first) / kStepBlocks : 0;
    float d[kRows / 2];
    clear(d);
    Ring<kStages> ring;
    for (int step = 0; step < steps; step++, ring.next()) {
      const uint32_t at = stages + ring.stage * S::kStageBytes;
      barrier_wait(full_at + ring.stage * 8, ring.parity);
      if (step < whole_steps) {
        products.multiply(at, d);
      } else {
        for (int j = 0; j < min(kStepBlocks, blocks - step * kStepBlocks); j++) {
          const int block = first + step * kStepBlocks + j, there = p.w.k - block * kBlock;
          uint32_t a[4][4];
          products.weights(at, j, j ? sets.second(block - 1) : 0, a);
#pragma unroll
          for (int i = 0; i < 4; i++) cut_fragment(a[i], there - i * 16);
          products.multiply(at + j * S::kRowsBytes, a, d);
        }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(empty_at + ring.stage * 8);
    }
    group_barrier(0);  // nobody reads the stages any more
    float* sums = reinterpret_cast<float*>(shared);
#pragma unroll
    for (int i = 0; i < kRows / 2; i++)
      sums[(i / 4 * 8 + lane % 4 * 2 + i % 2) * S::kStride + warp * 16 + lane / 4 + i % 4 / 2 * 8] = d[i];
  }
  __syncwarp();
  cluster_barrier();
  // Sums of four columns: all pieces are asked for before they are added.
  const auto total = [&](int row, int column) {
    const uint32_t at = stages + (row * S::kStride + column) * 4;
    float4 pieces[kMostCodePieces];
#pragma unroll
    for (int i = 0; i < kMostCodePieces; i++)
      if (i < k.count) pieces[i] = read_at(at, i);
#pragma unroll
    for (int i = 1; i < kMostCodePieces; i++)
      if (i < k.count) pieces[0] = sum_of(pieces[0], pieces[i]);
    return pieces[0];
  };
  for (int i = own; i < count; i += k.count * S::kThreads) {
    const int row = i / fours, c = i % fours * 4, column = first_column + c;
    if (column >= width) continue;
    if (!p.gated) {
      finish_four(p, first_row + row, column, total(row, c), i == own ? added : ask(i));
      continue;
    }
    const int at = c / 8 * 16 + c % 8;
    const float4 gates = total(row, at), ups = total(row, at + 8);
    const auto value = [&](int j, float gate, float up) {
      return column + j < width ? gated(p, column + j, gate, up) : 0;
    };
    put_four(p.y, first_row + row, column, width,
             make_float4(value(0, gates.x, ups.x), value(1, gates.y, ups.y), value(2, gates.z, ups.z),
                         value(3, gates.w, ups.w)));
  }
  __syncwarp();
  cluster_barrier();  // others may still read
#endif
}

template <class Format, int kRows>
void start_split_rows(const Product& p, int rows, const Queue& queue) {
  using S = SplitShape<Format, kRows>;
  const Pieces k(p.w.k, p.w.most_pieces);
  allow_shared(quantized_split_kernel<S>, S::kShared);
  start_clusters(queue, quantized_split_kernel<S>, dim3(k.count, blocks_of(p.w.n), ceil_div(rows, kRows)),
                 dim3(k.count), S::kThreads, S::kShared, p, rows, k);
  launched("linear with quantized weights, pieces side by side");
}
template <class Format>
void start_split(const Product& p, int rows, const Queue& queue) {
  if (rows <= 8) start_split_rows<Format, 8>(p, rows, queue);
  else if (rows <= 16) start_split_rows<Format, 16>(p, rows, queue);
  else start_split_rows<Format, 32>(p, rows, queue);
}

}  // namespace

bool can_split_quantized(const Product& p, int rows) {
  const int count = Pieces(p.w.k, p.w.most_pieces).count;
  return rows <= 32 && count > 1 && blocks_of(p.w.n) * count <= kMostTogether * processors();
}

void linear_quantized_split(const Product& p, int rows, const Queue& queue) {
  const bool fine = p.w.codes.groups > 1 && p.w.codes.group < kBlock;
  if (p.w.codes.bits == 4 && fine) start_split<Rounded<4, true>>(p, rows, queue);
  else if (p.w.codes.bits == 4) start_split<Rounded<4, false>>(p, rows, queue);
  else if (fine) start_split<Rounded<8, true>>(p, rows, queue);
  else start_split<Rounded<8, false>>(p, rows, queue);
}

}  // namespace cuda
}  // namespace as
