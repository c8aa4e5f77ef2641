// Latent attention with mma.sync: 16-bit caches of rows of kLatentDim + kLatentRope features.
#pragma once
#include "cuda/kernels/attention/attention.h"
#include "cuda/kernels/common/dtype16.h"

namespace as::cuda {
namespace AS_DTYPE16 {

void attend_latent_decode_mma(const Attention& a, const AttentionTile* tiles, int count, bool several,
                              const Queue& queue);
void attend_latent_prefill_mma(const Attention& a, const AttentionTile* tiles, int count, const Queue& queue);
void attend_latent_selected_mma(const Attention& a, const AttentionTile* tiles, int count, const Queue& queue);

}  // namespace AS_DTYPE16
}  // namespace as::cuda
