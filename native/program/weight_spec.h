// A weight's shape and storage format. Backends hold the values.
#pragma once
#include <string>

#include "program/scale_layout.h"

namespace as {

struct WeightSpec {
  int n, k;
  std::string format;
  int group;  // values along k that share a scale; 0: one group a row
  ScaleLayout layout;

  double bytes() const;  // as stored
};

// Throws std::invalid_argument that names the problem.
void check_matrix(const WeightSpec& matrix);

// Throw std::invalid_argument for an unknown name.
ScaleType scale_type_of(const std::string& name);
ZeroType zero_type_of(const std::string& name);
const char* name_of(ScaleType type);
const char* name_of(ZeroType type);

}  // namespace as
