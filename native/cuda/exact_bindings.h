// The exact kernels for tests, on matrices of the CPU backend.
#pragma once
#include <pybind11/pybind11.h>

#include <memory>

#include "cuda/executor.h"

namespace as::cuda {

void bind_exact(pybind11::class_<CudaExecutor, StepModel, std::shared_ptr<CudaExecutor>>& executor);

}  // namespace as::cuda
