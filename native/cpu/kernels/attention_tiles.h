// What attention_bf16.cpp alone includes: types, and with AMX the products of tiles in steps, which it interleaves with
// another tile's softmax.
//
// Tiles 0 to 3 are accumulators, tile 4 holds the operand that they share, tiles 5 to 7 hold the others' in turn. Tiles
// stay configured between blocks, because configuring takes as long as ten products.
#pragma once
#include <algorithm>

#include "cpu/kernels/amx.h"
#include "cpu/kernels/tables.h"
#include "cpu/kernels/tile.h"
#include "cpu/kernels/transpose.h"
#include "cpu/simd.h"

namespace as {
namespace AS_ISA {
namespace {

constexpr int kStep = 32;  // values of a row in 64 bytes
using Weights = uint16_t[kTileRows][kBlockTokens];
using Scores = float[kTileRows][kBlockTokens];

#if defined(AS_ISA_AMX)

thread_local int configured_rows = 0;

// rows: of tiles 0 to 4. The others have 16.
void configure_tiles(int rows) {
  if (rows == configured_rows) return;
  TileConfig config;
  for (int t = 0; t < 8; t++) config.rows[t] = (uint8_t)(t < 5 ? rows : 16), config.row_bytes[t] = 64;
  tile_configure(config);
  configured_rows = rows;
}
constexpr int kColumnTiles = 4;

template <int N, int I = 0>
AS_INLINE void zero_tiles() {
  tile_zero<I>();
  if constexpr (I + 1 < N) zero_tiles<N, I + 1>();
}
// Stores and clears accumulators.
template <int N, int I = 0>
AS_INLINE void store_tiles(float* out, int64_t stride) {
  tile_store<I>(out + 16 * I, stride);
  tile_zero<I>();
  if constexpr (I + 1 < N) store_tiles<N, I + 1>(out, stride);
}
// One step of N accumulators: products of tile 4 with the tiles that b(i) loads from. Operands are cleared after their
// last use (amx.h).
template <int N, int I = 0, typename B>
AS_INLINE void step_tiles(const B& b, int64_t stride) {
  constexpr int kB = 5 + I % 3;
  tile_load<kB>(b(I), stride);
  tile_dot_bf16<I, 4, kB>();
  tile_zero<kB>();
  if constexpr (I + 1 < N) step_tiles<N, I + 1>(b, stride);
  else tile_zero<4>();
}
// The same with tile 4 as the second operand.
template <int N, int I = 0, typename A>
AS_INLINE void step_tiles_after(const A& a, int64_t stride) {
  constexpr int kA = 5 + I % 3;
  tile_load<kA>(a(I), stride);
  tile_dot_bf16<I, kA, 4>();
  tile_zero<kA>();
  if constexpr (I + 1 < N) step_tiles_after<N, I + 1>(a, stride);
  else tile_zero<4>();
}

// A product of tiles in steps: those of up to kColumnTiles groups of 16 results (`count` in all), one after the other,
// each in `depth` steps along the sums. They can be interleaved with the rows of another tile's softmax.
// Own::step_of<N> does step at_ of N groups from group_ on and, if ends(), stores their results and calls next().
template <typename Own>
class TileSteps {
 public:
  int left() const { return (count_ - group_ + kColumnTiles - 1) / kColumnTiles * depth_ - at_; }
  void step() {
    with_constant<kColumnTiles>(std::min(kColumnTiles, count_ - group_),
                                [&](auto n) { static_cast<Own*>(this)->template step_of<n>(); });
  }

 protected:
  TileSteps(int count, int depth) : count_(count), depth_(depth) {}
  AS_INLINE bool ends() { return ++at_ == depth_; }
  AS_INLINE void next(int groups) { at_ = 0, group_ += groups; }

  const int count_, depth_;
  int group_ = 0, at_ = 0;
};

// A latent cache's rows as they are: a row of 64 bytes is a row of a product's first operand, so keys need no
// transposition. The product then is [token][query]; each of its sums has the order and the bits of [query][token].
class LatentScoreSteps : public TileSteps<LatentScoreSteps> {
 public:
  LatentScoreSteps(const AttentionTile& a, Scores& out)
      : TileSteps((a.tokens + kKeyGroup - 1) / kKeyGroup, a.layout->key_dim / kStep),
        a_(a),
        rows_(*static_cast<const LatentRows*>(a.spans[0])),
        out_(out[0]) {}

