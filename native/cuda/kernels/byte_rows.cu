// Rows of activations become rows of 8 bits, integers or floats, on their way from a norm where there is one.
#include "cuda/kernels/linear_integer.h"

namespace as {
namespace cuda {
namespace {

constexpr int kMostBlocks = blocks_of(kMostIntegers);  // of K
constexpr int kPieceColumns = 16;

// 16 columns of a row of floats, or in tiles, as they come; zeros behind the row's end.
template <bool kTiles>
struct Piece;
template <>
struct Piece<false> {
  float values[kPieceColumns];

  __device__ void read(const float* row, int column, int width) {
    if (width % 4 == 0 && column + kPieceColumns <= width) {
#pragma unroll
      for (int i = 0; i < kPieceColumns; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(row + column + i);
        values[i] = four.x, values[i + 1] = four.y, values[i + 2] = four.z, values[i + 3] = four.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kPieceColumns; i++) values[i] = column + i < width ? row[column + i] : 0.0f;
    }
  }
  __device__ void read(const Rows& in, int row, int column) {
    read(in.values + (size_t)row * in.width, column, in.width);
  }
  __device__ float operator[](int i) const { return values[i]; }
};
template <>
struct Piece<true> {
  uint32_t pairs[kPieceColumns / 2];

  __device__ void read(const Rows& in, int row, int column) {
#pragma unroll
    for (int i = 0; i < kPieceColumns; i += 8) {
      const int first = column + i, there = in.width - first;
      uint4 eight = make_uint4(0, 0, 0, 0);
      if (there > 0) eight = *reinterpret_cast<const uint4*>(in.tiles + tile_offset(row, first, blocks_of(in.width)));
      uint32_t* words = pairs + i / 2;
      words[0] = eight.x, words[1] = eight.y, words[2] = eight.z, words[3] = eight.w;
      if (there < 8)
#pragma unroll
        for (int j = 0; j < 4; j++) words[j] &= 2 * j + 1 < there ? 0xffffffffu : 2 * j < there ? 0xffffu : 0;
    }
  }
  __device__ float operator[](int i) const {
    return __uint_as_float(i % 2 ? pairs[i / 2] & 0xffff0000u : pairs[i / 2] << 16);
  }
};

// A block of threads for each row. a = x / scale to nearest, scale = the greatest / 127, as the CPU backend has them,
// or / 448 of floats: a NaN or an infinity makes the scale NaN, and so the row's results; a row of (nearly) zeros is
// zeros. kTiles: `in` is in tiles. kKept: pieces that a thread keeps in registers; kNorms: the row is normed first, and
// there are no others.
template <bool kFloats, bool kNorms, bool kTiles, int kThreads, int kKept>
__global__ void __launch_bounds__(kThreads)
    bytes_kernel(Rows in, int stride, Segments segments, ByteRows out, Norm norm) {
  constexpr float kMost = kFloats ? kLargestFloat8 : 127.0f;
  constexpr int kWarps = kThreads / 32;
  __shared__ float squares[kNorms ? kWarps : 1], tops[kWarps];
  __shared__ int sums[kFloats ? 1 : kMostBlocks];
  const int row = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, pieces = segments.blocks * 4;
  const int k = in.width;
  Piece<kTiles> kept[kKept], weights[kNorms ? kKept : 1];
  const auto piece_of = [](int i) { return i * kThreads + (int)threadIdx.x; };
  let_next_begin();
  if constexpr (kNorms) {
#pragma unroll
    for (int i = 0; i < kKept; i++)  // nobody makes these: no need to wait for the kernel before
      weights[i].read(norm.weight, piece_of(i) * kPieceColumns, k);
  }
  await_previous();
#pragma unroll
  for (int i = 0; i < kKept; i++) kept[i].read(in, row, piece_of(i) * kPieceColumns);
  if (!kFloats)
    for (int i = threadIdx.x; i < segments.blocks; i += kThreads) sums[i] = 0;
  if constexpr (kNorms) {
    float square = 0;
#pragma unroll
    for (int i = 0; i < kKept; i++)
#pragma unroll
      for (int j = 0; j < kPieceColumns; j++) square = fmaf(kept[i][j], kept[i][j], square);
    square = warp_sum(square);
    if (lane == 0) squares[warp] = square;
    __syncthreads();
    square = 0;
    for (int w = 0; w < kWarps; w++) square += squares[w];
    const float factor = 1.0f / sqrtf(square / k + norm.eps), one = norm.unit_offset ? 1.0f : 0.0f;
#pragma unroll
    for (int i = 0; i < kKept; i++)
#pragma unroll
      for (int j = 0; j < kPieceColumns; j++) kept[i].values[j] = kept[i][j] * factor * (weights[i][j] + one);
  }
  float top = 0;  // infinite if there is anything that is not finite
  const auto look = [&](const Piece<kTiles>& x) {
#pragma unroll
    for (int i = 0; i < kPieceColumns; i++) top = isfinite(x[i]) ? fmaxf(top, fabsf(x[i])) : INFINITY;
  };
#pragma unroll
  for (int i = 0; i < kKept; i++) look(kept[i]);
  if constexpr (!kNorms)
    for (int piece = piece_of(kKept); piece < pieces; piece += kThreads) {
      Piece<kTiles> x;
      x.read(in, row, piece * kPieceColumns);
      look(x);
    }
  top = __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(top)));  // it has no sign
  if (lane == 0) tops[warp] = top;
  __syncthreads();
  for (int w = 0; w < kWarps; w++) top = fmaxf(top, tops[w]);
  float scale = __fdiv_rn(top, kMost), inverse = __fdiv_rn(kMost, top);
  if (!isfinite(top)) scale = NAN, inverse = 0;
  else if (!(top > 1e-34f)) scale = inverse = 0;
  if (threadIdx.x == 0) out.scales[row] = scale;
  const auto store = [&](int piece, const Piece<kTiles>& x) {
    uint32_t words[4] = {};
    int sum = 0;
    if (inverse != 0) {
#pragma unroll
      for (int t = 0; t < 4; t++)
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
          const float low = __fmul_rn(x[j * 4 + t * 2], inverse), high = __fmul_rn(x[j * 4 + t * 2 + 1], inverse);
          if constexpr (kFloats) {
            words[t] |= (uint32_t)two_e4m3(low, high) << j * 8;
          } else {
            const int a = __float2int_rn(low), b = __float2int_rn(high);
            words[t] |= (uint32_t)((a & 0xff) | (b & 0xff) << 8) << j * 8, sum += a + b;
          }
        }
    }
    const int block = piece / 4;
    *reinterpret_cast<uint4*>(out.values + ((size_t)(row / kBlock) * segments.blocks + block) * kByteBlock +
                              byte_piece(row % kBlock, piece % 4)) = make_uint4(words[0], words[1], words[2], words[3]);
    return sum;
  };
  // A warp's pieces are most often all of one segment: then it adds once.
  const auto add = [&](int piece, int sum) {
    const int first = segments.end(min(piece - lane, pieces - 1) / 4),
              last = segments.end(min(piece - lane + 31, pieces - 1) / 4);
    if (first == last) {
      sum = __reduce_add_sync(0xffffffffu, sum);
      if (lane == 0) atomicAdd(&sums[first], sum);
    } else if (piece < pieces) {
      atomicAdd(&sums[segments.end(piece / 4)], sum);
    }
  };
#pragma unroll
  for (int i = 0; i < kKept; i++) {
    const int piece = piece_of(i), sum = piece < pieces ? store(piece, kept[i]) : 0;
    if constexpr (!kFloats) add(piece, sum);
  }
  if constexpr (!kNorms)
    for (int piece = piece_of(kKept); piece - lane < pieces; piece += kThreads) {
      int sum = 0;
      if (piece < pieces) {
        Piece<kTiles> x;
        x.read(in, row, piece * kPieceColumns);
        sum = store(piece, x);
      }
      if constexpr (!kFloats) add(piece, sum);
    }
  if (kFloats) return;
  __syncthreads();
  for (int block = threadIdx.x; block < segments.blocks; block += kThreads)
    if (segments.end(block) == block) out.sums[(size_t)block * stride + row] = (float)sums[block];
}

