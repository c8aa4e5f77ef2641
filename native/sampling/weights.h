// The weight of a logit, and the shape of sums of weights. Included once for each ISA, as logit_passes.h is, and by GPU
// kernels. Their sums must have the same bits, so multiplications and additions must not be contracted.

constexpr int kLanes = 16;
constexpr int kChunk = 256;

AS_BOTH inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

AS_BOTH inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// exp(y) for y <= 0, relative error below 3e-7; 0 below -87, for -Inf too.
AS_BOTH inline float exp_nonpositive(float y) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves round(y * log2 e) in the low bits
  const float shifted = y * 1.44269504088896341f + kRound;
  const float n = shifted - kRound;
  const float r = (y - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const uint32_t power = (float_to_bits(shifted) - float_to_bits(kRound) + 127u) << 23;
  const uint32_t keep = y >= -87.0f ? 0xffffffffu : 0u;  // masks, not a branch, so that the loop is vectorized
  return bits_to_float(float_to_bits(p * bits_to_float(power)) & keep);
}
