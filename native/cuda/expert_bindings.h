// Experts of other ranks that the GPU computes itself.
#pragma once
#include <pybind11/pybind11.h>

#include <memory>

#include "cuda/executor.h"

namespace as::cuda {

void bind_expert_stream(pybind11::class_<CudaExecutor, StepModel, std::shared_ptr<CudaExecutor>>& executor);

}  // namespace as::cuda
