// Rows of activations become rows of 8 bits, integers or floats, on their way from a norm where there is one.
#include "cuda/kernels/linear_integer.h"

namespace as {
namespace cuda {
namespace {

constexpr int kMostBlocks = blocks_of(kMostIntegers);  // of K
constexpr int kPiece = 16;                             // columns

// 16 columns of a row; zeros behind its end.
__device__ void load_piece(const float* in, int k, int piece, float (&x)[kPiece]) {
  const int first = piece * kPiece;
  if (k % 4 == 0 && first + kPiece <= k) {
#pragma unroll
    for (int i = 0; i < kPiece / 4; i++) {
      const float4 four = reinterpret_cast<const float4*>(in + first)[i];
      x[4 * i] = four.x, x[4 * i + 1] = four.y, x[4 * i + 2] = four.z, x[4 * i + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPiece; i++) x[i] = first + i < k ? in[first + i] : 0.0f;
  }
}
__device__ void load_piece(const Rows& in, int row, int piece, float (&x)[kPiece]) {
  if (!in.tiles) return load_piece(in.values + (size_t)row * in.width, in.width, piece, x);
#pragma unroll
  for (int i = 0; i < kPiece; i += 8) {
    const int first = piece * kPiece + i;
    const uint4 eight = first < in.width
                            ? *reinterpret_cast<const uint4*>(in.tiles + tile_offset(row, first, blocks_of(in.width)))
                            : make_uint4(0, 0, 0, 0);
    const uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
    for (int j = 0; j < 8; j++)
      x[i + j] = first + j < in.width ? from_bf16((uint16_t)(words[j / 2] >> j % 2 * 16)) : 0.0f;
  }
}

// A block of threads for each row. a = x / scale to nearest, scale = the greatest / 127, as the CPU backend has them,
// or / 448 of floats: a NaN or an infinity makes the scale NaN, and so the row's results; a row of (nearly) zeros is
// zeros. kKept: pieces of 16 columns that a thread keeps in registers; kNorms: the row is normed first, and there are
// no others.
template <bool kFloats, bool kNorms, int kThreads, int kKept>
__global__ void __launch_bounds__(kThreads)
    bytes_kernel(Rows in, int stride, Segments segments, ByteRows out, Norm norm) {
  constexpr float kMost = kFloats ? kLargestFloat8 : 127.0f;
  constexpr int kWarps = kThreads / 32;
  __shared__ float squares[kNorms ? kWarps : 1], tops[kWarps];
  __shared__ int wrong[kWarps], sums[kFloats ? 1 : kMostBlocks];
  const int row = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, pieces = segments.blocks * 4;
  const int k = in.width;
  float kept[kKept][kPiece], weights[kNorms ? kKept : 1][kPiece], top = 0;
  bool bad = false;
  const auto look = [&](const float(&x)[kPiece]) {
#pragma unroll
    for (int i = 0; i < kPiece; i++) top = fmaxf(top, fabsf(x[i])), bad |= !isfinite(x[i]);
  };
  let_next_begin();
  if constexpr (kNorms) {
#pragma unroll
    for (int i = 0; i < kKept; i++)  // nobody makes these: no need to wait for the kernel before
      if (const int piece = i * kThreads + threadIdx.x; piece < pieces) load_piece(norm.weight, k, piece, weights[i]);
  }
  await_previous();
#pragma unroll
  for (int i = 0; i < kKept; i++)
    if (const int piece = i * kThreads + threadIdx.x; piece < pieces) load_piece(in, row, piece, kept[i]);
  if (!kFloats)
    for (int i = threadIdx.x; i < segments.blocks; i += kThreads) sums[i] = 0;
  if constexpr (kNorms) {
    float square = 0;
#pragma unroll
    for (int i = 0; i < kKept; i++)
      if (i * kThreads + threadIdx.x < pieces)
#pragma unroll
        for (int j = 0; j < kPiece; j++) square = fmaf(kept[i][j], kept[i][j], square);
    square = warp_sum(square);
    if (lane == 0) squares[warp] = square;
    __syncthreads();
    square = 0;
    for (int w = 0; w < kWarps; w++) square += squares[w];
    const float factor = 1.0f / sqrtf(square / k + norm.eps), one = norm.unit_offset ? 1.0f : 0.0f;
#pragma unroll
    for (int i = 0; i < kKept; i++)
#pragma unroll
      for (int j = 0; j < kPiece; j++) kept[i][j] = kept[i][j] * factor * (weights[i][j] + one);
  }
#pragma unroll
  for (int i = 0; i < kKept; i++)
    if (i * kThreads + threadIdx.x < pieces) look(kept[i]);
  if constexpr (!kNorms)
    for (int piece = kKept * kThreads + threadIdx.x; piece < pieces; piece += kThreads) {
      float x[kPiece];
      load_piece(in, row, piece, x);
      look(x);
    }
  top = warp_max(top);
  const unsigned bad_lanes = __ballot_sync(0xffffffffu, bad);
  if (lane == 0) tops[warp] = top, wrong[warp] = bad_lanes != 0;
  __syncthreads();
  for (int w = 0; w < kWarps; w++) top = fmaxf(top, tops[w]), bad |= wrong[w] != 0;
  float scale = __fdiv_rn(top, kMost), inverse = __fdiv_rn(kMost, top);
  if (bad) scale = NAN, inverse = 0;
  else if (!(top > 1e-34f)) scale = inverse = 0;
  if (threadIdx.x == 0) out.scales[row] = scale;
  const auto store = [&](int piece, const float(&x)[kPiece]) {
    uint32_t words[4] = {};
    int sum = 0;
    if (inverse != 0) {
#pragma unroll
      for (int t = 0; t < 4; t++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const float scaled = __fmul_rn(x[j / 2 * 8 + t * 2 + j % 2], inverse);
          if constexpr (kFloats) {
            words[t] |= (uint32_t)to_e4m3(scaled) << j * 8;
          } else {
            const int a = __float2int_rn(scaled);
            words[t] |= (uint32_t)(a & 0xff) << j * 8, sum += a;
          }
        }
    }
    const int block = piece / 4;
    *reinterpret_cast<uint4*>(out.values + ((size_t)(row / kBlock) * segments.blocks + block) * kByteBlock +
                              byte_piece(row % kBlock, piece % 4)) = make_uint4(words[0], words[1], words[2], words[3]);
    if (!kFloats) atomicAdd(&sums[segments.end(block)], sum);
  };
#pragma unroll
  for (int i = 0; i < kKept; i++)
    if (const int piece = i * kThreads + threadIdx.x; piece < pieces) store(piece, kept[i]);
  if constexpr (!kNorms)
    for (int piece = kKept * kThreads + threadIdx.x; piece < pieces; piece += kThreads) {
      float x[kPiece];
      load_piece(in, row, piece, x);
      store(piece, x);
    }
  if (kFloats) return;
  __syncthreads();
  for (int block = threadIdx.x; block < segments.blocks; block += kThreads)
    if (segments.end(block) == block) out.sums[(size_t)block * stride + row] = (float)sums[block];
}

template <bool kNorms, int kThreads, int kKept>
void quantize(const Rows& x, const Norm& norm, const Product& p, int rows, const Queue& queue) {
  const Pieces k(p.w.k, p.w.most_pieces);
  const auto kernel =
      p.w.codes.floats ? bytes_kernel<true, kNorms, kThreads, kKept> : bytes_kernel<false, kNorms, kThreads, kKept>;
  start(queue, kernel, rows, kThreads, 0, x, blocks_of(rows) * kBlock, Segments(p.w, k), p.bytes, norm);
  launched("quantizing activations");
}

constexpr int kFewThreads = 256, kManyThreads = 512;

}  // namespace

void quantize_activations(const Product& p, int rows, const Queue& queue) {
  quantize<false, kManyThreads, 3>(p.x, {}, p, rows, queue);
}

bool norms_into_bytes(int width) { return width <= kManyThreads * kPiece; }

void rms_norm_into_bytes(const float* x, const Norm& norm, const Product& p, int rows, const Queue& queue) {
  const Rows in{const_cast<float*>(x), nullptr, p.w.k};
  if (p.w.k <= kFewThreads * kPiece) quantize<true, kFewThreads, 1>(in, norm, p, rows, queue);
  else quantize<true, kManyThreads, 1>(in, norm, p, rows, queue);
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
