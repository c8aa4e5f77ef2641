// The steps that a runner runs before it serves requests.
#pragma once
#include <vector>

#include "cuda/workspace.h"

namespace as::cuda {

// The sizes of steps that together load all kernels of a program, by rows; then all sizes that decode steps can have,
// of which graphs are recorded. adapted: the program has a form with adapters. Sizes with prefill tiles say 1.
std::vector<Workspace::Size> warm_up_sizes(const Workspace& workspace, bool adapted, bool several_ranks);

}  // namespace as::cuda