template <bool kNorms, bool kTiles, int kThreads, int kKept>
void quantize(const Rows& x, const Norm& norm, const Product& p, int rows, const Queue& queue) {
  const Pieces k(p.w.k, p.w.most_pieces);
  const auto kernel = p.w.codes.floats ? bytes_kernel<true, kNorms, kTiles, kThreads, kKept>
                                       : bytes_kernel<false, kNorms, kTiles, kThreads, kKept>;
  start(queue, kernel, rows, kThreads, 0, x, blocks_of(rows) * kBlock, Segments(p.w, k), p.bytes, norm);
  launched("quantizing activations");
}

constexpr int kFewThreads = 256, kManyThreads = 512;

}  // namespace

void quantize_activations(const Product& p, int rows, const Queue& queue) {
  if (p.x.tiles) quantize<false, true, kManyThreads, 3>(p.x, {}, p, rows, queue);
  else quantize<false, false, kManyThreads, 3>(p.x, {}, p, rows, queue);
}

bool norms_into_bytes(int width) { return width <= kManyThreads * kPieceColumns; }

void rms_norm_into_bytes(const float* x, const Norm& norm, const Product& p, int rows, const Queue& queue) {
  const Rows in{const_cast<float*>(x), nullptr, p.w.k};
  if (p.w.k <= kFewThreads * kPieceColumns) quantize<true, false, kFewThreads, 1>(in, norm, p, rows, queue);
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
