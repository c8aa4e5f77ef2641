// A chunk of the gated delta rule, on tensor cores: what the state answers to keys and queries, forward substitution,
// and the state's advance. Values are rows of all products: a warp has 32 of them, a lane four.
#pragma once
#include <type_traits>

#include "cuda/kernels/recurrent/delta.cuh"
#include "cuda/kernels/recurrent/tf32.cuh"

namespace as::cuda {
namespace recurrent {

constexpr int kPairs = kChunkRows + 4;  // floats of a row of pairs
AS_BOTH constexpr int least(int a, int b) { return a < b ? a : b; }

// Shared memory of a CTA that computes kC values of a head, for up to kRows rows of a chunk at a time.
template <int kC, int kRows>
struct ChunkMemory {
  static constexpr int kStride = kC + 8;                                                 // floats of a row of values
  static constexpr int kKeyRows = kRows < kChunkRows ? kChunkRows + kRows : kChunkRows;  // tiles may begin at any row
  static constexpr int kBehind = 24;  // floats that advance() reads behind a chunk's last key
  double* totals;                     // of the chunk's rows
  float* whole;                       // in their place: the decay of the whole chunk, of each channel
  float *betas, *shrunk, *grown;      // of these: beta; the decay since the chunk's begin, and until its end
  float *state, *keys, *queries;      // [padded, kStride], [kKeyRows, stride], [kRows, stride]
  float* pairs;                       // [keys and queries, kRows, kPairs]
  float *deltas, *known;              // [kChunkRows, kStride], [kBlock, kStride]

  __host__ __device__ static size_t bytes(int padded) {
    return sizeof(float) * (2 * kChunkRows + 3 * kKeyRows + (size_t)(padded + kChunkRows + kBlock) * kStride +
                            (kKeyRows + kRows) * (padded + 4) + 2 * kBehind + 2 * kRows * kPairs);
  }
  __device__ ChunkMemory(float* memory, int padded) {
    totals = reinterpret_cast<double*>(memory), whole = memory, betas = memory + 2 * kChunkRows;
    shrunk = betas + kKeyRows;
    grown = shrunk + kKeyRows, state = grown + kKeyRows, deltas = state + padded * kStride;
    known = deltas + kChunkRows * kStride, keys = known + kBlock * kStride;
    queries = keys + kKeyRows * (padded + 4) + kBehind, pairs = queries + kRows * (padded + 4) + kBehind;
  }
};

// The work of a CTA on rows [first, first + count) of a chunk. Columns of products are rows of the chunk from `base`
// on: of their keys, and of their queries, which are parts 0 and 1. kChannels: there is a decay for each channel; then
// keys, queries and products come with their decays.
template <bool kDelta, int kC, int kRows, bool kChannels = false>
struct ChunkWork {
  static constexpr int kMostWarps = 16,  // more would have too few registers
      kParts = kDelta ? 2 : 1, kValueWarps = kC / 32,
                       kGroups = kRows < kChunkRows ? 1 : least(kMostWarps / kValueWarps / kParts, kRows / 8),
                       kTiles = kRows / 8 / kGroups, kColumnWarps = kParts * kGroups,
                       kThreads = 32 * kValueWarps * kColumnWarps, kStride = ChunkMemory<kC, kRows>::kStride;
  const ChunkMemory<kC, kRows>& m;
  const int padded, stride;
  const int column_warp, part, column, value;  // first column of the warp; of the lane's four values
  int first = 0, count = 0, base = 0;
  float sums[kTiles][2][4];

  __device__ ChunkWork(const ChunkMemory<kC, kRows>& memory, const DeltaArgs& a)
      : m(memory),
        padded(a.padded),
        stride(a.stride),
        column_warp(threadIdx.x / 32 / kValueWarps),
        part(kDelta ? column_warp / kGroups : 1),
        column(column_warp % kGroups * kTiles * 8),
        value(threadIdx.x / 32 % kValueWarps * 32 + threadIdx.x % 32 / 4 * 4) {}

  __device__ void take(int first_row, int rows, int base_row) { first = first_row, count = rows, base = base_row; }
  __device__ int row_of(int n) const { return base + column + 8 * n; }
  __device__ int last_block() const { return (first + count - 1) / kBlock; }

