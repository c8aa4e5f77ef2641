// How the scales of quantized values are laid out. A value is scale * (code - center) + offset, or with zero points
// scale * (code - point); of formats with a table table[code] stands for code - center.
#pragma once

namespace as {

enum class ScaleType { none, float32, bfloat16, float16, e8m0 };
enum class ZeroType {
  none,
  offsets,  // of the scales' type, added
  points,   // integers in place of the center
};
struct ScaleLayout {
  ScaleType scales = ScaleType::bfloat16;
  ZeroType zeros = ZeroType::offsets;
  int group_rows = 1;     // adjacent rows that share scales: 128 of FP8 in blocks
  bool permuted = false;  // a column's group is that of a list of in_features integers (act-order), not column / group
  int super_group = 0;  // nested: along in_features, so many values have one float16 scale (and one of the offsets) ...
  int scale_bits = 0;   // ... that multiplies integers of so many bits, the groups' scales (and offsets)
  int center = -1;      // the code that stands for 0; -1: 2^(bits - 1)

  constexpr bool is_default() const {
    return scales == ScaleType::bfloat16 && zeros == ZeroType::offsets && group_rows == 1 && !permuted &&
           !super_group && !scale_bits && center < 0;
  }
};

}  // namespace as
