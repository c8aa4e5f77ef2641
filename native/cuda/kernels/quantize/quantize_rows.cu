// Quantization of activations to 8-bit integers or floats, optionally fused with the norm before it.
#include <algorithm>

#include "cuda/kernels/gemm/quantize_chunks.cuh"

namespace as::cuda {
namespace {

constexpr int kMaxBlocks = blocks_of(kMaxIntegers);  // blocks of K
constexpr int kGroupChunks = kFloatGroup / kChunkColumns;
enum class ByteForm { integers, floats, float_groups };

// Where the chunk of a row is stored. blocks: of a row.
__device__ uint4* place_of(const ByteRows& out, int row, int chunk, int blocks) {
  return reinterpret_cast<uint4*>(out.values + ((size_t)(row / kBlock) * blocks + chunk / 4) * kByteBlock +
                                  byte_chunk(row % kBlock, chunk % 4));
}

// Stores a chunk of a group that eight adjacent lanes have, if it exists. All lanes of a warp must call it.
template <bool kTiles>
__device__ void store_group(int chunk, int row, int rows, const Chunk<kTiles>& x, const Segments& segments,
                            const ByteRows& out) {
  const ByteScale<true> scale = scale_of_group(x);
  if (row >= rows || chunk >= segments.blocks * 4) return;
  int none = 0;
  *place_of(out, row, chunk, segments.blocks) = scale.bytes(x, none);
  if (chunk % kGroupChunks == 0)
    out.sums[(size_t)segments.end(chunk / 4) * (blocks_of(rows) * kBlock) + row] = scale.scale;
}

// Groups need nothing of their row: a CTA quantizes one of several rows, so that few rows keep all SMs busy, too.
constexpr int kGroupRows = 32;
template <bool kTiles>
__global__ void __launch_bounds__(kGroupRows* kGroupChunks)
    group_bytes_kernel(Rows in, int rows, Segments segments, ByteRows out) {
  const int row = blockIdx.y * kGroupRows + threadIdx.x / kGroupChunks,
            chunk = blockIdx.x * kGroupChunks + threadIdx.x % kGroupChunks;
  let_next_begin();
  await_previous();
  Chunk<kTiles> x;
  x.read(in, row, row < rows ? chunk * kChunkColumns : in.width);
  store_group(chunk, row, rows, x, segments, out);
}

// A CTA quantizes a row at a time; if rows are short, it prefetches its next row before it computes. kTiles: `in` is in
// tiles. kKept: chunks that a thread keeps in registers. kNorms: the row is normalized first, and all of its chunks are
// kept.
template <ByteForm kForm, bool kNorms, bool kTiles, int kThreads, int kKept>
__global__ void __launch_bounds__(kThreads, kKept > 2 && kTiles ? 1024 / kThreads : 1)
    bytes_kernel(Rows in, int rows, Segments segments, ByteRows out, Norm norm) {
  constexpr int kWarps = kThreads / 32;
  constexpr bool kFloats = kForm != ByteForm::integers;
  // Both are used alternately: some warps may still read those of the previous row.
  __shared__ float squares[2][kNorms ? kWarps : 1];
  __shared__ uint32_t tops[2][kWarps];
  __shared__ int sums[kFloats ? 1 : kMaxBlocks];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, chunks = segments.blocks * 4, k = in.width;
  constexpr bool kAhead = kKept <= 2;
  Chunk<kTiles> kept[kKept], next[kAhead ? kKept : 1], weights[kNorms ? kKept : 1];
  const auto chunk_of = [](int i) { return i * kThreads + (int)threadIdx.x; };
  const auto read = [&](int row, Chunk<kTiles>* to) {
#pragma unroll
    for (int i = 0; i < kKept; i++) to[i].read(in, row, chunk_of(i) * kChunkColumns);
  };
  let_next_begin();
  if constexpr (kNorms) {
#pragma unroll
    for (int i = 0; i < kKept; i++)  // no kernel writes these, so there is no need to wait
      weights[i].read(norm.weight, chunk_of(i) * kChunkColumns, k);
  }
  await_previous();
  if (kAhead) read(blockIdx.x, next);
  for (int row = blockIdx.x, turn = 0; row < rows; row += gridDim.x, turn ^= 1) {
    if constexpr (kAhead) {
#pragma unroll
      for (int i = 0; i < kKept; i++) kept[i] = next[i];
      if (row + (int)gridDim.x < rows) read(row + gridDim.x, next);
    } else {
      read(row, kept);
    }
    if (!kFloats)
      for (int i = threadIdx.x; i < segments.blocks; i += kThreads) sums[i] = 0;
    if constexpr (kNorms) {
      static_assert(kKept == 1);
      float square = warp_sum(kept[0].squares());
      if (lane == 0) squares[turn][warp] = square;
      __syncthreads();
      square = 0;
      for (int w = 0; w < kWarps; w++) square += squares[turn][w];
      kept[0].norm(norm_factor(square, k, norm), weights[0], norm.unit_offset ? 1.0f : 0.0f);
    }
    if constexpr (kForm == ByteForm::float_groups) {
      static_assert(kNorms);
      store_group(chunk_of(0), row, rows, kept[0], segments, out);
      continue;
    }
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < kKept; i++) most = kept[i].top(most);
    if constexpr (!kNorms)
      for (int chunk = chunk_of(kKept); chunk < chunks; chunk += kThreads) {
        Chunk<kTiles> x;
        x.read(in, row, chunk * kChunkColumns);
        most = x.top(most);
      }
    most = __reduce_max_sync(0xffffffffu, most);
    if (lane == 0) tops[turn][warp] = most;
    __syncthreads();
    for (int w = 0; w < kWarps; w++) most = max(most, tops[turn][w]);
    const ByteScale<kFloats> scale(most);
    if (threadIdx.x == 0) out.scales[row] = scale.scale;
    const auto store = [&](int chunk, const Chunk<kTiles>& x) {
      int sum = 0;
      *place_of(out, row, chunk, segments.blocks) = scale.bytes(x, sum);
      return sum;
    };
    // A warp's chunks mostly belong to one segment; then the warp adds once.
    const auto add = [&](int chunk, int sum) {
      const int first = segments.end(min(chunk - lane, chunks - 1) / 4),
                last = segments.end(min(chunk - lane + 31, chunks - 1) / 4);
      if (first == last) {
        sum = __reduce_add_sync(0xffffffffu, sum);
        if (lane == 0) atomicAdd(&sums[first], sum);
      } else if (chunk < chunks) {
        atomicAdd(&sums[segments.end(chunk / 4)], sum);
      }
    };
#pragma unroll
    for (int i = 0; i < kKept; i++) {
      const int chunk = chunk_of(i), sum = chunk < chunks ? store(chunk, kept[i]) : 0;
      if constexpr (!kFloats) add(chunk, sum);
    }
    if constexpr (!kNorms)
      for (int chunk = chunk_of(kKept); chunk - lane < chunks; chunk += kThreads) {
        int sum = 0;
        if (chunk < chunks) {
          Chunk<kTiles> x;
          x.read(in, row, chunk * kChunkColumns);
          sum = store(chunk, x);
        }
        if constexpr (!kFloats) add(chunk, sum);
      }
    if (kFloats) continue;
    __syncthreads();
    for (int block = threadIdx.x; block < segments.blocks; block += kThreads)
      if (segments.end(block) == block) out.sums[(size_t)block * (blocks_of(rows) * kBlock) + row] = (float)sums[block];
  }
}

// Launches as many CTAs as fit on all SMs.
template <bool kNorms, bool kTiles, int kThreads, int kKept>
void quantize(const Rows& x, const Norm& norm, const GemmArgs& p, int rows, const Queue& queue) {
  const SplitK k(p.w.k, p.w.max_split_k);
  const ByteForm form = p.w.has_float_groups() ? ByteForm::float_groups
                        : p.w.quants.floats    ? ByteForm::floats
                                               : ByteForm::integers;
  auto kernel = form == ByteForm::floats ? bytes_kernel<ByteForm::floats, kNorms, kTiles, kThreads, kKept>
                                         : bytes_kernel<ByteForm::integers, kNorms, kTiles, kThreads, kKept>;
  if constexpr (kNorms)
    if (form == ByteForm::float_groups) kernel = bytes_kernel<ByteForm::float_groups, kNorms, kTiles, kThreads, kKept>;
  static int at_once[3] = {};
  int& blocks = at_once[(int)form];
  if (!blocks) {
    if (cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kThreads, 0) != cudaSuccess) cudaGetLastError();
    blocks = std::max(blocks, 1) * sm_count();
  }
  start(queue, kernel, std::min(rows, blocks), kThreads, 0, x, rows, Segments(p.w, k), p.bytes, norm);
}

