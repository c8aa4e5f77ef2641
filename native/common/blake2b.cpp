#include "common/blake2b.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace as {
namespace {

constexpr size_t kBlock = 128;  // bytes
constexpr int kRounds = 12;
constexpr uint64_t kStart[8] = {0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
                                0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};
// The order of a block's words in each round; rounds 10 and 11 are like 0 and 1.
constexpr uint8_t kOrder[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};

uint64_t turned(uint64_t x, int by) { return x >> by | x << (64 - by); }

void mix(uint64_t& a, uint64_t& b, uint64_t& c, uint64_t& d, uint64_t x, uint64_t y) {
  a += b + x, d = turned(d ^ a, 32);
  c += d, b = turned(b ^ c, 24);
  a += b + y, d = turned(d ^ a, 16);
  c += d, b = turned(b ^ c, 63);
}

// end: the bytes up to the end of this block. last: no block follows.
void compress(uint64_t h[8], const unsigned char* block, uint64_t end, bool last) {
  uint64_t m[16], v[16];
  std::memcpy(m, block, sizeof m);
  std::copy_n(h, 8, v), std::copy_n(kStart, 8, v + 8);
  v[12] ^= end;
  if (last) v[14] = ~v[14];
#pragma GCC unroll 12
  for (int round = 0; round < kRounds; round++) {
    const uint8_t* const order = kOrder[round % 10];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) mix(v[i], v[4 + i], v[8 + i], v[12 + i], m[order[2 * i]], m[order[2 * i + 1]]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
      mix(v[i], v[4 + (i + 1) % 4], v[8 + (i + 2) % 4], v[12 + (i + 3) % 4], m[order[8 + 2 * i]], m[order[9 + 2 * i]]);
  }
  for (int i = 0; i < 8; i++) h[i] ^= v[i] ^ v[8 + i];
}

}  // namespace

void blake2b(const void* data, size_t bytes, void* digest, size_t digest_bytes) {
  uint64_t h[8];
  std::copy_n(kStart, 8, h);
  h[0] ^= 0x01010000 ^ digest_bytes;
  const auto* from = static_cast<const unsigned char*>(data);
  size_t at = 0;
  for (; bytes - at > kBlock; at += kBlock) compress(h, from + at, at + kBlock, false);
  unsigned char rest[kBlock] = {};
  if (bytes > at) std::memcpy(rest, from + at, bytes - at);
  compress(h, rest, bytes, true);
  std::memcpy(digest, h, digest_bytes);
}

}  // namespace as
