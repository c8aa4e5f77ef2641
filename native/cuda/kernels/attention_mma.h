// Attention by mma.sync.
#pragma once
#include "cuda/kernels.h"

namespace as {
namespace cuda {

// Whether there is a kernel for this cache: bfloat16, heads of 64, 96 or 128 features.
bool has_attend_mma(const Attention& a);
// attend_few() but for merging what tiles leave, and attend_many(). own: rows enter the cache, too.
void attend_few_mma(const Attention& a, const AttentionTile* tiles, int count, int splits, bool own, const Turn* turn,
                    const Queue& queue);
void attend_many_mma(const Attention& a, const AttentionTile* tiles, int count, const Queue& queue);

// The same of quantized caches: heads of 64, 96 or 128 features.
bool has_attend_quantized(const Attention& a);
void attend_quantized(const Attention& a, const AttentionTile* tiles, int count, bool few, int splits,
                      const Queue& queue);

}  // namespace cuda
}  // namespace as