// The fewest threads that keep a row in registers.
template <bool kTiles>
void quantize_rows(const GemmArgs& p, int rows, const Queue& queue) {
  if (p.w.has_float_groups())
    return start(queue, group_bytes_kernel<kTiles>, dim3(p.w.quants.groups, ceil_div(rows, kGroupRows)),
                 kGroupRows * kGroupChunks, 0, p.x, rows, Segments(p.w, SplitK(p.w.k, p.w.max_split_k)), p.bytes);
  const int chunks = (p.w.k + kChunkColumns - 1) / kChunkColumns;
  if (chunks <= 128) quantize<false, kTiles, 128, 1>(p.x, {}, p, rows, queue);
  else if (chunks <= 2 * 128) quantize<false, kTiles, 128, 2>(p.x, {}, p, rows, queue);
  else if (chunks <= 3 * 256) quantize<false, kTiles, 256, 3>(p.x, {}, p, rows, queue);
  else if (chunks <= 4 * 320) quantize<false, kTiles, 320, 4>(p.x, {}, p, rows, queue);
  else quantize<false, kTiles, 512, 3>(p.x, {}, p, rows, queue);
}

// A thread compares a word with that of the same row of the block's first tile's first or second half.
__global__ void block_scales_kernel(const uint32_t* scales, int n, int groups, int* differ) {
  const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  const int block = (int)(i / kScaleWords) / groups, word = i % kScaleWords;
  const int row = block * kBlock + word / kTileRows * kTileRows + word % kTileRows / 2 + word % 2 * 8;
  if (row < n && scales[i] != scales[i - word + word % 2]) *differ = 1;
}

