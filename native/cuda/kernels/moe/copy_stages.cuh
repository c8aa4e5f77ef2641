// The copying warpgroup of the persistent expert GEMMs of Hopper.
#pragma once
#include "cuda/kernels/moe/gemm_experts.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Copies the stages of one item after the other to a ring of S::kStages stages. tile_of(i): tile number i; ask(tile,
// item, b, stage) copies the weights of stage number b; copy(rows, b, stage) copies a thread's share of the rows, which
// rows_of(tile) describes. early: weights are copied before the previous kernel has ended. Copies of S::kLag stages are
// in flight before a thread tells of the first one, after a fence, which waits for all of its copies; 0: the copies
// tell of themselves, and warps that multiply fence.
template <typename S, typename TileOf, typename Ask, typename RowsOf, typename Copy>
__device__ __forceinline__ void copy_stages(uint64_t (&full)[S::kStages], uint64_t (&empty)[S::kStages],
                                            const TileOf& tile_of, int items, int columns, int stages_of_k, bool early,
                                            const Ask& ask, const RowsOf& rows_of, const Copy& copy) {
  Pipeline<S::kStages> ring, told;
  int untold = 0;
  const auto tell = [&] {
    fence_for_wgmma();
    barrier_arrive(&full[told.stage]);
    told.next();
  };
  int asked = 0;  // stages whose weights are already on their way
  if (early) {
    if ((int)blockIdx.x < items) {
      const ExpertTile tile = tile_of(blockIdx.x / columns);
      for (; asked < min(S::kStages, stages_of_k); asked++) ask(tile, blockIdx.x, asked, asked);
    }
    await_previous();
  }
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const ExpertTile tile = tile_of(item / columns);
    const auto rows = rows_of(tile);
    for (int b = 0; b < stages_of_k; b++, ring.next()) {
      barrier_wait(&empty[ring.stage], ring.parity ^ 1);
      if (asked > 0) asked--;
      else ask(tile, item, b, ring.stage);
      copy(rows, b, ring.stage);
      if (S::kLag == 0) {
        arrive_when_copied(&full[ring.stage]);
        continue;
      }
      commit_copies();
      if (untold < S::kLag) {
        untold++;
      } else {
        wait_copies<S::kLag>();
        tell();
      }
    }
  }
  if (S::kLag == 0) commit_copies();
  wait_copies<0>();
  while (untold-- > 0) tell();
}
#endif

}  // namespace AS_DTYPE16
}  // namespace as::cuda
