// The copies of a stream-K GEMM of quantized weights (gemm_quantized_stream_k.cuh).
#pragma once
#include "cuda/kernels/common/device.cuh"
#include "cuda/kernels/gemm/quant_fragments.cuh"
#include "cuda/kernels/gemm/stream_k_scheduler.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {

constexpr int kGroupThreads = 128;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr int kCopyWarps = kGroupThreads / 32;
// The copies that a warp starts in each step: quantized values of 64 columns, scales of 64 columns, and some of the
// rows. Everything that needs a division is computed at the beginning of a part: a division in each step would take
// longer than copying the step's weights.
template <class S>
class StreamKCopies {
 public:
  using Format = typename S::Format;

  __device__ StreamKCopies(const GemmArgs& p, const StreamKScheduler& parts, int rows, const Steps& k,
                           const Divisor& row_tiles, int warp)
      : p_(p), parts_(parts), k_(k), row_tiles_(row_tiles), sets_(p.w.quants, k.blocks), rows_(rows), warp_(warp) {
    begin();
  }
  __device__ bool there() const { return there_; }
  __device__ void next() {
    if (++step_ == part_.end) return begin();
    quants_ += kStepBlocks * S::kQuantsBytes, x_ += kStepBlocks * kBlock * Format::kRowBytes;
    if constexpr (Format::kSets) {
      for (left_ -= kStepBlocks; left_ <= 0; left_ += sets_.blocks) set_ += sets_.each;
    }
  }
  __device__ void fetch_weights(uint32_t to, uint64_t* full) const {
    const int blocks = min(kStepBlocks, k_.blocks - step_ * kStepBlocks);
    int sets = 0;
    if constexpr (Format::kSets) sets = min(left_ == 1 && blocks > 1 ? 2 * sets_.each : sets_.each, sets_.count - set_);
    if (warp_ == 0)
      barrier_expect(full, blocks * (there_rows_ * S::kRowBytes + S::kSumsBytes + columns_ * S::kQuantsBytes) +
                               columns_ * sets * S::kSetBytes);
    const uint64_t policy = evicted_first();
    to += S::kGroupsAt;
    if (warp_ < columns_) copy_bulk(to + warp_ * S::kGroupBytes, quants_, blocks * S::kQuantsBytes, full, policy);
    if constexpr (Format::kSets)
      if (scaled() < columns_)
        copy_bulk(to + scaled() * S::kGroupBytes + S::kSetsAt, scales_ + (size_t)set_ * S::kSetBytes,
                  sets * S::kSetBytes, full, policy);
  }
  __device__ void fetch_rows(uint32_t to, uint64_t* full) const {
    const int block = step_ * kStepBlocks + warp_ % kStepBlocks, i = warp_ / kStepBlocks;
    if (block >= k_.blocks) return;
    if (own_rows_ > 0)
      copy_bulk(to + warp_ % kStepBlocks * S::kRowsBytes + i * kBlock * Format::kRowBytes, x_,
                own_rows_ * Format::kRowBytes, full);
    if (S::kSumsBytes && i == 1)
      copy_bulk(to + S::kSumsAt + warp_ % kStepBlocks * S::kSumsBytes,
                reinterpret_cast<const char*>(p_.bytes.sums + (size_t)block * (blocks_of(rows_) * kBlock) + row_),
                S::kSumsBytes, full);
  }

 private:
  // The columns whose scales this warp copies: with two blocks of them, by a warp that copies no quantized values.
  __device__ int scaled() const { return kCopyWarps - 1 - warp_; }
  __device__ void begin() {
    there_ = parts_.next(part_);
    if (!there_) return;
    step_ = part_.begin;
    const int tile = row_tiles_(part_.tile), column_block = tile * S::kTileBlocks;
    const int block = step_ * kStepBlocks, i = warp_ / kStepBlocks;
    row_ = (part_.tile - tile * row_tiles_.by()) * S::kRows, there_rows_ = min(S::kRows, rows_ - row_);
    own_rows_ = i * kBlock < S::kRows ? min(kBlock, there_rows_ - i * kBlock) : 0;
    columns_ = min(S::kTileBlocks, blocks_of(p_.w.n) - column_block);
    const Quants& quants = p_.w.quants;
    quants_ = reinterpret_cast<const char*>(quants.words) +
              ((size_t)(column_block + warp_) * k_.blocks + block) * S::kQuantsBytes;
    scales_ =
        reinterpret_cast<const char*>(quants.scales) + (size_t)(column_block + scaled()) * quants.groups * S::kSetBytes;
    const char* x = Format::kParts == 4 ? reinterpret_cast<const char*>(p_.x.tiles)
                                        : reinterpret_cast<const char*>(p_.bytes.values);
    x_ = x + (((size_t)(row_ / kBlock + i) * k_.blocks + block + warp_ % kStepBlocks) * kBlock + row_ % kBlock) *
                 Format::kRowBytes;
    if constexpr (Format::kSets) {
      const int before = sets_.blocks == 1 ? block : block / sets_.blocks;
      set_ = before * sets_.each, left_ = (before + 1) * sets_.blocks - block;
    }
  }

  const GemmArgs& p_;
  StreamKScheduler parts_;
  StreamKUnit part_;
  const Steps& k_;
  const Divisor& row_tiles_;
  const ScaleSets sets_;
  const int rows_, warp_;
  const char *quants_, *scales_, *x_;
  int step_, row_, there_rows_, own_rows_, columns_, set_, left_;  // left_: blocks left of the set, from the step on
  bool there_;
};
#endif

}  // namespace AS_DTYPE16
}  // namespace as::cuda
