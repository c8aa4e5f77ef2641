// What a weight is: its shape and how its values are stored. Values themselves are a backend's.
#pragma once
#include <string>

namespace as {

// How the scales of quantized values are laid out. A value is scale * (code - center) + offset, where the center is
// 2^(bits
// - 1) of integers unless they have zero points; formats with a table have table[code] instead of code - center.
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

  bool is_default() const;
};

// A matrix [n, k] as y = x w^T has it, or with k = 0 a float32 vector [n].
struct WeightSpec {
  int n, k;
  std::string format;
  int group;  // along k, of quantized formats; 0: one group a row
  ScaleLayout layout;

  double bytes() const;  // stored
};

// Throws std::invalid_argument naming what was wrong.
void check_matrix(const WeightSpec& matrix);

// Throw std::invalid_argument for a name that there is not.
ScaleType scale_type_of(const std::string& name);
ZeroType zero_type_of(const std::string& name);
const char* name_of(ScaleType type);
const char* name_of(ZeroType type);

}  // namespace as
