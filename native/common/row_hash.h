// A hash of a checkpoint's rows that identifies weights. It is not cryptographic, and fast enough to hash everything
// that is loaded.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace as {

// A step of wyhash (public domain): the two halves of the product, xored.
inline uint64_t fold(uint64_t a, uint64_t b) {
  __extension__ typedef unsigned __int128 Product;
  const Product product = (Product)a * b;
  return (uint64_t)product ^ (uint64_t)(product >> 64);
}

// The hash of row `row`. Sums of rows' hashes identify a set of rows whatever the order of addition.
inline uint64_t row_hash(const void* data, size_t bytes, uint64_t row) {
  constexpr int kLanes = 4;  // hides the multiplication's latency
  constexpr uint64_t kKeys[kLanes] = {0xa0761d6478bd642f, 0xe7037ed1a0b428db, 0x8ebc6af09c88c6e3, 0x589965cc75374cc3};
  const char* p = static_cast<const char*>(data);
  uint64_t lanes[kLanes];
  for (int i = 0; i < kLanes; i++) lanes[i] = fold(row ^ kKeys[i], bytes ^ kKeys[(i + 1) % kLanes]);
  auto block = [&](const char* from) {
    for (int i = 0; i < kLanes; i++) {
      uint64_t words[2];
      std::memcpy(words, from + 16 * i, sizeof words);
      lanes[i] = fold(words[0] ^ kKeys[i], words[1] ^ lanes[i]);
    }
  };
  constexpr size_t kBlock = 16 * kLanes, kAhead = 2048;  // prefetching by hardware ends with a page
  size_t i = 0;
  for (; i + kBlock <= bytes; i += kBlock) {
    __builtin_prefetch(p + i + kAhead);  // past the end of the row, too: the next one follows
    block(p + i);
  }
  if (i < bytes) {
    char rest[kBlock] = {};
    std::memcpy(rest, p + i, bytes - i);
    block(rest);
  }
  uint64_t hash = row;
  for (int k = 0; k < kLanes; k++) hash = fold(hash ^ lanes[k], kKeys[k]);
  return hash;
}

}  // namespace as
