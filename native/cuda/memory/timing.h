// Times of queued work.
#pragma once
#include <functional>

#include "cuda/memory/device.h"

namespace as::cuda {

// Seconds of the least and of the middle one of several runs of the same work, after a first one that does not count.
struct Seconds {
  double least, middle;
};
// prepare: null, or work that is queued before each run and does not count.
Seconds seconds_of(const Device& device, int times, const std::function<void()>& work,
                   const std::function<void()>& prepare = nullptr);

}  // namespace as::cuda
