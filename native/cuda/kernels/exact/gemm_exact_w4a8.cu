#include "cuda/kernels/exact/launch_exact.cuh"

namespace as::cuda {

template void exact_gemm::launch_format<ExactFormat::w4a8>(const ExactGemm& p, int entries, const Queue& queue);

}  // namespace as::cuda
