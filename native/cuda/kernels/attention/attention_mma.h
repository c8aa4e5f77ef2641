// Attention by mma.sync.
#pragma once
#include "cuda/kernels/attention/attention.h"
#include "cuda/kernels/common/dtype16.h"

namespace as::cuda {

// Of caches of 16 bits, or quantized; heads of 64, 96, 128 or 256 features, of 16 bits also 80. several: tiles may have
// several runs. own: rows enter the cache, too, as store_cache() has it.
namespace AS_DTYPE16 {
void attend_decode_dtype16(const Attention& a, const AttentionTile* tiles, int count, bool several, bool own,
                           const Rope* rope, const Queue& queue);
void attend_prefill_mma(const Attention& a, const AttentionTile* tiles, int count, const Queue& queue);
}  // namespace AS_DTYPE16
void attend_decode_quantized(const Attention& a, const AttentionTile* tiles, int count, bool several, bool own,
                             const Rope* rope, const Queue& queue);
void attend_prefill_quantized(const Attention& a, const AttentionTile* tiles, int count, const Queue& queue);

}  // namespace as::cuda
