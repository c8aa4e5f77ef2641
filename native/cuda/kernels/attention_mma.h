// Attention by mma.sync.
#pragma once
#include "cuda/kernels.h"

namespace as {
namespace cuda {

// Whether there is a kernel for this cache: bfloat16, heads of 64, 96 or 128 features.
bool has_attend_mma(const Attention& a);
void attend_few_mma(const Attention& a, const AttentionTile* tiles, int count, int splits, const Queue& queue);
// attend() but for merging what few tiles leave.
void attend_mma(const Attention& a, const AttentionTile* tiles, int count, bool few, int splits, const Queue& queue);

}  // namespace cuda
}  // namespace as