constexpr int kFewThreads = 256, kManyThreads = 512;  // threads that normalize a row; they determine the order of sums

}  // namespace

void quantize_activations(const GemmArgs& p, int rows, const Queue& queue) {
  p.x.tiles ? quantize_rows<true>(p, rows, queue) : quantize_rows<false>(p, rows, queue);
}

bool has_block_scales(const Matrix& m, const Queue& queue) {
  constexpr int kThreads = 256;
  if (!m.has_float_groups()) return false;
  int *differ = nullptr, found = 1;
  if (cudaMallocAsync(reinterpret_cast<void**>(&differ), sizeof(int), queue.stream) != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  cudaMemsetAsync(differ, 0, sizeof(int), queue.stream);
  block_scales_kernel<<<ceil_div(blocks_of(m.n) * m.quants.groups * kScaleWords, kThreads), kThreads, 0,
                        queue.stream>>>(m.quants.scales, m.n, m.quants.groups, differ);
  launched(reinterpret_cast<const void*>(block_scales_kernel));
  cudaMemcpyAsync(&found, differ, sizeof(int), cudaMemcpyDeviceToHost, queue.stream);
  cudaFreeAsync(differ, queue.stream);
  return cudaStreamSynchronize(queue.stream) == cudaSuccess && !found;
}

bool norms_into_bytes(int width) { return width <= kManyThreads * kChunkColumns; }

void rms_norm_into_bytes(const float* x, const Norm& norm, const GemmArgs& p, int rows, const Queue& queue) {
  const Rows in{const_cast<float*>(x), nullptr, p.w.k};
  if (p.w.k <= kFewThreads * kChunkColumns) quantize<true, false, kFewThreads, 1>(in, norm, p, rows, queue);
  else quantize<true, false, kManyThreads, 1>(in, norm, p, rows, queue);
}

size_t byte_rows_bytes(int rows, int k) {
  return (size_t)blocks_of(rows) * blocks_of(k) * (kByteBlock + kBlock * sizeof(float)) +
         (size_t)blocks_of(rows) * kBlock * sizeof(float);
}

ByteRows byte_rows(char* memory, int rows, int k) {
  const size_t blocks = (size_t)blocks_of(rows) * blocks_of(k);
  float* sums = reinterpret_cast<float*>(memory + blocks * kByteBlock);
  return {reinterpret_cast<uint8_t*>(memory), sums, sums + blocks * kBlock};
}

}  // namespace as::cuda
