// Decode attention over 16-bit caches.
#include "cuda/kernels/attention/attention_decode.cuh"
#include "cuda/kernels/attention/attention_mma.h"

namespace as::cuda {
namespace AS_DTYPE16 {

void attend_decode_dtype16(const Attention& a, const AttentionTile* tiles, int count, bool several, bool own,
                           const Rope* rope, const Queue& queue) {
  const auto start = [&](auto kernel) { return kernel(a, tiles, count, several, own, rope, queue); };
  if (a.cache.head_dim == 64) return start(decode::start_decode<64, CacheType::dtype16>);
  if (a.cache.head_dim == 80) return start(decode::start_decode<80, CacheType::dtype16>);
  if (a.cache.head_dim == 96) return start(decode::start_decode<96, CacheType::dtype16>);
  if (a.cache.head_dim == 128) return start(decode::start_decode<128, CacheType::dtype16>);
  return start(decode::start_decode<256, CacheType::dtype16>);
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
