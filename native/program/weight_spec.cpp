#include "program/weight_spec.h"

#include <cmath>
#include <stdexcept>

namespace as {
namespace {

enum class Values { plain, integers, small_floats };  // floats; integers; small floats, such as e4m3 or nf4

struct FormatSpec {
  const char* name;
  double bits;
  Values values;
};

// w8a8 and w4a8 are stored as int8 and int4, float8 as e4m3, e2m1a16 as e2m1. They quantize activations, too.
constexpr FormatSpec kFormats[] = {
    {"float32", 32, Values::plain},      {"bfloat16", 16, Values::plain},      {"float16", 16, Values::plain},
    {"int8", 8, Values::integers},       {"int4", 4, Values::integers},        {"w8a8", 8, Values::integers},
    {"w4a8", 4, Values::integers},       {"int6", 6, Values::integers},        {"int5", 5, Values::integers},
    {"int3", 3, Values::integers},       {"int2", 2, Values::integers},        {"nf4", 4, Values::small_floats},
    {"e2m1", 4, Values::small_floats},   {"e2m1a16", 4, Values::small_floats}, {"e4m3", 8, Values::small_floats},
    {"float8", 8, Values::small_floats}, {"mxfp4", 4.25, Values::plain}};  // with a byte for the scale of each 32

const FormatSpec& format_spec(const std::string& name) {
  std::string known;
  for (const FormatSpec& f : kFormats) {
    if (name == f.name) return f;
    known += (known.empty() ? "" : ", ") + std::string(f.name);
  }
  throw std::invalid_argument("no weight format " + name + ": known are " + known);
}

constexpr const char* kScaleNames[] = {"none", "float32", "bfloat16", "float16", "e8m0"};
constexpr double kScaleBytes[] = {0, 4, 2, 2, 1};
constexpr const char* kZeroNames[] = {"none", "offsets", "points"};

template <class Type, size_t kCount>
Type named(const char* const (&names)[kCount], const std::string& name, const char* what) {
  std::string known;
  for (size_t i = 0; i < kCount; i++) {
    if (name == names[i]) return (Type)i;
    known += (known.empty() ? "" : ", ") + std::string(names[i]);
  }
  throw std::invalid_argument(std::string(what) + " must be one of " + known + ", got " + name);
}

}  // namespace

double WeightSpec::bytes() const {
  if (!k) return n * 4.0;
  const FormatSpec& f = format_spec(format);
  const double values = n * std::ceil(k * f.bits / 8);
  if (f.values == Values::plain) return values;
  const double groups = std::ceil((double)n / layout.group_rows) * (group ? (k + group - 1) / group : 1);
  const int kinds = layout.zeros == ZeroType::offsets ? 2 : 1;  // scales, or scales and offsets
  double scales = groups * kinds * kScaleBytes[(int)layout.scales];
  if (layout.super_group) {
    const int super_groups = (k + layout.super_group - 1) / layout.super_group;
    scales = kinds * (groups * layout.scale_bits / 8.0 + 2.0 * n * super_groups);
  }
  return values + scales + (layout.zeros == ZeroType::points ? groups * f.bits / 8 : 0) +
         (layout.permuted ? 4.0 * k : 0);
}

void check_matrix(const WeightSpec& m) {
  if (m.n < 1 || m.k < 1)
    throw std::invalid_argument("matrix of " + std::to_string(m.n) + " x " + std::to_string(m.k) +
                                ": both must be positive");
  if (m.group < 0 || m.group % 8)
    throw std::invalid_argument("group_size must be a multiple of 8, or 0, got " + std::to_string(m.group));
  const FormatSpec& f = format_spec(m.format);
  const ScaleLayout& l = m.layout;
  const std::string text = "matrix of format " + m.format;
  if (l.is_default()) return;
  if (f.values == Values::plain) throw std::invalid_argument(text + " has no scales");
  if (f.values == Values::small_floats && l.zeros == ZeroType::points)
    throw std::invalid_argument(text + " has no zero points: its quantized values are not integers");
  if (l.center >= 0 && (f.values != Values::integers || l.center >= 1 << (int)f.bits))
    throw std::invalid_argument(text + " has no quantized value " + std::to_string(l.center) + " to stand for 0");
  if (l.group_rows < 1 || (l.group_rows > 1 && !m.group))
    throw std::invalid_argument(text + ": scales of " + std::to_string(l.group_rows) +
                                " rows need a positive number of them, and groups along in_features");
  if ((l.super_group != 0) != (l.scale_bits != 0) || l.super_group < 0 || l.scale_bits < 0 || l.scale_bits > 8 ||
      (l.super_group && (!m.group || l.super_group % m.group)))
    throw std::invalid_argument(text + ": nested scales need 1 to 8 bits and super-groups that are whole groups, got " +
                                std::to_string(l.scale_bits) + " bits and super-groups of " +
                                std::to_string(l.super_group) + " values over groups of " + std::to_string(m.group));
}

ScaleType scale_type_of(const std::string& name) { return named<ScaleType>(kScaleNames, name, "scales"); }
ZeroType zero_type_of(const std::string& name) { return named<ZeroType>(kZeroNames, name, "zeros"); }
const char* name_of(ScaleType type) { return kScaleNames[(int)type]; }
const char* name_of(ZeroType type) { return kZeroNames[(int)type]; }

}  // namespace as