  // Loads a chunk that lies in the ring as a whole, for grow() and advance(). width: of the values that the head has.
  __device__ void load_past(const float* keys, const float* deltas, const double* totals, const DeltaShape& s,
                            int width, bool aligned) const {
    load_rows(m.keys, stride, keys, s.key, kChunkRows, s.key, padded, aligned);
    load_rows(m.deltas, kStride, deltas, s.value, kChunkRows, width, kC, aligned);
    for (int j = threadIdx.x; j < kChunkRows; j += kThreads)
      m.totals[j] = totals[j], m.shrunk[j] = decay_between(totals[j], 0.0);
  }

  // Zeros for deltas behind the last row, up to the end of its block.
  __device__ void clear_deltas_behind() const {
    for (int i = (first + count) * kC + threadIdx.x; i < (last_block() + 1) * kBlock * kC; i += kThreads)
      m.deltas[i / kC * kStride + i % kC] = 0;
  }

  // Of a state space: deltas are values times their steps.
  __device__ void scale_deltas() const {
    for (int n = threadIdx.x; n < count * kC; n += kThreads) {
      float& delta = m.deltas[(first + n / kC) * kStride + n % kC];
      delta = __fmul_rn(m.betas[first + n / kC], delta);
    }
  }

  // Writes the rows' deltas to the ring, from the chunk's first row on.
  __device__ void keep_deltas(float* ring, int pitch, int width) const {
    for (int n = threadIdx.x; n < count * kC; n += kThreads)
      if (const int j = first + n / kC, c = n % kC; c < width) ring[(size_t)j * pitch + c] = m.deltas[j * kStride + c];
  }

  // sums = what the state answers to the columns' keys or queries
  __device__ void answer() {
    const int g = lane() / 4, t = lane() % 4;
    const float* right = (part ? m.queries : m.keys + base * stride) + (column + g) * stride + t;
#pragma unroll
    for (int n = 0; n < kTiles; n++)
#pragma unroll
      for (int i = 0; i < 8; i++) sums[n][i / 4][i % 4] = 0;
#pragma unroll(kTiles == 1 ? 4 : kTiles == 2 ? 2 : 1)
    for (int k = 0; k < padded; k += 8) {
      const float* left = m.state + (k + t) * kStride + value;
      add_products(sums, four_at(left), four_at(left + 4 * kStride),
                   [&](int n, int half) { return right[8 * n * stride + k + half * 4]; });
    }
    if constexpr (!kChannels) {
#pragma unroll
      for (int n = 0; n < kTiles; n++)
#pragma unroll
        for (int i = 0; i < 8; i++) {
          float& sum = sums[n][i / 4][i % 4];
          sum = __fmul_rn(m.shrunk[row_of(n) + 2 * t + i % 2], sum);
        }
    }
  }

  // The deltas of all rows from their values, which m.deltas has; sums of the queries. Warps of the same values wait
  // for each other only: one of them solves a block, while those of queries add the block before.
  __device__ void substitute() {
    int added = 0;
    for (int b = 0; b <= last_block(); b++) {
      if (kDelta && kBlock * (b + 1) > first) {
        if (part == 0) store_known(b);
        wait_for_values();
        if (column_warp == 0) solve(b);
        if (part == 1)
          for (; added < b; added++) add_deltas(added);
        wait_for_values();
      }
      if (part == 0 && b < last_block()) add_deltas(b);
    }
    if (part == 1)
      for (; added <= last_block(); added++) add_deltas(added);
  }

  // Passes each row's sums to take(row, four values).
  template <typename Take>
  __device__ void each_row(const Take& take) const {
#pragma unroll
    for (int n = 0; n < kTiles; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int i = row_of(n) + lane() % 4 * 2 + e;
        if (i >= first && i < first + count)
          take(i, make_float4(sums[n][0][e], sums[n][0][2 + e], sums[n][1][e], sums[n][1][2 + e]));
      }
  }

  // The decays until the end of the chunk, from the totals of all its rows.
  __device__ void grow() const {
    for (int j = threadIdx.x; j < kChunkRows; j += kThreads)
      m.grown[j] = decay_between(m.totals[kChunkRows - 1], m.totals[j]);
  }

