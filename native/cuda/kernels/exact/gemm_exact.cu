// Chooses the exact GEMM of a format. Each format is compiled by itself, since that takes long.
#include "cuda/kernels/exact/exact.h"

namespace as::cuda {

namespace exact_gemm {
template <ExactFormat kFormat>
void launch_format(const ExactGemm& p, int entries, const Queue& queue);
}

void gemm_exact(const ExactGemm& p, int entries, const Queue& queue) {
  if (!entries) return;
  switch (p.w.format) {
    case ExactFormat::int8:
      return exact_gemm::launch_format<ExactFormat::int8>(p, entries, queue);
    case ExactFormat::int4:
      return exact_gemm::launch_format<ExactFormat::int4>(p, entries, queue);
    case ExactFormat::w8a8:
      return exact_gemm::launch_format<ExactFormat::w8a8>(p, entries, queue);
    case ExactFormat::w4a8:
      return exact_gemm::launch_format<ExactFormat::w4a8>(p, entries, queue);
    default:
      return exact_gemm::launch_format<ExactFormat::e2m1>(p, entries, queue);
  }
}

}  // namespace as::cuda
