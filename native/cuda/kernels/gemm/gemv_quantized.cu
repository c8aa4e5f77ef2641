// GEMV of quantized weights with bfloat16 activations by mma.sync: decoding of a single sequence.
//
// A unit of work, called a chain, is one split-K part (tiles.h) of a pair of columns that lie eight apart in a tile of
// the weights. Eight chains, of any parts, are the sixteen rows of a warp's mma; column i of its second operand has the
// row's values for the part of chain i. So SMs get equal work, for example 14 pairs where a tile has eight. A CTA has
// all parts of its pairs and adds them in shared memory. It holds the whole row and can normalize it first. Each warp
// copies its own quantized values some blocks ahead, so that warps do not wait for each other. There is one exception:
// if schedulers would have unequal numbers of warps, a warp continues another's chains.
#include <algorithm>

#include "cuda/kernels/gemm/epilogue.cuh"
#include "cuda/kernels/gemm/gemm_quantized.h"
#include "cuda/kernels/gemm/gemv_plan.h"
#include "cuda/kernels/gemm/quant_fragments.cuh"
#include "cuda/kernels/gemm/stream_k_scheduler.cuh"

namespace as::cuda {
namespace {

using Plan = QuantizedGemvPlan;
constexpr int kMaxWarps = Plan::kMaxWarps, kTilePairs = Plan::kTilePairs, kUnit = Plan::kUnit;
constexpr int kShallow = Plan::kShallow, kDeep = Plan::kDeep, kNormed = Plan::kNormed;

// Type: a WeightType. A stage has some blocks of a tile: first quantized values, then the scales of each block.
template <class Type, int kStages_>
struct Shape {
  using Lane = LaneQuants<Type::kBits, Type::kCodes>;
  static constexpr int kBits = Type::kBits, kStages = kStages_, kBlocks = 16 / kBits, kSets = Type::kFine ? 4 : 1;
  static constexpr int kTileBytes = quant_bytes(kBits) / 4, kSetBytes = kTileRows * 4;
  static constexpr int kQuantsBytes = kBlocks * kTileBytes, kStageBytes = kQuantsBytes + kBlocks * kSets * kSetBytes;

  static size_t shared(int warps, int k_blocks) {
    return Plan::shared_bytes(kBits, Type::kFine, kStages, warps, k_blocks);
  }
};

// Keeps x in a register: otherwise the compiler would compute it again in every iteration of a loop.
__device__ __forceinline__ void keep(uint32_t& x) { asm volatile("" : "+r"(x)); }

template <class S>
struct BlockQuants {
  typename S::Lane quants;
  uint2 scales[S::kSets];

  // Reads block j of a stage. quants_at, scales_at: addresses of the lane's quantized values and scales of block 0.
  __device__ __forceinline__ void read(uint32_t quants_at, uint32_t scales_at, int j) {
#pragma unroll
    for (int i = 0; i < S::Lane::kLoads; i++) quants.loaded[i] = load_16(quants_at + j * S::kTileBytes + i * 512);
#pragma unroll
    for (int i = 0; i < S::kSets; i++) scales[i] = load_8(scales_at + (j * S::kSets + i) * S::kSetBytes);
  }
  __device__ __forceinline__ void values(uint32_t (&a)[4][4]) const {
    Affine rows[2];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (i < S::kSets) rows[0].set(scales[i].x), rows[1].set(scales[i].y);
      quants.fragment(i, rows, a[i]);
    }
  }
};

// How sets of scales advance with blocks of K: one set for `blocks` blocks, or `each` sets for one block. more: sets
// from one stage to the next, or less than 0 if stages differ.
struct SetPace {
  Divisor blocks;
  int each, more;