  // The state after the chunk, after grow(). Keys and deltas are those of all its rows; with a decay for each channel,
  // keys come with the factors of the rows behind them.
  __device__ void advance() {
    // Tiles of 8 channels at a time; what is behind the last channel is read, but not used.
    constexpr int kWide = least(4, kMostKeyDim / 8 / kColumnWarps);
    const int g = lane() / 4, t = lane() % 4;
    const float of_head = kChannels ? 0.0f : m.shrunk[kChunkRows - 1];
    for (int c = column_warp * 8 * kWide; c < padded; c += kColumnWarps * 8 * kWide) {
      float next[kWide][2][4];
      float* own = m.state + (c + 2 * t) * kStride + value;
#pragma unroll
      for (int n = 0; n < kWide; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const float factor = kChannels ? m.whole[c + 8 * n + 2 * t + e] : of_head;
          const float4 four = scaled(factor, four_at(own + (8 * n + e) * kStride));
          next[n][0][e] = four.x, next[n][0][2 + e] = four.y, next[n][1][e] = four.z, next[n][1][2 + e] = four.w;
        }
#pragma unroll(4 / kWide)  // where a step is short, several
      for (int k = 0; k < kChunkRows; k += 8) {
        const float* left = m.deltas + (k + t) * kStride + value;
        const float* right = m.keys + (k + t) * stride + c + g;
        const auto keys = [&](int n, int half) { return right[half * 4 * stride + 8 * n]; };
        if (kChannels) add_products(next, four_at(left), four_at(left + 4 * kStride), keys);
        else
          add_products(next, scaled(m.grown[k + t], four_at(left)),
                       scaled(m.grown[k + t + 4], four_at(left + 4 * kStride)), keys);
      }
#pragma unroll
      for (int n = 0; n < kWide; n++)
#pragma unroll
        for (int e = 0; e < 2; e++)
          if (c + 8 * n < padded)
            put_four(own + (8 * n + e) * kStride,
                     make_float4(next[n][0][e], next[n][0][2 + e], next[n][1][e], next[n][1][2 + e]));
    }
    __syncthreads();
  }

 private:
  // sums += the deltas of block b, as far as rows see them; of the block's own rows only queries do
  __device__ void add_deltas(int b) {
    const int seeing = (b + !part) * kBlock - row_of(0);  // columns of the warp before it see nothing of the block
    if (seeing <= 0) add_deltas_to<0>(b);
    else if (kTiles > 2 && seeing < kTiles * 8)
      add_deltas_to<kTiles / 2>(b);  // a tile of a whole chunk is in one block
    else if (kRows < kChunkRows && seeing < 8) add_deltas_to<0>(b);
  }
  template <int kFrom>
  __device__ void add_deltas_to(int b) {
    const int g = lane() / 4, t = lane() % 4;
    const float* right = m.pairs + ((size_t)part * kRows + column + g) * kPairs + t;
#pragma unroll
    for (int k = b * kBlock; k < (b + 1) * kBlock; k += 8) {
      const float* left = m.deltas + (k + t) * kStride + value;
      add_products<kFrom>(sums, four_at(left), four_at(left + 4 * kStride), [&](int n, int half) {
        const bool seen = kRows == kChunkRows || part || (row_of(n) + g) / kBlock > b;
        return seen ? right[8 * n * kPairs + k + half * 4] : 0.0f;
      });
    }
  }

  __device__ void store_known(int b) const {
    if constexpr (kRows == kChunkRows) {  // tiles lie in one block; rows that are not the work's are not read
#pragma unroll
      for (int n = 0; n < kTiles; n++)
        if ((column + 8 * n) / kBlock == b) {
          float* to = m.known + ((column + 8 * n) % kBlock + lane() % 4 * 2) * kStride + value;
          put_four(to, make_float4(sums[n][0][0], sums[n][0][2], sums[n][1][0], sums[n][1][2]));
          put_four(to + kStride, make_float4(sums[n][0][1], sums[n][0][3], sums[n][1][1], sums[n][1][3]));
        }
    } else {
      each_row([&](int i, const float4& four) {
        if (i / kBlock == b) put_four(m.known + i % kBlock * kStride + value, four);
      });
    }
  }

