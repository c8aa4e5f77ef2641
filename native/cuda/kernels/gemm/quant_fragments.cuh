// Products of quantized weights and bfloat16 activations, both in shared memory, by wgmma.
#pragma once
#include "cuda/kernels/common/wgmma.cuh"
#include "cuda/kernels/quantize/quantized.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {

// How sets of scales correspond to blocks of K: a block has `each` sets, or `blocks` blocks share one set.
struct ScaleSets {
  int each, blocks, count;  // count: sets of a row

  AS_BOTH ScaleSets(const Quants& quants, int k_blocks)
      : each(quants.fine() ? kBlock / quants.group : 1),
        blocks(quants.groups > 1 ? (quants.group > kBlock ? quants.group / kBlock : 1) : k_blocks),
        count(quants.groups) {}
  // Whether the second blocks of all two-block steps are alike: each has its own set, or each shares the first block's.
  AS_BOTH bool regular() const { return blocks == 1 || blocks % 2 == 0 || count == 1; }
  // Distance in sets between the first sets of a step's two blocks. Without `block`, sets must be regular; `block` is
  // the step's first block.
  AS_BOTH int second() const { return blocks == 1 && count > 1 ? each : 0; }
  AS_BOTH int second(int block) const { return regular() ? second() : (block + 1) % blocks == 0 ? each : 0; }
};

// Multiplies steps of two blocks of K, which lie in shared memory as S says: a warp has 16 columns of the warpgroup's
// and S::kRows rows. A sum is one chain of products in ascending order.
template <class S>
class StepGemm {
 public:
  using Format = typename S::Format;
  using Lane = LaneQuants<Format::kBits, Format::kCodes>;
  static constexpr int kSets = Format::kFine ? 4 : 1;

  // group: number of 64 columns; a warp has a quarter of them. second: ScaleSets::second().
  __device__ StepGemm(const ScaleSets& sets, int second, int group, int warp, int lane)
      : quants_(S::kGroupsAt + group * S::kGroupBytes + (warp * Lane::kLoads * 32 + lane) * 16),
        scales_(S::kGroupsAt + group * S::kGroupBytes + S::kSetsAt + (warp * 8 + lane / 4) * 8),
        second_(scales_ + second * S::kSetBytes),
        each_(sets.each) {
    keep(quants_), keep(scales_), keep(second_);
  }

  // The weights of block j of a step as the products' first operands. stage: address of the step. further: distance in
  // sets from the first block.
  __device__ __forceinline__ void weights(uint32_t stage, int j, int further, uint32_t (&a)[4][4]) const {
    weights(read(stage, j, scales_ + further * S::kSetBytes), a);
  }
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  // d += block j of a step and 64 columns of the warpgroup's. Begins these products when, of earlier ones, at most
  // S::kUnderWay - 1 are under way; with two, the block's weights are dequantized while products run. rows: descriptor
  // of the step's rows. a: has the weights of the products that must have ended. freed(): called when they have.
  template <typename Freed>
  __device__ __forceinline__ void multiply(uint32_t stage, uint64_t rows, int j, int column_block, uint32_t (&a)[4][4],
                                           float (&d)[S::kRows / 2], const Freed& freed) const {
    const Block block = read(stage + column_block * S::kGroupBytes, j, j ? second_ : scales_);
    wait_wgmma<S::kUnderWay - 1>();
    freed();
    weights(block, a);
    multiply(rows + (j * S::kRowsBytes >> 4), a, d);
  }
  // d += a block. rows: descriptor of its rows; a: its weights.
  static __device__ __forceinline__ void multiply(uint64_t rows, const uint32_t (&a)[4][4], float (&d)[S::kRows / 2]) {
    begin_wgmma();
#pragma unroll
    for (int i = 0; i < 4; i++) RegisterTile<S::kRows>::multiply(d, a[i], rows + (i * kStepBytes >> 4), 1);
    commit_wgmma();
  }
#endif

 private:
  struct Block {
    Lane quants;
    uint2 scales[kSets];
  };

  // Keeps x in a register: the compiler would compute it again in every step.
  static __device__ __forceinline__ void keep(uint32_t& x) { asm volatile("" : "+r"(x)); }
  __device__ __forceinline__ Block read(uint32_t stage, int j, uint32_t scales) const {
    Block block;
#pragma unroll
    for (int i = 0; i < Lane::kLoads; i++)
      block.quants.loaded[i] = load_16(stage + quants_ + j * S::kQuantsBytes + i * 512);
#pragma unroll
    for (int i = 0; i < kSets; i++)
      block.scales[i] = load_8(stage + scales + (kSets > 1 ? i * each_ / 4 * S::kSetBytes : 0));
    return block;
  }
  static __device__ __forceinline__ void weights(const Block& block, uint32_t (&a)[4][4]) {
    Affine rows[2];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (i < kSets) rows[0].set(block.scales[i].x), rows[1].set(block.scales[i].y);
      block.quants.fragment(i, rows, a[i]);
    }
  }

  uint32_t quants_, scales_, second_;  // a lane's offsets in a stage
  int each_;
};

}  // namespace AS_DTYPE16
}  // namespace as::cuda
