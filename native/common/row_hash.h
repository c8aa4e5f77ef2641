// A hash of a checkpoint's rows that identifies weights. It is not cryptographic, and fast enough to hash everything
// that is loaded.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace as {

// A step of wyhash (public domain): the two halves of the product, xored.
inline uint64_t fold(uint64_t a, uint64_t b) {
  __extension__ typedef unsigned __int128 Product;
  const Product product = (Product)a * b;
  return (uint64_t)product ^ (uint64_t)(product >> 64);
}

constexpr size_t kHashAhead = 2048;  // bytes that are prefetched ahead: prefetching by hardware ends with a page

// The hash of row `row`. use(i, word) is called for the 8-byte words of all whole blocks, and use_rest(i, its bytes)
// for the rest. `ahead` bytes are prefetched, past the end of the row, too: the next one follows.
template <typename Use, typename UseRest>
uint64_t row_hash_with(const void* data, size_t bytes, uint64_t row, size_t ahead, const Use& use,
                       const UseRest& use_rest) {
  constexpr int kLanes = 4;  // hides the multiplication's latency
  constexpr uint64_t kKeys[kLanes] = {0xa0761d6478bd642f, 0xe7037ed1a0b428db, 0x8ebc6af09c88c6e3, 0x589965cc75374cc3};
  const char* p = static_cast<const char*>(data);
  uint64_t lanes[kLanes];
  for (int i = 0; i < kLanes; i++) lanes[i] = fold(row ^ kKeys[i], bytes ^ kKeys[(i + 1) % kLanes]);
  auto block = [&](const char* from, auto&& use_word) {
    for (int i = 0; i < kLanes; i++) {
      uint64_t words[2];
      std::memcpy(words, from + 16 * i, sizeof words);
      use_word(16 * i, words[0]), use_word(16 * i + 8, words[1]);
      lanes[i] = fold(words[0] ^ kKeys[i], words[1] ^ lanes[i]);
    }
  };
  constexpr size_t kBlock = 16 * kLanes;
  size_t i = 0;
  for (; i + kBlock <= bytes; i += kBlock) {
    __builtin_prefetch(p + i + ahead);
    block(p + i, [&](size_t at, uint64_t word) { use(i + at, word); });
  }
  if (i < bytes) {
    char rest[kBlock] = {};
    std::memcpy(rest, p + i, bytes - i);
    use_rest(i, rest);
    block(rest, [](size_t, uint64_t) {});
  }
  uint64_t hash = row;
  for (int k = 0; k < kLanes; k++) hash = fold(hash ^ lanes[k], kKeys[k]);
  return hash;
}

// The hash of row `row`. Sums of rows' hashes identify a set of rows whatever the order of addition.
inline uint64_t row_hash(const void* data, size_t bytes, uint64_t row, size_t ahead = kHashAhead) {
  return row_hash_with(data, bytes, row, ahead, [](size_t, uint64_t) {}, [](size_t, const char*) {});
}

// Copies a row, and returns the hash of what was written, also if `from` changes meanwhile. The stores bypass the
// caches: a copy of many rows is limited by memory, and reading the lines that are written would take half as much time
// again.
inline uint64_t copy_row_hash(char* to, const void* from, size_t bytes, uint64_t row) {
  const auto store = [&](size_t at, uint64_t word) {
#if defined(__x86_64__)
    _mm_stream_si64(reinterpret_cast<long long*>(to + at), (long long)word);
#else
    std::memcpy(to + at, &word, sizeof word);
#endif
  };
  const uint64_t hash = row_hash_with(from, bytes, row, kHashAhead, store,
                                      [&](size_t at, const char* rest) { std::memcpy(to + at, rest, bytes - at); });
#if defined(__x86_64__)
  _mm_sfence();
#endif
  return hash;
}

}  // namespace as
