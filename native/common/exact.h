// Elementary functions in double precision with the same bits on every machine and with every C library (libm differs).
// They use basic operations only, in a fixed order; the build forbids contraction. The error is a few units in the last
// place, enough for results that are rounded to float or compared. Tests: tests/native/test_exact.py.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "common/host_device.h"

namespace as {
namespace exact {

AS_BOTH inline uint64_t bits_of(double x) {
  uint64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

AS_BOTH inline double from_bits(uint64_t bits) {
  double x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// x rounded to an integer (to even), |x| < 2^51.
AS_BOTH inline double nearest(double x) {
  constexpr double kShift = 6755399441055744.0;  // 1.5 * 2^52
  return (x + kShift) - kShift;
}

constexpr double kLn2High = 6.93147180369123816490e-01,
                 kLn2Low = 1.90821492927058770002e-10;  // as in fdlibm: 33 bits, and the rest

// e^x; 0 below -708, infinity above 709.
AS_BOTH inline double exp(double x) {
  if (!(x == x)) return x;
  if (x < -708.0) return 0.0;
  if (x > 709.0) return from_bits(0x7ff0000000000000ull);
  const double n = nearest(x * 1.44269504088896338700);
  const double r = (x - n * kLn2High) - n * kLn2Low;
  double p = 1.0 / 6227020800.0;  // Taylor polynomial of degree 13, |r| <= ln 2 / 2
  constexpr double kInverses[] = {
      1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720,
      1.0 / 120,       1.0 / 24,       1.0 / 6,       0.5,          1.0,         1.0};
  for (double inverse : kInverses) p = p * r + inverse;
  return p * from_bits((uint64_t)((int64_t)n + 1023) << 52);
}

// Natural logarithm of a positive normal number.
AS_BOTH inline double log(double x) {
  const uint64_t bits = bits_of(x);
  int64_t exponent = (int64_t)(bits >> 52) - 1023;
  double m = from_bits((bits & 0x000fffffffffffffull) | 0x3ff0000000000000ull);
  if (m > 1.41421356237309504880) m *= 0.5, exponent++;
  const double s = (m - 1.0) / (m + 1.0), z = s * s;  // log m = 2 atanh s = 2 s (1 + z/3 + z^2/5 + ...), |s| <= 0.1716
  double p = 1.0 / 21;
  constexpr double kInverses[] = {1.0 / 19, 1.0 / 17, 1.0 / 15, 1.0 / 13, 1.0 / 11, 1.0 / 9, 1.0 / 7, 1.0 / 5, 1.0 / 3};
  for (double inverse : kInverses) p = p * z + inverse;
  const double tail = 2.0 * s * z * p;
  return (double)exponent * kLn2High + ((double)exponent * kLn2Low + tail + 2.0 * s);
}

// base^exponent for base > 0. Relative error: about 2^-52 |exponent log base|.
inline double pow(double base, double exponent) { return exp(exponent * log(base)); }

// log(1 + e^x).
inline double sigmoid(double x) { return 1 / (1 + exp(-x)); }
inline double softplus(double x) { return std::max(x, 0.0) + log(1 + exp(-std::fabs(x))); }

struct Angle {
  double cosine, sine;
};

// For |x| < 2^28.
inline Angle cos_sin(double x) {
  // pi / 2 in three parts of 24 bits, whose products with n are exact, and a remainder.
  constexpr double kHalfPi[4] = {0x1.921fb4p+0, 0x1.4442d0p-24, 0x1.846988p-48, 0x1.8cc51701b839ap-72};
  const double n = nearest(x * 0.63661977236758134308);
  double r = x;
  for (double part : kHalfPi) r -= n * part;
  const double z = r * r;  // |r| <= pi / 4: Taylor polynomials of degrees 17 and 18
  double s = 1.0 / 355687428096000.0;
  constexpr double kSine[] = {
      -1.0 / 1307674368000.0, 1.0 / 6227020800.0, -1.0 / 39916800, 1.0 / 362880, -1.0 / 5040, 1.0 / 120, -1.0 / 6};
  for (double term : kSine) s = s * z + term;
  s = r + r * (z * s);
  double c = -1.0 / 6402373705728000.0;
  constexpr double kCosine[] = {
      1.0 / 20922789888000.0, -1.0 / 87178291200.0, 1.0 / 479001600, -1.0 / 3628800, 1.0 / 40320, -1.0 / 720, 1.0 / 24};
  for (double term : kCosine) c = c * z + term;
  c = 1.0 - (0.5 * z - z * (z * c));
  switch ((int64_t)n & 3) {
    case 0:
      return {c, s};
    case 1:
      return {-s, c};
    case 2:
      return {-c, -s};
    default:
      return {s, -c};
  }
}

}  // namespace exact
}  // namespace as
