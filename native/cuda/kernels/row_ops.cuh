// What is done to a row of activations by threads of a block: by all of them, in kernels that do nothing else (rows.cu,
// byte_rows.cu, sum_ranks.cu), or by some of its warps, in one that goes on with products. The bits do not depend on
// how many threads there are: sums over a row are those of kRowThreads threads, and fewer play them all. So a thread's
// part `play` of kPlays is what thread number play * count + thread of so many would have.
//
// Rows are read past the first-level cache: others may have written them while this kernel ran.
#pragma once
#include "cuda/kernels/linear_integer.h"

namespace as {
namespace cuda {

constexpr int kRowThreads = 512, kRowWarps = kRowThreads / 32;
constexpr int kRowEight = 8, kRowPiece = 16;  // adjacent columns of a thread, of floats and for bytes
AS_BOTH constexpr int plays_of(int threads) { return (kRowThreads + threads - 1) / threads; }

// Threads of whole warps that have a row together, and a barrier of the block's that is theirs (0 is __syncthreads').
struct RowThreads {
  int thread, count, barrier = 0;

  __device__ void sync() const { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(count) : "memory"); }
  // Number `round` of the parts of a row of all threads, those of `columns` adjacent columns each: where it begins.
  __device__ int column(int columns, int round, int play) const {
    const int part = play * count + thread;
    return part < kRowThreads ? (round * kRowThreads + part) * columns : 1 << 30;
  }
};

// In shared memory, for a row at a time.
struct RowShared {
  float sums[kRowWarps], tops[kRowWarps];
};

// Over all threads' plays, the same in all of them: over each warp's lanes, then over warps in ascending order.
template <int kPlays>
__device__ inline float row_sum(float (&x)[kPlays], const RowThreads& t, RowShared& shared) {
  const int warp = t.thread / 32, warps = t.count / 32;
#pragma unroll
  for (int play = 0; play < kPlays; play++) x[play] = warp_sum(x[play]);
  t.sync();
#pragma unroll
  for (int play = 0; play < kPlays; play++)
    if (t.thread % 32 == 0 && play * warps + warp < kRowWarps) shared.sums[play * warps + warp] = x[play];
  t.sync();
  float total = 0;
  for (int i = 0; i < min(kPlays * warps, kRowWarps); i++) total += shared.sums[i];
  return total;
}

// The greatest, of values of zero or more.
__device__ inline float row_max(float x, const RowThreads& t, RowShared& shared) {
  x = __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(x)));
  t.sync();
  if (t.thread % 32 == 0) shared.tops[t.thread / 32] = x;
  t.sync();
  for (int i = 0; i < t.count / 32; i++) x = fmaxf(x, shared.tops[i]);
  return x;
}