  // Forward substitution in block b, by a warp that has a value a thread.
  __device__ void solve(int b) const {
    const int d = value - lane() / 4 * 4 + lane();
    float* deltas = m.deltas + b * kBlock * kStride + d;
    const float *known = m.known + d, *pairs = m.pairs + b * kBlock;
    if constexpr (kRows == kChunkRows) {
      pairs += b * kBlock * kPairs;
      // Nothing is stored before the end, and nothing branches, so that loads need not wait. Deltas of rows before
      // these stay, those of rows behind them are zero.
      const int begin = first - b * kBlock, end = begin + count;
      float own[kBlock], delta[kBlock];
#pragma unroll
      for (int r = 0; r < kBlock; r++) own[r] = known[r * kStride], delta[r] = deltas[r * kStride];
#pragma unroll
      for (int j = 0; j < kBlock; j++) {
        const float solved = __fmul_rn(m.betas[kBlock * b + j], __fsub_rn(delta[j], own[j]));
        delta[j] = j >= begin ? solved : delta[j];
#pragma unroll
        for (int r = j + 1; r < kBlock; r++) own[r] = fmaf(pairs[r * kPairs + j], delta[j], own[r]);
      }
#pragma unroll
      for (int r = 0; r < kBlock; r++) deltas[r * kStride] = r < end ? delta[r] : 0.0f;
    } else {
      const int begin = max(first - b * kBlock, 0), end = min(first + count - b * kBlock, kBlock);
      pairs += (b * kBlock - base) * kPairs;
      for (int r = begin; r < end; r++) {
        float sum = known[r * kStride];
        for (int j = 0; j < r; j++) sum = fmaf(pairs[r * kPairs + j], deltas[j * kStride], sum);
        deltas[r * kStride] = __fmul_rn(m.betas[kBlock * b + r], __fsub_rn(deltas[r * kStride], sum));
      }
    }
  }

  // Waits for the warps of the same values.
  __device__ void wait_for_values() const {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + threadIdx.x / 32 % kValueWarps), "n"(32 * kColumnWarps) : "memory");
  }
  __device__ static int lane() { return threadIdx.x % 32; }
};

// Passes launch() the fewest parts of a head, by the values of each, that occupy the GPU: each of them loads the
// chunk's keys and products.
template <typename Launch>
void with_columns(const DeltaArgs& a, const StateRows& rows, const Launch& launch) {
  const int value = a.p.shape.value, heads = a.p.shape.heads * rows.long_items, sms = sm_count();
  const auto wide = [&](int columns, size_t shared) {
    return 2 * value > columns && 4 * heads * ceil_div(value, columns) >= 3 * sms && (int)shared <= max_shared();
  };
  if (wide(128, ChunkMemory<128, kChunkRows>::bytes(a.padded))) launch(std::integral_constant<int, 128>());
  else if (wide(64, ChunkMemory<64, kChunkRows>::bytes(a.padded))) launch(std::integral_constant<int, 64>());
  else launch(std::integral_constant<int, 32>());
}

// Writes four values of a row of a head, from value d on, as far as the head has them.
template <bool kDelta>
__device__ void put_values(const DeltaArgs& a, int head, int d, size_t row, float4 four) {
  const DeltaShape& s = a.p.shape;
  float* y = a.p.y + (row * s.heads + head) * s.value + d;
  if constexpr (!kDelta) {
    const float skip = a.p.skip[head], *x = a.p.x + row * a.width + a.v_at + head * s.value + d;
    float* values = &four.x;
#pragma unroll
    for (int u = 0; u < 4; u++)
      if (d + u < s.value) values[u] = fmaf(skip, x[u], values[u]);
  }
  if (a.aligned && d < s.value) put_four(y, four);
  else if (!a.aligned) {
    const float* values = &four.x;
#pragma unroll
    for (int u = 0; u < 4; u++)
      if (d + u < s.value) y[u] = values[u];
  }
}

}  // namespace recurrent
}  // namespace as::cuda
