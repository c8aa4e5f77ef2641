// Attention by mma.sync.
#pragma once
#include "cuda/kernels/attention/attention.h"
#include "cuda/kernels/common/dtype16.h"

namespace as {
namespace cuda {

// Whether there are kernels for this cache: of 16 bits, or quantized; heads of 64, 96, 128 or 256 features, of 16 bits
// also 80. attend_few_...(): attend_few() by these. several: tiles may have several runs. own: rows enter the cache,
// too, as store_cache() has it; false, and nothing is done: of these heads a block of threads has no room for both.
// attend_many_...(): attend_many() by these.
namespace AS_DTYPE16 {
bool has_attend_mma(const Attention& a);
bool attend_few_dtype16(const Attention& a, const AttentionTile* tiles, int count, bool several, bool own,
                        const Turn* turn, const Queue& queue);
void attend_many_mma(const Attention& a, const AttentionTile* tiles, int count, const Queue& queue);
}  // namespace AS_DTYPE16
bool has_attend_quantized(const Attention& a);
bool attend_few_quantized(const Attention& a, const AttentionTile* tiles, int count, bool several, bool own,
                          const Turn* turn, const Queue& queue);
void attend_many_quantized(const Attention& a, const AttentionTile* tiles, int count, const Queue& queue);

}  // namespace cuda
}  // namespace as
