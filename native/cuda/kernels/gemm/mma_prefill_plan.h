// Which tiles gemm_mma_prefill() takes, and how long a GEMM of 16-bit weights is expected to take by mma.sync.
#pragma once
#include <algorithm>

#include "cuda/kernels/common/chip.h"
#include "cuda/kernels/common/tiles.h"
#include "cuda/kernels/common/types.h"

namespace as::cuda {

// A tile of 128 columns. whole: K is one part. A stage has 64 of K.
struct MmaPrefillShape {
  bool whole;
  int rows, stages;

  static constexpr int kColumns = 128;
  constexpr int shared() const { return stages * (kColumns + rows) * kRowBytes; }
};
// Of shapes with equal tiles the first that fits is best. More stages were not faster.
constexpr MmaPrefillShape kMmaPrefill[kMmaPrefillShapes] = {{true, 256, 3},  {true, 256, 2},  {false, 192, 3},
                                                            {false, 192, 2}, {false, 128, 3}, {false, 64, 4}};

// Operations a second of so many SMs by the best shape that the chip has; a multiply-add is two.
inline double mma_rate(const ChipCosts& costs, int shared_bytes, int sms) {
  double best = 0;
  for (int i = 0; i < kMmaPrefillShapes; i++)
    if (kMmaPrefill[i].shared() <= shared_bytes)
      best = std::max(best, 2.0 * kMmaPrefill[i].rows * MmaPrefillShape::kColumns * kBlock / costs.mma_prefill[i]);
  return 1e9 * sms * best;
}

struct MmaPrefillPlan {
  int shape = -1;
  double nanoseconds = 1e30;

  // shared_bytes, sms: of the chip. wanted: the number of a shape, for benchmarks; -1: the best.
  MmaPrefillPlan(const ChipCosts& costs, int shared_bytes, int sms, const Matrix& w, int rows, bool gated,
                 int wanted = -1) {
    const SplitK k(w.k, w.max_split_k);
    for (int i = 0; i < kMmaPrefillShapes; i++) {
      const MmaPrefillShape& s = kMmaPrefill[i];
      if (s.shared() > shared_bytes || (s.whole && k.count > 1) || (wanted >= 0 && i != wanted)) continue;
      const int tiles = ((rows + s.rows - 1) / s.rows) * ((w.n + s.kColumns - 1) / s.kColumns);
      const double tile = k.blocks * costs.mma_prefill[i] + (gated ? 0 : costs.mma_prefill_row * s.rows);
      const double time = ((tiles + sms - 1) / sms) * tile;
      if (time < nanoseconds) shape = i, nanoseconds = time;
    }
  }
};

}  // namespace as::cuda
