// What a weight is: its shape and how its values are stored. Values themselves are a backend's.
#pragma once
#include <string>

#include "program/scale_layout.h"

namespace as {

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
