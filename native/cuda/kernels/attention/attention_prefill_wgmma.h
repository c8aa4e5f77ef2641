// Attention by wgmma.
#pragma once
#include "cuda/kernels/attention/attention.h"
#include "cuda/kernels/common/dtype16.h"

namespace as::cuda {
namespace AS_DTYPE16 {

// For 16-bit caches and heads of 64, 128 or 256 features, without slopes; capability 9.0.
void attend_prefill_wgmma(const Attention& a, const AttentionTile* tiles, int count, const Rope* rope,
                          const Queue& queue);
// The same for heads of 256 features.
void attend_prefill_wide(const Attention& a, const AttentionTile* tiles, int count, const Queue& queue);

}  // namespace AS_DTYPE16
}  // namespace as::cuda
