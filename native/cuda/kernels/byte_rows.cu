// Rows of activations become rows of 8 bits, integers or floats, on their way from a norm where there is one.
#include "cuda/kernels/row_ops.cuh"

namespace as {
namespace cuda {
namespace {

constexpr int kMostBlocks = blocks_of(kMostIntegers);  // of K

// A block of threads for each row.
template <bool kFloats, bool kNorms, bool kTiles, int kThreads, int kKept>
__global__ void __launch_bounds__(kThreads)
    bytes_kernel(Rows in, int stride, Segments segments, ByteRows out, Norm norm) {
  __shared__ RowShared shared;
  __shared__ int sums[kFloats ? 1 : kMostBlocks];
  const RowThreads all{(int)threadIdx.x, kThreads};
  PieceWeights<kNorms, kKept> weights;
  let_next_begin();
  weights.read(all, norm, in.width);  // no need to wait for the kernel before
  await_previous();
  bytes_row<kFloats, kNorms, kTiles, kKept>(all, shared, sums, in, stride, segments, out, norm, weights, blockIdx.x);
}

template <bool kNorms, bool kTiles, int kThreads, int kKept>
void quantize(const Rows& x, const Norm& norm, const Product& p, int rows, const Queue& queue) {
  const Pieces k(p.w.k, p.w.most_pieces);
  const auto kernel = p.w.codes.floats ? bytes_kernel<true, kNorms, kTiles, kThreads, kKept>
                                       : bytes_kernel<false, kNorms, kTiles, kThreads, kKept>;
  start(queue, kernel, rows, kThreads, 0, x, blocks_of(rows) * kBlock, Segments(p.w, k), p.bytes, norm);
  launched("quantizing activations");
}

constexpr int kFewThreads = 256, kManyThreads = kRowThreads;

}  // namespace

void quantize_activations(const Product& p, int rows, const Queue& queue) {
  if (p.x.tiles) quantize<false, true, kManyThreads, 3>(p.x, {}, p, rows, queue);
  else quantize<false, false, kManyThreads, 3>(p.x, {}, p, rows, queue);
}

bool norms_into_bytes(int width) { return width <= kMostNormedBytes; }

void rms_norm_into_bytes(const float* x, const Norm& norm, const Product& p, int rows, const Queue& queue) {
  const Rows in{const_cast<float*>(x), nullptr, p.w.k};
  if (p.w.k <= kFewThreads * kRowPiece) quantize<true, false, kFewThreads, 1>(in, norm, p, rows, queue);
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

}  // namespace cuda
}  // namespace as
