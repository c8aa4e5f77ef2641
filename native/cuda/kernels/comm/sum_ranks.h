// Sums over the ranks of several GPUs.
#pragma once
#include "cuda/kernels/norm/norm.h"

namespace as::cuda {

constexpr int kMostRanks = 8;
// Partial sums in tiles of so many rows at most are pushed into the other ranks' memory; of more the others read
// them. What has not come yet has all bits set, in each value's place: no product or sum rounds to that.
constexpr int kPushedRows = 256;
constexpr int kNotYet = 0xffff;
// What kernels have of a group's ranks: memory of each one's GPU, which all read and write (exchange.h).
struct Peers {
  int rank = 0, world = 1;
  size_t buffer_bytes = 0;           // bytes: of either buffer of partial sums
  const char* partials[kMostRanks];  // of each rank, two buffers: those of a step's even calls, and of its odd ones
  uint32_t* flags[kMostRanks];       // on each rank, of each rank: the last call that it has come to; then whether
                                     // one has not come within the limit
  char* pushed[kMostRanks];          // on each rank, of even and of odd calls, of each rank: what it has pushed
  size_t pushed_bytes = 0;           // of one rank and call, or 0: nothing is
  const int* step = nullptr;         // how many steps came before; the same on all ranks
  int* failed = nullptr;             // of the host: 0, or 1 + the rank that has not come within the limit
  uint64_t limit = 0;                // ns

  // On rank `on`, of rank `of`.
  AS_BOTH char* place(int on, int of, int call) const { return pushed[on] + (call % 2 * world + of) * pushed_bytes; }
};
// y [rows, y.width] = the sum of the ranks' partial sums, in rank order: ((0 + 1) + 2) + ..., or that added to what y
// has; and if there is a norm with a weight, rows of y normed, too. One of the `calls` that every step makes on all
// ranks in the same order, an even number. is_dtype16: partial sums are in tiles, else float32 rows.
struct RankSum {
  Peers peers;
  int call = 0, calls = 0;
  bool is_dtype16 = false, adds = false;
  DType16 dtype = DType16::bf16;  // of partial sums in tiles, and of what is normed
  bool on_its_way = false;        // what made the partial sums of few rows has pushed them
  Rows y;
  Norm norm;
  Rows normed;
};
void sum_ranks(const RankSum& sum, int rows, const Queue& queue);
// Whether partial sums in tiles of so many rows are pushed.
inline bool pushes(const Peers& peers, int rows) { return peers.pushed_bytes && rows > 0 && rows <= kPushedRows; }

}  // namespace as::cuda
