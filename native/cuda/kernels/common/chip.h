// Properties of a GPU on which the choice among kernels depends.
#pragma once

namespace as::cuda {

constexpr int kMmaPrefillShapes = 6;  // gemm/mma_prefill_plan.h

// What kernels cost on a chip, in nanoseconds. Choices among kernels of equal bits estimate times by them; only ratios
// matter. cuda/memory/chip_costs.h measures them. The defaults are an H100's.
struct ChipCosts {
  double read = 2900;       // bytes that the chip reads from its memory in a nanosecond
  double graph_node = 600;  // of an empty kernel that a graph launches
  double launch = 750;      // the same, launched by itself while the host is ahead; for doctor alone
  // Of GEMMs by mma.sync, for a block of 64 of K. Tiles of few columns and 64 rows, of 16-bit, 8-bit and 4-bit weights,
  // on a busy SM (gemm_dtype16.cu, gemm_quantized.cu); tiles of gemm_mma_prefill(), and its end for each row.
  double mma[3] = {144, 300, 310};
  double mma_prefill[kMmaPrefillShapes] = {1580, 1560, 1020, 995, 620, 490}, mma_prefill_row = 82;
  double widen[2] = {4.6, 4.0};  // of the chip, to dequantize 64 x 64 values of 8 and of 4 bits

  double mma_of(int bits) const { return mma[bits == 16 ? 0 : bits == 8 ? 1 : 2]; }
  double widen_of(int bits) const { return widen[bits == 8 ? 0 : 1]; }
};

struct Chip {
  int capability = 0;        // 90 is 9.0
  int sms = 0;               // streaming multiprocessors
  int shared_bytes = 0;      // shared memory that a CTA may have
  int prefill_clusters = 0;  // clusters of gemm_prefill()'s largest tile that run at once; 0 unless capability is 90
  ChipCosts costs = {};
};

}  // namespace as::cuda
