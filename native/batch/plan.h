// The step plan that rank 0 sends: see allspark_server/runtime/plan.py, which writes it.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "sampling/sampler.h"

namespace as {

struct NewSequence {
  int slot;
  SamplingParams sampling;
  std::vector<int32_t> history;
};

struct Work {
  int slot, start, count;
  bool sample;
  std::vector<int32_t> append, spans;
};

struct Plan {
  std::vector<int32_t> free;
  std::vector<NewSequence> fresh;
  std::vector<Work> work;

  // Throws std::invalid_argument on anything that is not a whole, well-formed plan.
  static Plan parse(const std::string& bytes);
};

}  // namespace as
