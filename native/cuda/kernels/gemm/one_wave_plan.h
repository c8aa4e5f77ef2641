// Tiles of 16-bit GEMMs with one CTA for each (gemm_one_wave.cuh), and how long they are expected to take.
#pragma once
#include <cstdint>

#include "cuda/kernels/common/tiles.h"
#include "cuda/kernels/common/types.h"

namespace as::cuda {

// A tile of `groups` warpgroups, each with `height` blocks of 64 rows, and some columns. picoseconds: of a block of K
// and one column, measured on an H200.
struct OneWaveTile {
  int groups, height, columns, picoseconds;

  constexpr int rows() const { return groups * height * kBlock; }
};
constexpr OneWaveTile kOneWaveTiles[] = {{1, 1, 144, 3620}, {1, 1, 192, 3620}, {1, 1, 224, 3620}, {2, 1, 144, 3820},
                                         {2, 1, 192, 3820}, {2, 1, 224, 3820}, {3, 1, 144, 4850}, {2, 2, 144, 6400}};
constexpr int kOneWaveTileCount = sizeof(kOneWaveTiles) / sizeof(kOneWaveTiles[0]);

// The best of these tiles for a matrix whose sums have one split-K part.
struct OneWavePlan {
  int tile = -1;  // -1: none suits
  int64_t nanoseconds = INT64_MAX;

  OneWavePlan(const Matrix& w, int rows, int sms) {
    constexpr int kMostWaves = 4;
    constexpr int kEnd = 2000;  // nanoseconds of the first copies and the epilogue
    if (SplitK(w.k, w.max_split_k).count > 1) return;
    for (int i = 0; i < kOneWaveTileCount; i++) {
      const OneWaveTile& t = kOneWaveTiles[i];
      const int tiles = ((rows + t.rows() - 1) / t.rows()) * ((w.n + t.columns - 1) / t.columns);
      const int waves = (tiles + sms - 1) / sms;
      const int64_t time = waves * ((int64_t)blocks_of(w.k) * t.columns * t.picoseconds / 1000 + kEnd);
      if (waves <= kMostWaves && time < nanoseconds) tile = i, nanoseconds = time;
    }
  }
};

}  // namespace as::cuda