  template <class S>
  static SetPace of(const Quants& quants, int k_blocks) {
    if (S::kSets > 1) return {Divisor(1), kBlock / quants.group, S::kBlocks * kBlock / quants.group};
    if (quants.groups == 1) return {Divisor(std::max(k_blocks, 1)), 1, 0};
    const int blocks = std::max(quants.group / kBlock, 1);
    return {Divisor(blocks), 1, S::kBlocks % blocks ? -1 : S::kBlocks / blocks};
  }
};

// A split-K part of two columns of the result that lie eight apart in a tile. They are rows i and i + 8 of mma.sync's
// first operand, and the four lanes with the same lane / 4 have their quantized values.
struct Chain {
  int pair, begin, blocks;  // pair: index in the CTA's pairs
};

// Copies the eight chains of a warp, one stage at a time, for one group of pairs after the other. Divisions are done in
// advance, so that a stage takes only a few instructions. A lane copies quantized values of one chain, and scales of
// two adjacent chains.
template <class S>
class Copies {
 public:
  // ring: of the warp; first: the CTA's first pair; by: pairs from one round to the next; whole: blocks that all chains
  // have; length: blocks of the longest chain.
  __device__ __forceinline__ Copies(const Matrix& w, uint32_t ring, const Chain& quants, const Chain& scales, int first,
                                    int pairs, int by, int k_blocks, int whole, int length, const SetPace& sets)
      : quants_(w.quants),
        sets_(sets),
        own_(quants),
        of_scales_(scales),
        first_(first),
        pairs_(pairs),
        by_(by),
        k_blocks_(k_blocks),
        whole_(whole - S::kBlocks),
        length_(length),
        to_(ring + lane() * 16),
        scales_to_(ring + S::kQuantsBytes + lane() * 16) {
    first_set_ = set_of(of_scales_.begin);
    if (sets.more < 0) whole_ = -1;
    has_scales_ = lane() < kPlaces * 4;
    keep(to_), keep(scales_to_), keep(has_scales_);
    at_pairs();
  }
  // stage: byte offset of the stage in the ring.
  __device__ __forceinline__ void fetch(uint32_t stage) {
    if (block_ <= limit_) fetch_whole(stage);
    else fetch_rest(stage);
    block_ += S::kBlocks, from_ += S::kBlocks * quant_bytes(S::kBits), set_ += sets_.more;
    commit_copies();
  }

 private:
  static constexpr int kCopies = S::kTileBytes / 512,
                       kPlaces = S::kBlocks * S::kSets;  // copies of a block; sets of a stage

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ void fetch_whole(uint32_t stage) const {
#pragma unroll
    for (int i = 0; i < S::kBlocks * kCopies; i++) copy_quants(stage, i);
#pragma unroll
    for (int i = 0; i < kPlaces; i += 8)
      copy_scales(stage, i, set_ + i / S::kSets * sets_.each, kPlaces >= 8 || has_scales_);
  }
  // For a stage that some chains do not fill, or whose sets do not advance evenly, or the first stage of the next
  // round. Scales are zero where a chain has ended.
  __device__ __forceinline__ void fetch_rest(uint32_t stage) {
    if (block_ >= length_ && first_ < pairs_) first_ += by_, at_pairs();
    if (first_ >= pairs_) return;
    if (block_ <= limit_) return fetch_whole(stage);
#pragma unroll
    for (int i = 0; i < S::kBlocks * kCopies; i++)
      if (block_ + i / kCopies < own_.blocks) copy_quants(stage, i);
#pragma unroll
    for (int i = 0; i < kPlaces; i += 8) {
      const int block = block_ + i / S::kSets;
      copy_scales(stage, i, min(set_of(of_scales_.begin + block), quants_.groups - 1), kPlaces >= 8 || has_scales_,
                  block + lane() / 4 / S::kSets < of_scales_.blocks ? 16 : 0);
    }
  }
  __device__ __forceinline__ void copy_quants(uint32_t stage, int i) const {
    copy_16(to_ + stage + i * 512, from_ + i / kCopies * quant_bytes(S::kBits) + i % kCopies * 512);
  }
  __device__ __forceinline__ void copy_scales(uint32_t stage, int i, int set, int there, int bytes = 16) const {
    asm volatile("{ .reg .pred p;\nsetp.ne.s32 p, %2, 0;\n@p cp.async.cg.shared.global [%0], [%1], 16, %3; }" ::"r"(
                     scales_to_ + stage + i * S::kSetBytes),
                 "l"(scales_ + (size_t)set * (kScaleWords * 4)), "r"(there), "r"(bytes)
                 : "memory");
  }
  // The first set of scales that a lane copies for a stage that begins with this block.
  __device__ __forceinline__ int set_of(int block) const {
    const int place = lane() / 4, own = block + place / S::kSets;
    return S::kSets > 1 ? own * sets_.each + place % S::kSets * sets_.each / S::kSets : sets_.blocks(own);
  }
  __device__ __forceinline__ void at_pairs() {
    const int own = min(first_ + own_.pair, pairs_ - 1), other = min(first_ + of_scales_.pair, pairs_ - 2);
    block_ = 0, set_ = first_set_, limit_ = first_ < pairs_ ? whole_ : -1;
    from_ = reinterpret_cast<const char*>(quants_.words) +
            ((size_t)(own / (kBlock / 2)) * k_blocks_ + own_.begin) * quant_bytes(S::kBits) +
            own % (kBlock / 2) / kTilePairs * S::kTileBytes + (own % kTilePairs * 4 + lane() % 4) * 16;
    scales_ = reinterpret_cast<const char*>(quants_.scales) +
              (size_t)(other / (kBlock / 2)) * quants_.groups * (kScaleWords * 4) + other % (kBlock / 2) * 8;
  }

