// The stream-K scheduler: persistent CTAs get equal numbers of all K steps of all tiles of a GEMM.
#pragma once
#include "cuda/kernels/common/device.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {

constexpr int kStepBlocks = 2;  // blocks of K in a step
AS_BOTH constexpr int steps_of(int blocks) { return (blocks + kStepBlocks - 1) / kStepBlocks; }

// Divides non-negative numbers by a divisor known at launch. A division is by far the slowest integer operation, and
// some ten of them, one after the other, would precede the first copy of weights.
class Divisor {
 public:
  explicit Divisor(int by) : by_(by) {
    int bits = 0;  // smallest number with 2^bits >= by
    while ((1ll << bits) < by) bits++;
    factor_ = bits ? (uint32_t)(((1ull << (31 + bits)) + by - 1) / by) : 0, shift_ = bits - 1;
  }
  __device__ int by() const { return by_; }
  __device__ int operator()(int x) const { return factor_ ? (int)(__umulhi(x, factor_) >> shift_) : x; }
  __device__ int floor(int x) const { return (*this)(x)*by_; }  // rounds down to a multiple

 private:
  int by_, shift_;
  uint32_t factor_;
};

// K divided into steps and split-K parts.
struct Steps {
  int blocks, k_parts;
  Divisor count, length;  // length: steps of a split-K part

  explicit Steps(const SplitK& k)
      : blocks(k.blocks), k_parts(k.count), count(steps_of(k.blocks)), length(steps_of(k.length)) {}
};

// How the steps of all tiles are divided among CTAs: one split-K part each, whole tiles, or equal numbers of steps.
enum class StreamKSplit { k_parts, tiles, steps };
struct StreamKPartition {
  StreamKSplit of;
  int blocks;      // CTAs
  int each, more;  // tiles or steps of a CTA; the first `more` CTAs have one more
  Divisor k_parts;

  StreamKPartition(StreamKSplit of, int tiles, const SplitK& k, int most)
      : of(of), blocks(most), each(0), more(0), k_parts(k.count) {
    if (of == StreamKSplit::k_parts) {
      blocks = tiles * k.count;
      return;
    }
    const int all = of == StreamKSplit::tiles ? tiles : tiles * steps_of(k.blocks);
    each = all / blocks, more = all % blocks;
  }
  // A CTA's first step, counted over all tiles.
  __device__ int begin(int block, const Steps& k) const {
    if (of == StreamKSplit::k_parts) {
      const int tile = k_parts(block);
      return tile * k.count.by() + (block - tile * k_parts.by()) * k.length.by();
    }
    return (block * each + min(block, more)) * (of == StreamKSplit::tiles ? k.count.by() : 1);
  }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// A CTA's part of a split-K part: steps [begin, end) of the split-K part's steps [first, last).
struct StreamKUnit {
  int tile, k_part, begin, end, first, last;
};
// A CTA's parts in the order in which it computes them. Positions count steps over all tiles.
class StreamKScheduler {
 public:
  __device__ StreamKScheduler(const Steps& k, const StreamKPartition& shares)
      : k_(k), begin_(shares.begin(blockIdx.x, k)), end_(shares.begin(blockIdx.x + 1, k)) {
    const int first = begin_of(begin_);
    at_ = first == begin_ ? begin_ : end_of(begin_), stop_ = begin_of(end_);
  }
  // Returns false after the last part.
  __device__ bool next(StreamKUnit& part) {
    if (turn_ == 0) {
      turn_ = 1;
      if (stop_ < end_) return set(part, stop_, end_), true;
    }
    if (turn_ == 1) {
      const int from = at_;
      if (from < stop_) return at_ = end_of(from), set(part, from, at_), true;
      turn_ = 2;
      if (begin_of(begin_) != begin_) return set(part, begin_, end_of(begin_)), true;
    }
    return false;
  }

 private:
  __device__ int begin_of(int position) const {  // beginning of the split-K part at this position
    const int tile = k_.count.floor(position);
    return tile + k_.length.floor(position - tile);
  }
  __device__ int end_of(int position) const {
    const int tile = k_.count.floor(position);
    return tile + min(k_.length.floor(position - tile) + k_.length.by(), k_.count.by());
  }
  __device__ void set(StreamKUnit& part, int from, int to) const {
    part.tile = k_.count(from), from -= part.tile * k_.count.by(), to -= part.tile * k_.count.by();
    part.begin = from, part.end = to, part.k_part = k_.length(from), part.first = part.k_part * k_.length.by();
    part.last = min(part.first + k_.length.by(), k_.count.by());
  }

  const Steps& k_;
  int begin_, end_, at_, stop_, turn_ = 0;
};
#endif

}  // namespace AS_DTYPE16
}  // namespace as::cuda