 private:
  friend TileSteps;
  template <int N>
  void step_of() {
    if (at_ == 0) {
      configure_tiles(kTileRows);
      zero_tiles<N>();
    }
    tile_load<4>(a_.converted + at_ * 1024, 64);
    step_tiles_after<N>([&](int i) { return rows_.groups[group_ + i] + at_ * 64; }, (int64_t)rows_.stride);
    if (!ends()) return;
    alignas(64) float sums[kKeyGroup][N * 16];
    store_tiles<N>(sums[0], sizeof sums[0]);
    for (int i = 0; i < N; i++)
      transpose_16((const char*)(sums[0] + i * 16), sizeof sums[0], (char*)(out_ + (group_ + i) * kKeyGroup),
                   kBlockTokens * sizeof(float));
    next(N);
  }

  const AttentionTile& a_;
  const LatentRows& rows_;
  float* const out_;
};

// Weights times the rows' first features. Two rows are interleaved for 64 columns at a time, which stay in the first
// level.
class LatentValueSteps : public TileSteps<LatentValueSteps> {
 public:
  LatentValueSteps(const AttentionTile& a, const Weights& weights)
      : TileSteps(a.layout->padded_dim / 16, (a.tokens + kStep - 1) / kStep),
        a_(a),
        rows_(*static_cast<const LatentRows*>(a.spans[0])),
        weights_(weights) {}

 private:
  friend TileSteps;
  template <int N>
  void step_of() {
    if (at_ == 0) {
      configure_tiles(a_.rows);
      interleave<N>();
      zero_tiles<N>();
    }
    tile_load<4>(weights_[0] + at_ * kStep, kBlockTokens * 2);
    step_tiles<N>([&](int i) { return pairs_ + (at_ * (kStep / 2) * N + i) * 64; }, N * 64);
    if (!ends()) return;
    store<N>();
    next(N);
  }

  // [pair of tokens][N tiles of 16 columns][2]. Interleaving halves of 128 bits is one instruction for 16 pairs of
  // values, but of two tiles, one gets columns 0-3, 8-11, 16-19, 24-27 and the other the rest. store() undoes this.
  template <int N>
  AS_INLINE void interleave() {
    char* to = pairs_;
    for (int token = 0; token < depth_ * kStep; token += 2) {
      const char* even = rows_.groups[token / kKeyGroup] + token % kKeyGroup * rows_.stride + group_ * 32;
      const char* odd = even + rows_.stride;
      const bool seen = token < a_.tokens, both = token + 1 < a_.tokens;
      int i = 0;
#pragma GCC unroll 2
      for (; i + 2 <= N; i += 2, to += 128) {
        const vi x = seen ? _mm512_loadu_si512(even + i * 32) : _mm512_setzero_si512(),
                 y = both ? _mm512_loadu_si512(odd + i * 32) : _mm512_setzero_si512();
        _mm512_store_si512(to, _mm512_unpacklo_epi16(x, y)), _mm512_store_si512(to + 64, _mm512_unpackhi_epi16(x, y));
      }
      if (N % 2) {
        const __m256i x = seen ? _mm256_loadu_si256((const __m256i*)(even + i * 32)) : _mm256_setzero_si256(),
                      y = both ? _mm256_loadu_si256((const __m256i*)(odd + i * 32)) : _mm256_setzero_si256();
        _mm512_store_si512(to,
                           _mm512_or_si512(_mm512_cvtepu16_epi32(x), _mm512_slli_epi32(_mm512_cvtepu16_epi32(y), 16)));
        to += 64;
      }
    }
  }

  template <int N>
  AS_INLINE void store() {
    const int padded = a_.layout->padded_dim;
    alignas(64) float sums[kTileRows][N * 16];
    store_tiles<N>(sums[0], sizeof sums[0]);
    const vi first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23),
             second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    for (int r = 0; r < a_.rows; r++) {
      float* out = a_.out + (size_t)r * padded + group_ * 16;
      int i = 0;
#pragma GCC unroll 2
      for (; i + 2 <= N; i += 2) {
        const vf low = vload(sums[r] + i * 16), high = vload(sums[r] + i * 16 + 16);
        vstore(out + i * 16, _mm512_permutex2var_ps(low, first, high));
        vstore(out + i * 16 + 16, _mm512_permutex2var_ps(low, second, high));
      }
      if (N % 2) vstore(out + i * 16, vload(sums[r] + i * 16));
    }
  }

  const AttentionTile& a_;
  const LatentRows& rows_;
  const Weights& weights_;
  alignas(64) char pairs_[kBlockTokens / 2 * kColumnTiles * 64];
};

#endif

}  // namespace
}  // namespace AS_ISA
}  // namespace as