  const Quants& quants_;
  const SetPace& sets_;
  const Chain own_, of_scales_;
  int first_;
  const int pairs_, by_, k_blocks_;
  int whole_, limit_;    // last block at which a stage is whole and regular: of a round; of this one
  uint32_t has_scales_;  // whether the lane copies scales
  int block_;            // next block of the chains
  const int length_;
  uint32_t to_, scales_to_;
  int first_set_, set_;  // a lane's sets of scales: of the chain's first stage; of the next stage
  const char *from_, *scales_;
};

// Layout of the row in shared memory. Split-K parts with odd numbers have the halves of blocks swapped. So eight lanes
// can read mma.sync's second operand from two split-K parts without bank conflicts.
struct RowPlaces {
  const Divisor& length;  // of a split-K part

  // Byte offset of 16-byte part `part` of a block.
  __device__ __forceinline__ int operator()(int block, int part) const {
    return block * kRowBytes + (part ^ (length(block) & 1) * 4) * 16;
  }
};

// Copies the row unchanged. A thread loads up to eight groups of 16 bytes before it stores any.
__device__ __forceinline__ void copy_row(const GemmArgs& p, int blocks, const RowPlaces& places, char* x) {
  const int part = threadIdx.x % 8;
  const char* from = reinterpret_cast<const char*>(p.x.tiles) + part * 16;
  for (int first = threadIdx.x / 8; first < blocks; first += blockDim.x) {
    uint4 v[8];
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (const int b = first + i * (blockDim.x / 8); b < blocks)
        v[i] = __ldcg(reinterpret_cast<const uint4*>(from + (size_t)b * kBlockBytes));
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (const int b = first + i * (blockDim.x / 8); b < blocks) *reinterpret_cast<uint4*>(x + places(b, part)) = v[i];
  }
}

// Normalizes the row with the same bits as rms_norm(), where a thread has eight columns. Here one thread does the work
// of several of those threads.
__device__ __forceinline__ void read_row(const float* row, int width, float (&values)[kNormed][8]) {
#pragma unroll
  for (int i = 0; i < kNormed; i++) read_eight(row, (i * blockDim.x + threadIdx.x) * 8, width, values[i]);
}
__device__ __forceinline__ void norm_row(const GemmArgs& p, const float (&weights)[kNormed][8], float* squares,
                                         const RowPlaces& places, char* x) {
  const int width = p.w.k, all = blocks_of(width) * 8;
  float values[kNormed][8];
  read_row(p.unnormed, width, values);
#pragma unroll
  for (int i = 0; i < kNormed; i++) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < 8; j++) sum = fmaf(values[i][j], values[i][j], sum);
    sum = warp_sum(sum);
    if (const int place = i * blockDim.x + threadIdx.x; place % 32 == 0 && place < all) squares[place / 32] = sum;
  }
  __syncthreads();
  float total = 0;
  for (int i = 0; i * 32 < all; i++) total += squares[i];
  const float factor = 1.0f / sqrtf(total / width + p.norm.eps), one = p.norm.unit_offset ? 1.0f : 0.0f;