// Values of a row of floats from a column on, those before column `width` (others are 0). kWhole: all are there, and
// aligned; kFresh: past the first-level cache.
template <bool kFresh, bool kWhole = false, int kColumns>
__device__ inline void read_columns(const float* row, int column, int width, float (&x)[kColumns]) {
  if (kWhole ? column < width : width % 4 == 0 && column + kColumns <= width) {
    const float4* from = reinterpret_cast<const float4*>(row + column);
#pragma unroll
    for (int i = 0; i < kColumns / 4; i++) {
      const float4 four = kFresh ? __ldcg(from + i) : from[i];
      x[4 * i] = four.x, x[4 * i + 1] = four.y, x[4 * i + 2] = four.z, x[4 * i + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kColumns; i++)
      x[i] = kWhole || column + i >= width ? 0.0f : kFresh ? __ldcg(row + column + i) : row[column + i];
  }
}

// ---- norms
// A norm's weights, in kKept rounds, as threads have them: nobody makes these, so they may be asked for beforehand.
template <int kPlays, int kKept = 1, bool kWhole = false>
struct NormWeights {
  float values[kKept][kPlays][kRowEight];

  __device__ void read(const RowThreads& t, const Norm& norm, int width) {
#pragma unroll
    for (int round = 0; round < kKept; round++)
#pragma unroll
      for (int play = 0; play < kPlays; play++)
        read_columns<false, kWhole>(norm.weight, t.column(kRowEight, round, play), width, values[round][play]);
  }
};

__device__ inline void add_squares(const float (&x)[kRowEight], float& sum) {
#pragma unroll
  for (int i = 0; i < kRowEight; i++) sum = fmaf(x[i], x[i], sum);
}
__device__ inline float norm_factor(float squares, const Norm& norm, int width) {
  return 1.0f / sqrtf(squares / width + norm.eps);
}
__device__ inline void scale_eight(float (&x)[kRowEight], float factor, const Norm& norm,
                                   const float (&weights)[kRowEight]) {
  const float one = norm.unit_offset ? 1.0f : 0.0f;
#pragma unroll
  for (int i = 0; i < kRowEight; i++) x[i] = x[i] * factor * (weights[i] + one);
}
// What weights do not have of a row, beyond kKept rounds: normed once its factor is known. in: as it was summed up.
template <int kPlays, int kKept, bool kWhole>
__device__ void norm_rest(const RowThreads& t, const float* in, const Norm& norm, float factor, int width,
                          const Rows& out, int row) {
  for (int round = kKept; round * kRowThreads * kRowEight < width; round++)
    for (int play = 0; play < kPlays; play++) {
      const int column = t.column(kRowEight, round, play);
      float x[kRowEight], weights[kRowEight];
      read_columns<true, kWhole>(in, column, width, x);
      read_columns<false, kWhole>(norm.weight, column, width, weights);
      scale_eight(x, factor, norm, weights);
      put_eight(out, row, column, width, x);
    }
}

// Row `row` of x normed, into that of `out`.
template <int kPlays, int kKept>
__device__ void norm_row(const RowThreads& t, RowShared& shared, const float* x, const Norm& norm,
                         const NormWeights<kPlays, kKept>& weights, const Rows& out, int row) {
  const int width = out.width;
  const float* in = x + (size_t)row * width;
  float kept[kKept][kPlays][kRowEight], squares[kPlays] = {};
#pragma unroll
  for (int round = 0; round < kKept; round++)
#pragma unroll
    for (int play = 0; play < kPlays; play++)
      read_columns<true>(in, t.column(kRowEight, round, play), width, kept[round][play]);
#pragma unroll
  for (int round = 0; round < kKept; round++)
#pragma unroll
    for (int play = 0; play < kPlays; play++) add_squares(kept[round][play], squares[play]);
  for (int round = kKept; round * kRowThreads * kRowEight < width; round++)
#pragma unroll
    for (int play = 0; play < kPlays; play++) {
      float rest[kRowEight];
      read_columns<true>(in, t.column(kRowEight, round, play), width, rest);
      add_squares(rest, squares[play]);
    }
  const float factor = norm_factor(row_sum(squares, t, shared), norm, width);
#pragma unroll
  for (int round = 0; round < kKept; round++)
#pragma unroll
    for (int play = 0; play < kPlays; play++) {
      scale_eight(kept[round][play], factor, norm, weights.values[round][play]);
      put_eight(out, row, t.column(kRowEight, round, play), width, kept[round][play]);
    }
  norm_rest<kPlays, kKept, false>(t, in, norm, factor, width, out, row);
}

// ---- activations of 8 bits
constexpr int kMostNormedBytes = kRowThreads * kRowPiece;  // columns of a row that is normed on its way

// A piece of a row of floats, or in tiles, as it comes; zeros behind the row's end.
template <bool kTiles>
struct Piece;
template <>
struct Piece<false> {
  float values[kRowPiece];

  __device__ void read(const Rows& in, int row, int column) {
    read_columns<true>(in.values + (size_t)row * in.width, column, in.width, values);
  }
  __device__ float operator[](int i) const { return values[i]; }
};
template <>
struct Piece<true> {
  uint32_t pairs[kRowPiece / 2];

  __device__ void read(const Rows& in, int row, int column) {
#pragma unroll
    for (int i = 0; i < kRowPiece; i += 8) {
      const int first = column + i, there = in.width - first;
      uint4 eight = make_uint4(0, 0, 0, 0);
      if (there > 0)
        eight = __ldcg(reinterpret_cast<const uint4*>(in.tiles + tile_offset(row, first, blocks_of(in.width))));
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

// Of a norm on the way: its weights, as threads have them (none without a norm).
template <bool kNorms, int kKept>
struct PieceWeights {
  float values[kNorms ? kKept : 1][kRowPiece];

  __device__ void read(const RowThreads& t, const Norm& norm, int width) {
    if constexpr (kNorms)
#pragma unroll
      for (int i = 0; i < kKept; i++)
        read_columns<false>(norm.weight, (i * t.count + t.thread) * kRowPiece, width, values[i]);
  }
};

// What a row's values are multiplied with to become bytes, and its scale; top: the greatest of them, infinite if any is
// not finite.
struct ByteScale {
  float scale, inverse;
};
template <bool kFloats>
__device__ inline ByteScale byte_scale(float top) {
  constexpr float kMost = kFloats ? kLargestFloat8 : 127.0f;
  if (!isfinite(top)) return {NAN, 0};
  if (!(top > 1e-34f)) return {0, 0};
  return {__fdiv_rn(top, kMost), __fdiv_rn(kMost, top)};
}
template <bool kTiles>
__device__ inline void look_at(const Piece<kTiles>& x, float& top) {
#pragma unroll
  for (int i = 0; i < kRowPiece; i++) top = isfinite(x[i]) ? fmaxf(top, fabsf(x[i])) : INFINITY;
}
// A piece's bytes, in the order in which products want them; adds integers to the sum.
template <bool kFloats, bool kTiles>
__device__ inline uint4 bytes_of(const Piece<kTiles>& x, float inverse, int& sum) {
  uint32_t words[4] = {};
  if (inverse != 0) {
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        const float low = __fmul_rn(x[j * 4 + i * 2], inverse), high = __fmul_rn(x[j * 4 + i * 2 + 1], inverse);
        if constexpr (kFloats) {
          words[i] |= (uint32_t)two_e4m3(low, high) << j * 8;
        } else {
          const int a = __float2int_rn(low), b = __float2int_rn(high);
          words[i] |= (uint32_t)((a & 0xff) | (b & 0xff) << 8) << j * 8, sum += a + b;
        }
      }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}
__device__ inline void add_squares(const Piece<false>& x, float& sum) {
#pragma unroll
  for (int i = 0; i < kRowPiece; i++) sum = fmaf(x[i], x[i], sum);
}
__device__ inline void scale_piece(Piece<false>& x, float factor, const Norm& norm, const float (&weights)[kRowPiece]) {
  const float one = norm.unit_offset ? 1.0f : 0.0f;
#pragma unroll
  for (int i = 0; i < kRowPiece; i++) x.values[i] = x.values[i] * factor * (weights[i] + one);
}

// Row `row` of `in` becomes bytes: a = x / scale to nearest, scale = the greatest / 127, as the CPU backend has them,
// or / 448 of floats: a NaN or an infinity makes the scale NaN, and so the row's results; a row of (nearly) zeros is
// zeros. kTiles: `in` is in tiles. kKept: pieces that a thread keeps in registers; kNorms: the row is normed first, and
// has no others (kMostNormedBytes columns). stride: of sums of parts. sums: in shared memory, segments.blocks of them;
// of floats none.
template <bool kFloats, bool kNorms, bool kTiles, int kKept>
__device__ void bytes_row(const RowThreads& t, RowShared& shared, int* sums, const Rows& in, int stride,
                          const Segments& segments, const ByteRows& out, const Norm& norm,
                          const PieceWeights<kNorms, kKept>& weights, int row) {
  const int pieces = segments.blocks * (kBlock / kRowPiece), k = in.width;
  Piece<kTiles> kept[kKept];
  float top = 0;
#pragma unroll
  for (int i = 0; i < kKept; i++) kept[i].read(in, row, (i * t.count + t.thread) * kRowPiece);
  if (!kFloats) {
    t.sync();  // what sums held for the row before has been read
    for (int i = t.thread; i < segments.blocks; i += t.count) sums[i] = 0;
  }
  if constexpr (kNorms) {
    float squares[kKept] = {};
#pragma unroll
    for (int i = 0; i < kKept; i++) add_squares(kept[i], squares[i]);
    const float factor = norm_factor(row_sum(squares, t, shared), norm, k);
#pragma unroll
    for (int i = 0; i < kKept; i++) scale_piece(kept[i], factor, norm, weights.values[i]);
  }
#pragma unroll
  for (int i = 0; i < kKept; i++) look_at(kept[i], top);
  if constexpr (!kNorms)
    for (int piece = kKept * t.count + t.thread; piece < pieces; piece += t.count) {
      Piece<kTiles> x;
      x.read(in, row, piece * kRowPiece);
      look_at(x, top);
    }
  top = row_max(top, t, shared);
  const ByteScale found = byte_scale<kFloats>(top);
  if (t.thread == 0) out.scales[row] = found.scale;
  const auto store = [&](int piece, const Piece<kTiles>& x) {
    int sum = 0;
    const uint4 bytes = bytes_of<kFloats>(x, found.inverse, sum);
    const int block = piece / 4;
    *reinterpret_cast<uint4*>(out.values + ((size_t)(row / kBlock) * segments.blocks + block) * kByteBlock +
                              byte_piece(row % kBlock, piece % 4)) = bytes;
    if (!kFloats) atomicAdd(&sums[segments.end(block)], sum);
  };
#pragma unroll
  for (int i = 0; i < kKept; i++)
    if (const int piece = i * t.count + t.thread; piece < pieces) store(piece, kept[i]);
  if constexpr (!kNorms)
    for (int piece = kKept * t.count + t.thread; piece < pieces; piece += t.count) {
      Piece<kTiles> x;
      x.read(in, row, piece * kRowPiece);
      store(piece, x);
    }
  if (kFloats) return;
  t.sync();
  for (int block = t.thread; block < segments.blocks; block += t.count)
    if (segments.end(block) == block) out.sums[(size_t)block * stride + row] = (float)sums[block];
}

// ---- sums over ranks
__device__ inline uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// The number of a call, of all steps.
__device__ inline uint32_t call_of(const RankSum& s) { return (uint32_t)*s.peers.step * s.calls + s.call + 1; }

// Says to rank r that this one has come to a call, which means that its partial sums are there: what this thread has
// seen of them, and all that others had written before they told this thread so.
__device__ inline void tell_rank(const Peers& p, int r, uint32_t call) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p.flags[r] + p.rank), "r"(call) : "memory");
}

// Waits until rank r has come to a call: for so long as a rank may take; once one has not come, not at all. The sums
// are of no use then, and the host says so (Exchange::check_waits).
__device__ inline void await_rank(const Peers& p, int r, uint32_t call) {
  constexpr int kLooks = 64;  // at a flag, between two at the clock
  const uint32_t* flag = p.flags[p.rank] + r;
  volatile int* failed = p.failed;
  const uint64_t began = nanoseconds();
  for (int look = 1;; look++) {
    uint32_t seen;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
    if ((int32_t)(seen - call) >= 0) return;
    if (look % kLooks) continue;
    if (*failed) return;
    if (nanoseconds() - began > p.limit) {
      *failed = 1 + r;
      __threadfence_system();
      return;
    }
  }
}

// Eight columns of a row of a rank's partial sums, as they come.
template <bool kTiles, bool kWhole>
struct Eight;
template <bool kWhole>
struct Eight<true, kWhole> {
  uint4 pairs;

  __device__ void read(const char* partials, int row, int column, int width) {
    pairs = column < width
                ? __ldcg(reinterpret_cast<const uint4*>(partials + 2 * tile_offset(row, column, blocks_of(width))))
                : make_uint4(0, 0, 0, 0);
  }
  __device__ void add_to(float (&sum)[kRowEight]) const {
    const uint32_t words[kRowEight / 2] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
    for (int i = 0; i < kRowEight; i++)
      sum[i] = __fadd_rn(sum[i], __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16));
  }
};
template <bool kWhole>
struct Eight<false, kWhole> {
  float values[kRowEight];

