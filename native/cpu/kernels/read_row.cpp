// Dequantizes one row of a matrix in any format (format.h).
#include <cstring>

#include "cpu/kernels/kernels.h"
#include "cpu/kernels/small_floats.h"
#include "cpu/kernels/tables.h"
#include "cpu/simd.h"

namespace as {
namespace AS_ISA {
namespace {

float float_of_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// The quantized value of k `i` of a group's weights, as stored.
int code_of(const Packed& w, const uint8_t* weights, int lane, int i) {
  switch (w.unit()) {
    case 1:
      return weights[(size_t)i * w.panel + lane];
    case 2:
      return weights[(size_t)(i / 2) * w.panel + lane] >> i % 2 * 4 & 15;
    case 4:
      return weights[((size_t)(i / 4) * w.panel + lane) * 4 + i % 4] - w.bias;
    default:
      return weights[((size_t)(i / 8) * w.panel + lane) * 4 + i % 4] >> i % 8 / 4 * 4 & 15;
  }
}

// A weight is scale * (q - center) + offset.
struct GroupScale {
  float scale, offset;
  int center;
};

float scale_at(const Packed& w, const char* scales, int lane) {
  if (w.scaling.scales == ScaleType::float32) {
    float scale;
    std::memcpy(&scale, scales + 4 * lane, 4);
    return scale;
  }
  uint16_t bits;
  std::memcpy(&bits, scales + 2 * lane, 2);
  return w.scaling.scales == ScaleType::float16 ? half_to_float(bits) : float_of_bits((uint32_t)bits << 16);
}

GroupScale scale_of(const Packed& w, int panel, int g, int lane) {
  const char *head = w.head(panel, g), *second = head + w.panel * w.scale_bytes();
  const ZeroType zeros = w.scaling.zeros;
  GroupScale found{0, 0, w.center()};
  if (w.scaling.super_group) {
    const uint16_t* super = w.super_scales(panel, g);
    found.scale = half_to_float(super[lane]) * (float)(int8_t)head[lane];
    if (zeros == ZeroType::offsets) found.offset = half_to_float(super[w.panel + lane]) * (float)(int8_t)second[lane];
  } else {
    found.scale = scale_at(w, head, lane);
    if (zeros == ZeroType::offsets) found.offset = scale_at(w, second, lane);
  }
  if (zeros == ZeroType::points) found.center = (uint8_t)second[lane];
  return found;
}

}  // namespace

void read_row(const Packed& w, int64_t row, float* y) {
  const int panel = (int)(row / w.panel), lane = (int)(row % w.panel);
  if (!is_quantized(w.format)) {
    const char* data = w.data + panel * w.panel_bytes;
    for (int i = 0; i < w.k; i++) {
      if (w.format == Format::f32) {
        std::memcpy(y + i, data + ((size_t)i * w.panel + lane) * 4, 4);
      } else {
        uint16_t upper;
        const size_t at = w.pairs ? ((size_t)(i / 2) * w.panel + lane) * 2 + i % 2 : (size_t)i * w.panel + lane;
        std::memcpy(&upper, data + at * 2, 2);
        y[i] = float_of_bits((uint32_t)upper << 16);
      }
    }
    return;
  }
  for (int g = 0, k = 0; g < w.groups(); g++) {
    const GroupScale scale = scale_of(w, panel, g, lane);
    const uint8_t* weights = reinterpret_cast<const uint8_t*>(w.weights(panel, g));
    for (int i = 0; i < w.group_k(g); i++, k++) {
      const int to = w.order ? w.order[k] : k;
      if (to < 0) continue;
      const int code = code_of(w, weights, lane, i);
      const float value = is_small_float(w.format)      ? small_float_value(w.format, code)
                          : w.format == Format::e2m1a16 ? small_float_value(Format::e2m1, code ^ w.inverted())
                                                        : (float)(code - scale.center);
      y[to] = scale.scale * value + scale.offset;
    }
  }
}

}  // namespace AS_ISA
}  // namespace as