#pragma unroll
  for (int i = 0; i < kNormed; i++) {
    const int place = i * blockDim.x + threadIdx.x;
    if (place >= all) break;
    uint32_t pairs[4];
#pragma unroll
    for (int j = 0; j < 8; j++) values[i][j] = values[i][j] * factor * (weights[i][j] + one);
#pragma unroll
    for (int j = 0; j < 4; j++) pairs[j] = to_dtype16x2(values[i][2 * j], values[i][2 * j + 1]);
    *reinterpret_cast<uint4*>(x + places(place / 8, place % 8)) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
}

// Barrier of the two warps that share a unit of chains.
__device__ __forceinline__ void meet(int unit) {
  __syncwarp();
  asm volatile("bar.sync %0, 64;" ::"r"(1 + unit) : "memory");
}

// A CTA has merged.by() of the pairs at a time, and k.count chains of each. A unit has eight chains. Two warps, one
// after the other, compute each of the last shared_units units.
template <class S>
__global__ void __launch_bounds__(32 * kMaxWarps)
    row_kernel(const __grid_constant__ GemmArgs p, int pairs, const __grid_constant__ Divisor merged, int shared_units,
               SplitK k, const __grid_constant__ Divisor part_length, const __grid_constant__ SetPace sets) {
  extern __shared__ __align__(128) char shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32, units = warps - shared_units;
  const bool goes_on = warp >= units, leaves = !goes_on && warp >= units - shared_units;
  const int unit = goes_on ? warp - shared_units : warp, pairs_at_once = merged.by(), chains = pairs_at_once * k.count;
  const auto chain = [&](int i) {
    const int number = min(unit * kUnit + i, chains - 2 + i % 2), k_part = merged(number), begin = k_part * k.length;
    return Chain{number - k_part * pairs_at_once, begin, min(k.length, k.blocks - begin)};
  };
  Chain own = chain(lane / 4), of_scales = chain(lane % 4 * 2);
  if (leaves || goes_on) {  // there is only one split-K part
    const int half = (k.blocks / 2 + S::kBlocks - 1) / S::kBlocks * S::kBlocks;
    own.begin = of_scales.begin = leaves ? 0 : half;
    own.blocks = of_scales.blocks = leaves ? half : k.blocks - half;
  }
  // Of the warp's chains: blocks of the longest (the first) and of the shortest, and blocks with all columns.
  const int length = __shfl_sync(0xffffffffu, own.blocks, 0), shortest = __shfl_sync(0xffffffffu, own.blocks, 31),
            last_end = __shfl_sync(0xffffffffu, own.begin, 31) + shortest,
            whole = p.w.k % kBlock && last_end == k.blocks ? shortest - 1 : length;
  float* const sums = reinterpret_cast<float*>(shared);
  char* const x = shared + Plan::sums_bytes(warps);
  const int row_blocks = k.count * k.length;
  const uint32_t ring = shared_address(x) + row_blocks * kRowBytes + warp * S::kStages * S::kStageBytes;
  let_next_begin();
  // Copies of weights start before the previous kernel has computed the activations.
  Copies<S> copies(p.w, ring, own, of_scales, blockIdx.x * pairs_at_once, pairs, gridDim.x * pairs_at_once, k.blocks,
                   shortest, length, sets);
#pragma unroll
  for (int i = 0; i < S::kStages - 1; i++) copies.fetch(i * S::kStageBytes);
  float norm_weights[kNormed][8];
  if (p.unnormed) read_row(p.norm.weight, p.w.k, norm_weights);  // no kernel writes these weights
  // If the last split-K part is shorter, zeros fill it up.
  for (int i = k.blocks * 8 + threadIdx.x; i < row_blocks * 8; i += blockDim.x)
    reinterpret_cast<uint4*>(x)[i] = make_uint4(0, 0, 0, 0);
  const RowPlaces places{part_length};
  await_previous();
  if (p.unnormed) norm_row(p, norm_weights, sums, places, x);
  else copy_row(p, k.blocks, places, x);
  __syncthreads();
  const int row_begin = __shfl_sync(0xffffffffu, own.begin, lane % kUnit * 4);
  // Column i of the second operand has the row's values for chain i. Products of two different chains are not used.
  uint32_t quants_at = ring + lane * 16, scales_at = ring + S::kQuantsBytes + lane / 4 * 8,
           row_at = shared_address(x) + places(row_begin, lane / 8);
  keep(quants_at), keep(scales_at), keep(row_at);
  const int other_half = part_length(row_begin) & 1 ? -64 : 64;

  // A result from the chains' sums in shared memory. A thread has at most one, and prefetches what is added to it.
  struct Value {
    int place, column;  // place: index in the sums of pairs
    bool there;
  };
  struct Before {
    float bias, value;
  };
  const auto value_at = [&](int i, int first) {
    if (p.gated) return Value{i * 2, first + i, i < pairs_at_once && first + i < p.y.width};
    const int pair = first + i / 2, column = pair / kTilePairs * kTileRows + pair % kTilePairs + i % 2 * kTilePairs;
    return Value{i, column, i < pairs_at_once * 2 && column < p.w.n};
  };
  const auto before_of = [&](const Value& v) {
    return Before{p.bias ? p.bias[v.column] : 0.0f, p.adds ? p.y.values[v.column] : 0.0f};
  };

  uint32_t stage = (S::kStages - 1) * S::kStageBytes;  // the stage of the previous iteration
  int turn = 0;
  for (int first = blockIdx.x * pairs_at_once; first < pairs; first += gridDim.x * pairs_at_once, turn++) {
    Before before = {};
    if (const Value v = value_at(threadIdx.x, first); k.count > 1 && !p.gated && v.there) before = before_of(v);
    float d[4] = {};
    uint32_t x_at = row_at;
    // Sums that another warp continues from, with two buffers for alternate rounds.
    float* const left = sums + (unit + turn % 2 * shared_units) * kTileRows + lane / 4 * 2;
    if (goes_on) {
      meet(unit - (units - shared_units));
      d[0] = d[1] = left[0], d[2] = d[3] = left[1];
    }
    const auto multiply = [&](const uint32_t(&y)[2][4], const uint32_t(&a)[4][4]) {
#pragma unroll
      for (int i = 0; i < 4; i++) multiply_add(d, a[i], y[i / 2][i % 2 * 2], y[i / 2][i % 2 * 2 + 1]);
    };
    const auto load_rows = [&](uint32_t(&y)[2][4], int j) {
      load_cores(y[0], x_at + j * kRowBytes), load_cores(y[1], x_at + other_half + j * kRowBytes);
    };
    for (int b = 0; b < length; b += S::kBlocks) {
      wait_copies<S::kStages - 2>();
      __syncwarp();
      const uint32_t done = stage;
      stage = stage == (S::kStages - 1) * S::kStageBytes ? 0 : stage + S::kStageBytes;
      if (b + S::kBlocks <= whole) {
        constexpr int kAhead = S::kSets == 1 ? S::kBlocks : 1;  // more would not fit registers
        BlockQuants<S> blocks[S::kBlocks];
#pragma unroll
        for (int j = 0; j < kAhead; j++) blocks[j].read(quants_at + stage, scales_at + stage, j);
        copies.fetch(done);
#pragma unroll
        for (int j = 0; j < S::kBlocks; j++) {
          if (j >= kAhead) blocks[j].read(quants_at + stage, scales_at + stage, j);
          uint32_t y[2][4], a[4][4];
          load_rows(y, j);
          blocks[j].values(a);
          multiply(y, a);
        }
      } else {
        copies.fetch(done);
        for (int j = 0; j < S::kBlocks && b + j < length; j++) {
          uint32_t y[2][4], a[4][4];
          load_rows(y, j);
          BlockQuants<S> block;
          block.read(quants_at + stage, scales_at + stage, j);
          block.values(a);
          const int columns = min(p.w.k - own.begin * kBlock, own.blocks * kBlock) - (b + j) * kBlock;
#pragma unroll
          for (int i = 0; i < 4; i++) cut_fragment(a[i], columns - i * 16);
          multiply(y, a);
        }
      }
      x_at += S::kBlocks * kRowBytes;
    }
    // The sums of chain i are in rows i and i + 8 of column i.
    const bool has_values = lane % 4 == lane / 8, odd = lane / 4 % 2;
    const float two[2] = {odd ? d[1] : d[0], odd ? d[3] : d[2]};
    if (leaves) {
      if (has_values) left[0] = two[0], left[1] = two[1];
      meet(unit - (units - shared_units));
      continue;
    }
    if (k.count == 1) {
      const int pair = first + own.pair;
      if (unit * kUnit + lane / 4 >= chains || pair >= pairs || !has_values) continue;
      if (p.gated) {
        if (pair < p.y.width) finish_gated(p, 0, pair, two[0], two[1]);
      } else {
        finish<2>(p, 1, p.w.n, two,
                  [&](int i) { return Place{0, pair / kTilePairs * kTileRows + pair % kTilePairs + i * kTilePairs}; });
      }
      continue;
    }
    if (has_values) *reinterpret_cast<float2*>(sums + warp * kTileRows + lane / 4 * 2) = make_float2(two[0], two[1]);
    __syncthreads();
    const auto total = [&](int place) {
      float all[kMaxQuantSplitK];
#pragma unroll
      for (int i = 0; i < kMaxQuantSplitK; i++)
        if (i < k.count) all[i] = sums[i * pairs_at_once * 2 + place];
#pragma unroll
      for (int i = 1; i < kMaxQuantSplitK; i++)
        if (i < k.count) all[0] = __fadd_rn(all[0], all[i]);
      return all[0];
    };
    if (const Value v = value_at(threadIdx.x, first); v.there) {
      if (p.gated) {
        finish_gated(p, 0, v.column, total(v.place), total(v.place + 1));
      } else {
        float sum = total(v.place);
        if (p.bias) sum = __fadd_rn(sum, before.bias);
        if (p.adds) sum = __fadd_rn(before.value, sum);
        put(p.y, 0, v.column, sum);
      }
    }
    __syncthreads();
  }
}

