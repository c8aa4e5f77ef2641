// Chooses an exact GEMM by the groups of a format and by the number of rows.
#pragma once
#include "cuda/kernels/exact/gemm_exact_few.cuh"

namespace as::cuda {
namespace exact_gemm {

template <typename F>
void launch(const ExactGemm& p, int entries, const Queue& queue) {
  const bool few = p.rows <= kExactFew;
  const int own = few ? kFewColumns : kColumns, width = p.gate == ExactGate::none ? p.w.n : p.w.n / 2,
            columns = p.gate == ExactGate::none ? own : own / 2;
  const int experts = p.routing.end - p.routing.begin, tiles = std::min(entries, entries / kExactTile + experts);
  const dim3 grid(ceil_div(width, columns), tiles);
  if constexpr (F::kPlanes == 2)
    if (p.rows <= kExactPairs) return start(queue, few_kernel<F, true>, grid, kFewWarps * 32, 0, p);
  if (few) start(queue, few_kernel<F, false>, grid, kFewWarps * 32, 0, p);
  else start(queue, kernel<F>, grid, F::kThreads, 0, p);
}

template <ExactFormat kFormat, bool kOffsets>
void launch_groups(const ExactGemm& p, int entries, const Queue& queue) {
  switch (p.w.steps_of_group()) {
    case 1:
      return launch<Form<kFormat, 32, 1, kOffsets>>(p, entries, queue);
    case 2:
      return launch<Form<kFormat, 32, 2, kOffsets>>(p, entries, queue);
    default:
      return launch<Form<kFormat, 32, 0, kOffsets>>(p, entries, queue);
  }
}

template <ExactFormat kFormat>
void launch_format(const ExactGemm& p, int entries, const Queue& queue) {
  if constexpr (kFormat == ExactFormat::e2m1) {
    if (p.w.step() == 16) launch<Form<kFormat, 16, 1, false>>(p, entries, queue);
    else launch_groups<kFormat, false>(p, entries, queue);
  } else {
    if (p.w.lone) launch_groups<kFormat, false>(p, entries, queue);
    else launch_groups<kFormat, true>(p, entries, queue);
  }
}

}  // namespace exact_gemm
}  // namespace as::cuda
