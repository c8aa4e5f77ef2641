// Shared memory of attention kernels, which decides whether a GPU can run them.
#pragma once
#include "cuda/kernels/attention/attention.h"

namespace as::cuda {

constexpr int kPrefillShared256 = 152064;  // bytes of a CTA of prefill with heads of 256 features, of any cache type
constexpr int kLargeShared = 166400;       // of attention with heads of 512 features

// A CTA of attention_decode(): its bytes besides queries, own rows and the ring of keys and values; positions of a
// stage of the ring; the fewest stages of the ring.
constexpr int kDecodeFixed = 11712, kDecodeTokens = 64, kDecodeStages = kKvSplitTokens / kDecodeTokens;

// Whether a CTA's shared memory suffices. own_rows: rows that the kernel stores in the cache itself.
constexpr bool decode_fits(CacheType type, int head_dim, int own_rows, int shared_bytes) {
  const int bits = type == CacheType::dtype16 ? 16 : type == CacheType::uint4 ? 4 : 8;
  const int row = head_dim * bits / 8 + 16, scales = type == CacheType::int8 || type == CacheType::uint4 ? 8 : 0;
  const int fixed = kDecodeFixed + kDecodePairs * 2 * (head_dim + 8) + 2 * own_rows * row;
  return (shared_bytes - fixed) / (kDecodeTokens * (row + scales)) >= kDecodeStages;
}

}  // namespace as::cuda
