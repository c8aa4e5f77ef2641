// Random numbers of sampling. They depend on the seed, the sample and the position only.
#pragma once
#include <cstdint>

#include "common/host_device.h"

namespace as {
namespace sampling {

struct Uniforms {
  double first, second;  // in [0, 1), 53 bits each
};

// The coordinates of a random number.
struct RandomAt {
  uint64_t seed;
  int32_t sample_index, position;
};

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011). Replaces counter by the output.
AS_BOTH inline void philox4x32_10(uint32_t counter[4], uint32_t key[2]) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = static_cast<uint64_t>(0xD2511F53u) * counter[0];
    const uint64_t b = static_cast<uint64_t>(0xCD9E8D57u) * counter[2];
    const uint32_t first = static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0];
    const uint32_t third = static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1];
    counter[0] = first;
    counter[1] = static_cast<uint32_t>(b);
    counter[2] = third;
    counter[3] = static_cast<uint32_t>(a);
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
}

struct RandomIntegers {
  uint64_t first, second;  // 53 bits each
};

AS_BOTH inline RandomIntegers random_integers(const RandomAt& at, uint32_t stream) {
  uint32_t counter[4] = {static_cast<uint32_t>(at.position), static_cast<uint32_t>(at.sample_index), stream, 0};
  uint32_t key[2] = {static_cast<uint32_t>(at.seed), static_cast<uint32_t>(at.seed >> 32)};
  philox4x32_10(counter, key);
  return {((static_cast<uint64_t>(counter[0]) << 32) | counter[1]) >> 11,
          ((static_cast<uint64_t>(counter[2]) << 32) | counter[3]) >> 11};
}

constexpr double kUnit = 1.0 / 9007199254740992.0;  // 2^-53

AS_BOTH inline Uniforms uniforms_of(const RandomAt& at) {
  const RandomIntegers n = random_integers(at, 0);
  return {static_cast<double>(n.first) * kUnit, static_cast<double>(n.second) * kUnit};
}

// Two numbers in (0, 1), 53 bits each, for the chunks 2 * pair and 2 * pair + 1. Their logarithms are finite and not 0.
AS_BOTH inline Uniforms chunk_uniforms_of(const RandomAt& at, int pair) {
  const RandomIntegers n = random_integers(at, 1 + static_cast<uint32_t>(pair));
  return {(static_cast<double>(n.first >> 1) + 0.5) * (2.0 * kUnit),
          (static_cast<double>(n.second >> 1) + 0.5) * (2.0 * kUnit)};
}

}  // namespace sampling
}  // namespace as
