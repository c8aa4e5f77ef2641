// How the scales of quantized values are laid out. A value is scale * (q - center) + offset or, with zero points,
// scale * (q - point). In formats with a table, table[q] takes the place of q - center.
#pragma once

namespace as {

enum class ScaleType { none, float32, bfloat16, float16, e8m0 };
enum class ZeroType {
  none,
  offsets,  // of the scales' type, added
  points,   // integers that replace the center
};
struct ScaleLayout {
  ScaleType scales = ScaleType::bfloat16;
  ZeroType zeros = ZeroType::offsets;
  int group_rows = 1;     // adjacent rows that share scales: 128 for FP8 in blocks
  bool permuted = false;  // a list gives each column's group (act-order); otherwise it is column / group
  int super_group = 0;    // nested scales: values along in_features with one float16 scale (and offset) ...
  int scale_bits = 0;     // ... that multiplies the groups' scales (and offsets), integers of this many bits
  int center = -1;        // the quantized value that stands for 0; -1: 2^(bits - 1)

  constexpr bool is_default() const {
    return scales == ScaleType::bfloat16 && zeros == ZeroType::offsets && group_rows == 1 && !permuted &&
           !super_group && !scale_bits && center < 0;
  }
};

}  // namespace as