  __device__ void read(const char* partials, int row, int column, int width) {
    read_columns<true, kWhole>(reinterpret_cast<const float*>(partials) + (size_t)row * width, column, width, values);
  }
  __device__ void add_to(float (&sum)[kRowEight]) const {
#pragma unroll
    for (int i = 0; i < kRowEight; i++) sum[i] = __fadd_rn(sum[i], values[i]);
  }
};

// One row of a sum over ranks, which have all come, and of its norm. kRanks: at most; kWhole: the width is a multiple
// of eight.
template <bool kTiles, int kRanks, bool kWhole, int kPlays>
__device__ void sum_row(const RowThreads& t, RowShared& shared, const RankSum& s,
                        const NormWeights<kPlays, 1, kWhole>& weights, int row) {
  const int width = s.y.width;
  const size_t half = s.call % 2 * s.peers.half;
  const float* y = s.y.values + (size_t)row * width;
  float kept[kPlays][kRowEight], squares[kPlays] = {};
  for (int round = 0; round == 0 || round * kRowThreads * kRowEight < width; round++) {
    Eight<kTiles, kWhole> partials[kPlays][kRanks];
    float x[kPlays][kRowEight];
#pragma unroll
    for (int play = 0; play < kPlays; play++) {  // all that is read, before anything is written
      const int column = t.column(kRowEight, round, play);
#pragma unroll
      for (int r = 0; r < kRanks; r++)
        if (r < s.peers.world) partials[play][r].read(s.peers.partials[r] + half, row, column, width);
      if (s.adds) read_columns<true, kWhole>(y, column, width, x[play]);
    }
#pragma unroll
    for (int play = 0; play < kPlays; play++) {
      const int column = t.column(kRowEight, round, play);
      float sum[kRowEight] = {};
#pragma unroll
      for (int r = 0; r < kRanks; r++)
        if (r < s.peers.world) partials[play][r].add_to(sum);
#pragma unroll
      for (int i = 0; i < kRowEight; i++) {
        if (s.adds) sum[i] = __fadd_rn(x[play][i], sum[i]);
        if (kWhole || column + i < width) squares[play] = fmaf(sum[i], sum[i], squares[play]);
        if (round == 0) kept[play][i] = sum[i];
      }
      put_eight(s.y, row, column, width, sum);
    }
  }
  if (!s.norm.weight) return;
  const float factor = norm_factor(row_sum(squares, t, shared), s.norm, width);
#pragma unroll
  for (int play = 0; play < kPlays; play++) {
    scale_eight(kept[play], factor, s.norm, weights.values[0][play]);
    put_eight(s.normed, row, t.column(kRowEight, 0, play), width, kept[play]);
  }
  norm_rest<kPlays, 1, kWhole>(t, y, s.norm, factor, width, s.normed, row);
}

}  // namespace cuda
}  // namespace as
