// All-reduce over the ranks of several GPUs.
#pragma once
#include "cuda/kernels/norm/norm.h"

namespace as::cuda {

constexpr int kMaxRanks = 8;
// Partial sums of up to kPushedRows rows in tiles are pushed to the other ranks' memory; those of more rows are read by
// the other ranks. A value that has not arrived has all bits set; no result rounds to that.
constexpr int kPushedRows = 256;
constexpr int kNotYet = 0xffff;
// CTAs that exchange partial sums by host memory. All ranks have the same number, whatever their GPUs.
constexpr int kHostCtas = 64;
// What a kernel waits for, from another rank.
enum class PeerWait { sum, argmax, logits, samples };
// How a kernel reports a wait that has missed the time limit: never 0.
AS_BOTH constexpr int failure_of(PeerWait what, int rank) { return 1 + rank + kMaxRanks * (int)what; }

// Memory of all ranks' GPUs, which all ranks read and write (exchange.h). If GPUs do not reach each other, the memory
// that a rank shares is the host's, and nothing is pushed.
struct Peers {
  int rank = 0, world = 1;
  size_t buffer_bytes = 0;          // bytes of each of the two buffers of partial sums
  const char* partials[kMaxRanks];  // of each rank, two buffers: for even and odd calls of a step
  uint32_t* flags[kMaxRanks];       // on each rank, for each rank: the last call it has reached; then whether
                                    // a rank has missed the time limit
  char* pushed[kMaxRanks];          // on each rank, for even and odd calls, for each rank: the values it pushed
  size_t pushed_bytes = 0;          // of one rank and call; 0: nothing is pushed
  const int* step = nullptr;        // number of previous steps, the same on all ranks
  int* failed = nullptr;            // in host memory: 0, or failure_of() a wait that has missed the time limit
  uint64_t limit = 0;               // ns
  char* sent = nullptr;             // this rank's partial sums in host memory, for the others; null: they read them
                                    // in its GPU's memory
  uint32_t* local = nullptr;        // by host memory: words that no other rank uses, in this rank's GPU's memory

  // Words of this rank's GPU that its kernels poll and count in.
  AS_BOTH uint32_t* own() const { return local ? local : flags[rank]; }
  // By host memory, of rank `of`: the last call that each CTA has reached.
  AS_BOTH uint32_t* reached(int of) const { return flags[of] + kFlags; }
  static constexpr int kFlags = 256;  // words before them
  // Where rank `on` receives the values of rank `of`.
  AS_BOTH char* place(int on, int of, int call) const { return pushed[on] + (call % 2 * world + of) * pushed_bytes; }
};
// y [rows, y.width] = the ranks' partial sums, added in rank order: ((0 + 1) + 2) + ...; adds: y += that sum. If the
// norm has a weight, `normed` receives the normalized rows of y. A step makes `calls` such calls, an even number, in
// the same order on all ranks. is_dtype16: partial sums are in 16-bit tiles, otherwise in float32 rows.
struct RankSum {
  Peers peers;
  int call = 0, calls = 0;
  bool is_dtype16 = false, adds = false;
  DType16 dtype = DType16::bf16;  // of partial sums in tiles, and of `normed`
  bool on_its_way = false;        // the kernel that computed the partial sums has pushed them
  Rows y;
  Norm norm;
  Rows normed;
};
void sum_ranks(const RankSum& sum, int rows, const Queue& queue);
// Whether partial sums in tiles are pushed.
inline bool pushes(const Peers& peers, int rows) { return peers.pushed_bytes && rows > 0 && rows <= kPushedRows; }

}  // namespace as::cuda
