// Decode attention over quantized caches.
#include "cuda/kernels/attention/attention_decode.cuh"
#include "cuda/kernels/attention/attention_mma.h"

namespace as::cuda {
namespace {

template <CacheType kType>
auto start_of(int head_dim) {
  if (head_dim == 64) return decode::start_decode<64, kType>;
  if (head_dim == 96) return decode::start_decode<96, kType>;
  return head_dim == 128 ? decode::start_decode<128, kType> : decode::start_decode<256, kType>;
}

}  // namespace

void attend_decode_quantized(const Attention& a, const AttentionTile* tiles, int count, bool several, bool own,
                             const Rope* rope, const Queue& queue) {
  const auto start = a.cache.type == CacheType::int8    ? start_of<CacheType::int8>(a.cache.head_dim)
                     : a.cache.type == CacheType::uint4 ? start_of<CacheType::uint4>(a.cache.head_dim)
                                                        : start_of<CacheType::float8>(a.cache.head_dim);
  start(a, tiles, count, several, own, rope, queue);
}

}  // namespace as::cuda
