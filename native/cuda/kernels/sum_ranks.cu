// Sums over ranks, in rank order: every rank reads all partial sums out of the memory of the GPUs that they are of
// ("one-shot": with two ranks nothing moves less, and it waits once).
//
// Blocks go on once every rank has come to the same call, which means that its partial sums are there. That alone keeps
// the two buffers apart, too: who has come to call c + 1 has read all of call c, and writes its buffer for call c + 2.
// Calls are counted by how many steps came before, so that a recorded step needs nothing of the host.
#include <algorithm>

#include "cuda/kernels/row_ops.cuh"

namespace as {
namespace cuda {
namespace {

constexpr int kBlocks = 2;  // of threads, of a processor

// A block has a row at a time. kRanks: at most.
template <bool kTiles, int kRanks, bool kWhole>
__global__ void __launch_bounds__(kRowThreads, kRanks <= 4 ? kBlocks : 1)
    sum_kernel(const __grid_constant__ RankSum s, int rows) {
  __shared__ RowShared shared;
  const RowThreads all{(int)threadIdx.x, (int)blockDim.x};
  NormWeights<1, 1, kWhole> weights;  // on their way while ranks are waited for
  let_next_begin();
  if (s.norm.weight) weights.read(all, s.norm, s.y.width);
  await_previous();
  if (const int r = threadIdx.x; r < s.peers.world && r != s.peers.rank) {
    if (blockIdx.x == 0) tell_rank(s.peers, r, call_of(s));
    await_rank(s.peers, r, call_of(s));
  }
  __syncthreads();
  for (int row = blockIdx.x; row < rows; row += gridDim.x)
    sum_row<kTiles, kRanks, kWhole, 1>(all, shared, s, weights, row);
}

}  // namespace

void sum_ranks(const RankSum& sum, int rows, const Queue& queue) {
  const int threads = std::clamp(ceil_div(sum.y.width, 32 * kRowEight) * 32, 32, kRowThreads);
  const int blocks = std::clamp(rows, 1, kBlocks * processors());  // one to meet, whatever there is to add
  const bool whole = sum.y.width % kRowEight == 0;
  const auto choose = [&](auto few, auto some, auto many) {
    start(queue, sum.peers.world <= 2 ? few : sum.peers.world <= 4 ? some : many, blocks, threads, 0, sum, rows);
  };
  constexpr int kMost = kMostRanks;
  if (sum.bf16 && whole) choose(sum_kernel<true, 2, true>, sum_kernel<true, 4, true>, sum_kernel<true, kMost, true>);
  else if (sum.bf16) choose(sum_kernel<true, 2, false>, sum_kernel<true, 4, false>, sum_kernel<true, kMost, false>);
  else if (whole) choose(sum_kernel<false, 2, true>, sum_kernel<false, 4, true>, sum_kernel<false, kMost, true>);
  else choose(sum_kernel<false, 2, false>, sum_kernel<false, 4, false>, sum_kernel<false, kMost, false>);
  launched("sum over ranks");
}

}  // namespace cuda
}  // namespace as