template <class Type, int kStages>
void start_row(const GemmArgs& p, const Plan& plan, const Queue& queue) {
  using S = Shape<Type, kStages>;
  const SplitK k(p.w.k, p.w.max_split_k);
  const size_t shared = S::shared(plan.warps, k.count * k.length);
  const int groups = ceil_div(plan.pairs, plan.merged);
  // Balances the rounds of CTAs, if there are several.
  start_reading(queue, {p.w.quants.words, quants_bytes(p.w.n, p.w.k, S::kBits)}, row_kernel<S>,
                dim3(ceil_div(groups, ceil_div(groups, sm_count()))), 32 * plan.warps, shared, p, plan.pairs,
                Divisor(plan.merged), plan.shared_units, k, Divisor(k.length), SetPace::of<S>(p.w.quants, k.blocks));
}

}  // namespace

void gemv_quantized(const GemmArgs& p, const Queue& queue) {
  const Plan plan(p.w, sm_count(), max_shared());
  const auto start = [&](auto type) {
    using Type = decltype(type);
    plan.stages == kDeep ? start_row<Type, kDeep>(p, plan, queue) : start_row<Type, kShallow>(p, plan, queue);
  };
  p.w.quants.codes == Codes::integers ? by_integers(p.w.quants, start) : by_small_floats(p.w.quants, start);
}

}  // namespace as::cuda
