// Attention by mma.sync.
#pragma once
#include "cuda/kernels.h"

namespace as {
namespace cuda {

// Whether there are kernels for this cache: bfloat16, or quantized; heads of 64, 96, 128 or 256 features, of bfloat16
// also 80.
bool has_attend_mma(const Attention& a);
bool has_attend_quantized(const Attention& a);
// attend_few() by these. several: tiles may have several runs. own: rows enter the cache, too, as store_cache() has it;
// false, and nothing is done: of these heads a block of threads has no room for both.
bool attend_few_bf16(const Attention& a, const AttentionTile* tiles, int count, bool several, bool own,
                     const Turn* turn, const Queue& queue);
bool attend_few_quantized(const Attention& a, const AttentionTile* tiles, int count, bool several, bool own,
                          const Turn* turn, const Queue& queue);
// attend_many() by these.
void attend_many_mma(const Attention& a, const AttentionTile* tiles, int count, const Queue& queue);
void attend_many_quantized(const Attention& a, const AttentionTile* tiles, int count, const Queue& queue);

}  // namespace cuda
}  // namespace as
