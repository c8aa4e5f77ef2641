// Shared memory of latent attention with mma.sync, which decides whether a GPU can run it.
#pragma once
#include "cuda/kernels/attention/decode_plan.h"

namespace as::cuda {

// A CTA of latent attention (latent_mma.cu): its bytes besides the ring, for so many operands of 16 pairs; positions of
// a stage, and its bytes. A block of kDecodeTokens positions is in the ring while it is computed, and further stages
// arrive meanwhile.
constexpr int kLatentTokens = 16, kLatentRow = 2 * kLargestRow + 16, kLatentStage = kLatentTokens * kLatentRow,
              kLatentMostStages = 24;
constexpr int latent_fixed(int tiles) {
  const int queries = tiles == 1 ? 16 : tiles * kDecodePairs * kLatentRow;
  return kDecodeFixed + tiles * kDecodePairs * (kDecodeTokens / 8 + 4 * kDecodeTokens) * 4 + queries;
}
constexpr int latent_stages(int shared_bytes, int tiles) {
  return std::min((shared_bytes - latent_fixed(tiles)) / kLatentStage, kLatentMostStages);
}
constexpr bool latent_fits(int shared_bytes, int tiles) {
  return latent_stages(shared_bytes, tiles) > kDecodeTokens / kLatentTokens;
}

}  // namespace as::cuda
