// Attention with mma.sync.
#pragma once
#include "cuda/kernels/attention/attention.h"
#include "cuda/kernels/common/dtype16.h"

namespace as::cuda {

// Head dimensions 64, 96, 128 and 256, with 16-bit caches also 80, and in attend_large() 512. several: tiles may have
// several KV splits. own: the kernel also stores the rows in the cache, as store_cache() does.
namespace AS_DTYPE16 {
void attend_decode_dtype16(const Attention& a, const AttentionTile* tiles, int count, bool several, bool own,
                           const Rope* rope, const Queue& queue);
void attend_prefill_mma(const Attention& a, const AttentionTile* tiles, int count, const Queue& queue);
// decode: partial results of tiles with several KV splits are not merged.
void attend_large(const Attention& a, const AttentionTile* tiles, int count, int sharers, bool decode,
                  const Queue& queue);
}  // namespace AS_DTYPE16
void attend_decode_quantized(const Attention& a, const AttentionTile* tiles, int count, bool several, bool own,
                             const Rope* rope, const Queue& queue);

}  // namespace as::cuda
