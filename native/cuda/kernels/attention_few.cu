// Attention for few rows over bfloat16 caches.
#include "cuda/kernels/attention_few.cuh"
#include "cuda/kernels/attention_mma.h"

namespace as {
namespace cuda {

void attend_few_bf16(const Attention& a, const AttentionTile* tiles, int count, bool several, bool own,
                     const Turn* turn, const Queue& queue) {
  const auto start = [&](auto kernel) { kernel(a, tiles, count, several, own, turn, queue); };
  if (a.cache.head_dim == 64) start(few::start_few<64, CacheType::bf16>);
  else if (a.cache.head_dim == 80) start(few::start_few<80, CacheType::bf16>);
  else if (a.cache.head_dim == 96) start(few::start_few<96, CacheType::bf16>);
  else if (a.cache.head_dim == 128) start(few::start_few<128, CacheType::bf16>);
  else start(few::start_few<256, CacheType::bf16>);
}

}  // namespace cuda
}  // namespace as
