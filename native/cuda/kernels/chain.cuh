// A chain of ops in one launch (cuda/chain.h): the products of quantized_stream.cuh, one after the other, by blocks of
// threads that stay on their processors, and what is done to rows in between.
//
// Weights depend on nothing: the warps that ask for them run ahead through the ring of shared memory into the next
// products, whatever rows are waited for; other warps ask for the rows, once the op before has ended everywhere, which
// a counter in global memory says. Ops on rows are done by the warps that multiply, a row by a block of threads.
//
// Every block of threads waits for others of the same launch: all of them run at once, as each has a processor for
// itself and there are no more of them. Nobody waits for an op that comes later, nor, within a product, for a block of
// a higher number: so all waits end.
#pragma once
#include <cstdlib>

#include "cuda/chain.h"
#include "cuda/kernels/chain_own_rows.cuh"
#include "cuda/kernels/quantized_stream.cuh"

namespace as {
namespace cuda {

// Weights in bfloat16: products read them out of shared memory as they are.
struct Plain {
  using Sum = float;
  static constexpr int kBits = 16, kRowBytes = cuda::kRowBytes, kParts = 4, kSets = 0;
  static constexpr bool kFine = false, kSegments = false, kFloats = false;
  static constexpr SumScales kScales = SumScales::none;
};

// A shape of quantized_stream.cuh, with room behind its stages for rows that a block of threads makes for itself.
template <class Format, int kRows, int kGroups>
struct ChainShape : StreamShape<Format, kRows, kGroups> {
  using Base = StreamShape<Format, kRows, kGroups>;
  static constexpr bool kOwns =
      kRows == kMostOwnRows && Base::kWorkers == 32 * kOwnWarps && (Format::kParts == 4 || Format::kFloats);
  static constexpr int kOwnBytes = kOwns ? kMostOwnColumns / kBlock * Base::kRowsBytes : 0;
  static constexpr int kMost = ((216 << 10) - kOwnBytes) / Base::kStageBytes, kStages = kMost < 16 ? kMost : 16;
  static constexpr int kOwnAt = kStages * Base::kStageBytes, kShared = kOwnAt + kOwnBytes;
};

// K in steps of two blocks, the last of a piece perhaps of one.
struct ChainSteps {
  int blocks = 0, count = 0, pieces = 0, length = 0, piece_blocks = 0;  // length: steps of a piece

  ChainSteps() = default;
  explicit ChainSteps(const Pieces& k)
      : blocks(k.blocks), pieces(k.count), length((k.length + kStepBlocks - 1) / kStepBlocks), piece_blocks(k.length) {
    const int rest = k.blocks - (k.count - 1) * k.length;
    count = (k.count - 1) * length + (rest + kStepBlocks - 1) / kStepBlocks;
  }
};

// What blocks of threads have equal numbers of: steps, whatever pieces they belong to; pieces, where there are not more
// of them than blocks of threads.
enum class ShareOf { steps, pieces };

// An op as the kernel has it. blocks: of threads that take part; none: the op after it makes its rows, by each of them
// for itself. after: the op whose end it waits for, own: the one whose rows it makes; -1: none.
struct ChainLink {
  ChainOp op;
  ChainSteps k;
  Segments segments{{}, Pieces(1)};
  ShareOf share = ShareOf::steps;
  int tiles = 0, blocks = 0, after = -1, own = -1;
};
struct alignas(16) ChainLinks {
  int count = 0, rows = 0;
  Scratch scratch;
  ChainLink links[kMostChained];
};

// A part of a piece: steps [begin, end) of [first, last), which the piece has. block, block_end: of K, where the part
// begins and where its piece ends.
struct ChainPart {
  int tile, piece, begin, end, first, last, block, block_end;
};
// The parts of a product that a block of threads has, in the order in which it computes them: first the beginning of a
// piece that others end, then whole pieces, then the end of one that others begin. Where shares are shorter than a
// piece, one may be all in the midst of it.
class ChainParts {
 public:
  AS_BOTH ChainParts(const ChainLink& link, int own) : k_(link.k) {
    if (own >= link.blocks) return;
    if (link.share == ShareOf::pieces) {
      begin_ = place_of(link.tiles * k_.pieces, own, link.blocks),
      end_ = place_of(link.tiles * k_.pieces, own + 1, link.blocks);
    } else {
      const int64_t all = (int64_t)link.tiles * k_.count;
      begin_ = (int)(all * own / link.blocks), end_ = (int)(all * (own + 1) / link.blocks);
    }
    at_ = begin_of(begin_) == begin_ ? begin_ : end_of(begin_), stop_ = begin_of(end_);
    if (stop_ < begin_) at_ = stop_ = begin_;  // in the midst
    else rest_ = at_;
  }
  // False: there are no more.
  AS_BOTH bool next(ChainPart& part) {
    if (turn_ == 0) {
      turn_ = 1;
      if (stop_ < end_) return set(part, stop_, end_), true;
    }
    if (turn_ == 1) {
      const int from = at_;
      if (from < stop_) return at_ = end_of(from), set(part, from, at_), true;
      turn_ = 2;
      if (begin_ < rest_) return set(part, begin_, rest_), true;
    }
    return false;
  }

 private:
  // Positions count steps of all tiles; here of the first pieces, shared out.
  AS_BOTH int place_of(int pieces, int own, int blocks) const {
    const int piece = (int)((int64_t)pieces * own / blocks);
    return piece / k_.pieces * k_.count + piece % k_.pieces * k_.length;
  }
  AS_BOTH int begin_of(int position) const {  // where the piece begins that has it
    const int tile = position / k_.count * k_.count;
    return tile + (position - tile) / k_.length * k_.length;
  }
  AS_BOTH int end_of(int position) const {
    const int tile_end = position / k_.count * k_.count + k_.count, end = begin_of(position) + k_.length;
    return end < tile_end ? end : tile_end;
  }
  AS_BOTH void set(ChainPart& part, int from, int to) const {
    part.tile = from / k_.count, part.begin = from - part.tile * k_.count, part.end = to - part.tile * k_.count;
    part.piece = part.begin / k_.length, part.first = part.piece * k_.length;
    part.last = part.first + k_.length < k_.count ? part.first + k_.length : k_.count;
    const int first = part.piece * k_.piece_blocks;
    part.block = first + (part.begin - part.first) * kStepBlocks;
    part.block_end = first + k_.piece_blocks < k_.blocks ? first + k_.piece_blocks : k_.blocks;
  }

  const ChainSteps& k_;
  int begin_ = 0, end_ = 0, at_ = 0, stop_ = 0, rest_ = 0, turn_ = 0;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// What is written by one processor with ordinary stores, and read by another's bulk copies: both sides put this between
// that and what tells of it.
__device__ inline void fence_copies() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
__device__ inline void tell_done(int* count) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(count) : "memory");
}
// Ends: whoever adds to the count runs, and waits for none that comes later.
__device__ inline void await_done(const int* count, int all) {
  int there;
  do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(there) : "l"(count) : "memory");
  while (there < all);
}
// Of the warps that multiply.
template <typename S>
constexpr int kWorkersBarrier = 1 + S::kGroups;
template <typename S>
__device__ inline void workers_barrier() {
  asm volatile("bar.sync %0, %1;" ::"n"(kWorkersBarrier<S>), "n"(S::kWorkers) : "memory");
}

// What all parts of the kernel have of the ring of stages.
template <typename S>
struct ChainRing {
  char* shared;
  uint32_t stages;
  uint64_t *full, *empty, *made;  // made: rows are, as one thread of those that ask for them has seen
};

constexpr int kWeightWarps = 2, kFetchRowWarps = kStepBlocks;

// A thread asks for weights of every product, stage after stage: of every second group of columns.
template <typename S>
__device__ inline void fetch_weights(const ChainLinks& chain, const ChainRing<S>& at, int own) {
  using Format = typename S::Format;
  const uint64_t policy = evicted_first();
  Ring<S::kStages> ring;
  for (int i = 0; i < chain.count; i++) {
    const ChainLink& link = chain.links[i];
    if (link.op.kind != ChainOp::Kind::product) continue;
    const Product& p = link.op.product;
    const Codes& codes = p.w.codes;
    const int all_blocks = link.k.blocks, column_blocks = blocks_of(p.w.n);
    const char* weights = reinterpret_cast<const char*>(Format::kBits == 16 ? (const void*)p.w.tiles : codes.words);
    const int sets = Format::kFine ? kBlock / codes.group : Format::kSets;  // of a block
    const int group_blocks = codes.groups > 1 ? max(codes.group / kBlock, 1) : all_blocks;
    const auto first_set = [&](int block) { return Format::kFine ? block * sets : block / group_blocks; };
    // Whether the sets of a step's blocks lie side by side, in both places.
    const bool adjacent = sets == Format::kSets && (Format::kFine || group_blocks == 1);
    ChainParts parts(link, blockIdx.x);
    for (ChainPart part; parts.next(part);) {
      const int column_block = part.tile * S::kGroups, groups = min(S::kGroups, column_blocks - column_block);
      for (int step = part.begin, block = part.block; step < part.end; step++, block += kStepBlocks, ring.next()) {
        const int blocks = min(kStepBlocks, part.block_end - block);
        uint64_t* barrier = &at.full[ring.stage];
        barrier_wait(&at.empty[ring.stage], ring.parity ^ 1);
        int set_bytes = 0;
        if constexpr (Format::kSets)
          for (int j = 0; j < blocks; j++) set_bytes += min(sets, codes.groups - first_set(block + j)) * S::kSetBytes;
        const int own_groups = (groups - own + kWeightWarps - 1) / kWeightWarps;
        barrier_expect(barrier, own_groups * (blocks * S::kCodesBytes + set_bytes));
        const uint32_t to = at.stages + ring.stage * S::kStageBytes + S::kGroupsAt;
        for (int g = own; g < groups; g += kWeightWarps) {
          copy_bulk(to + g * S::kGroupBytes,
                    weights + ((size_t)(column_block + g) * all_blocks + block) * S::kCodesBytes,
                    blocks * S::kCodesBytes, barrier, policy);
          if constexpr (Format::kSets)
            for (int j = 0; j < (adjacent ? 1 : blocks); j++) {
              const int set = first_set(block + j);
              copy_bulk(to + g * S::kGroupBytes + S::kSetsAt + j * Format::kSets * S::kSetBytes,
                        reinterpret_cast<const char*>(codes.scales) +
                            ((size_t)(column_block + g) * codes.groups + set) * S::kSetBytes,
                        min(adjacent ? blocks * sets : sets, codes.groups - set) * S::kSetBytes, barrier, policy);
            }
        }
      }
    }
  }
}

// A thread asks for rows of every product, of block `own` of each step, once they are made.
template <typename S>
__device__ inline void fetch_rows(const ChainLinks& chain, const ChainRing<S>& at, int own) {
  using Format = typename S::Format;
  Ring<S::kStages> ring;
  int made = 0;  // parity
  await_previous();
  for (int i = 0; i < chain.count; i++) {
    const ChainLink& link = chain.links[i];
    if (link.op.kind != ChainOp::Kind::product) continue;
    const Product& p = link.op.product;
    const char* x = reinterpret_cast<const char*>(Format::kParts == 4 ? (const void*)p.x.tiles : p.bytes.values);
    const int row_bytes = chain.rows * Format::kRowBytes, stride = blocks_of(chain.rows) * kBlock;
    ChainParts parts(link, blockIdx.x);
    bool there = link.after < 0 || link.own >= 0;
    for (ChainPart part; parts.next(part);) {
      if (!there) {
        if (own == 0)
          await_done(chain.scratch.barriers + link.after, chain.links[link.after].blocks), barrier_arrive(at.made);
        else barrier_wait(at.made, made), made ^= 1;
        fence_copies(), there = true;
      }
      int block = part.block + own;
      for (int step = part.begin; step < part.end; step++, block += kStepBlocks, ring.next()) {
        uint64_t* barrier = &at.full[ring.stage];
        const uint32_t to = at.stages + ring.stage * S::kStageBytes;
        barrier_wait(&at.empty[ring.stage], ring.parity ^ 1);
        if (block >= part.block_end || link.own >= 0) {
          barrier_arrive(barrier);
          continue;
        }
        barrier_expect(barrier, row_bytes + S::kSumsBytes);
        copy_bulk(to + own * S::kRowsBytes, x + (size_t)block * kBlock * Format::kRowBytes, row_bytes, barrier);
        if constexpr (S::kHasSums)
          copy_bulk(to + S::kSumsAt + own * S::kSumsBytes,
                    reinterpret_cast<const char*>(p.bytes.sums + (size_t)block * stride), S::kSumsBytes, barrier);
      }
    }
  }
}

// Warpgroups that multiply, each 64 columns of a tile; the sums of what a part has, from what others left of its piece
// and for others, as quantized_stream_kernel has them.
template <typename S>
class ChainWorker {
 public:
  using Format = typename S::Format;

  __device__ ChainWorker(const ChainRing<S>& at, int* arrived) : at_(at), arrived_(arrived) {}

  __device__ void multiply(const ChainLink& link, int rows, const Scratch& scratch) {
    const Product& p = link.op.product;
    const int column_blocks = blocks_of(p.w.n);
    owns_ = link.own >= 0;
    ChainParts parts(link, blockIdx.x);
    for (ChainPart part; parts.next(part);) {
      const int column_block = part.tile * kGroups + group_;
      const bool own = column_block < column_blocks;  // else the columns are beyond the last
      const bool begun = part.begin > part.first;     // by others
      // Cleared even where the first product does not add: so that no register holds them while rows are made.
      if (!begun || Format::kFloats) clear(d_);
      if (begun) take_sums(scratch, own);
      else if constexpr (Format::kSegments) clear(total_);
      add_products(p, part, begun, link.segments);
      if (!own) continue;
      if (part.end < part.last) {
        leave_sums(scratch);
        continue;
      }
      float sums[kValues];
#pragma unroll
      for (int i = 0; i < kValues; i++) {
        if constexpr (Format::kSegments) sums[i] = total_[i];
        else sums[i] = d_[i];
      }
      if (link.k.pieces > 1 && !add_pieces_up(scratch, part, link.k.pieces, sums)) continue;
      finish_columns<Format::kScales>(p, rows, 0, column_block, sums);
    }
  }

 private:
  static constexpr int kGroups = S::kGroups, kValues = S::kValues, kBits = Format::kBits;
  static constexpr bool kPlain = kBits == 16, kDirect = kPlain || Format::kFloats, kFew = S::kFew && !kPlain;
  using Operand = uint32_t[Format::kParts][4];

  // Where a thread's sums are for others: adjacent threads side by side.
  static __device__ float* left_by(const Scratch& scratch, int block) {
    return scratch.sums + block * kScratchFloats + threadIdx.x;
  }
  __device__ void take_sums(const Scratch& scratch, bool own) {
    const int before = blockIdx.x - 1;
    if (own && thread_ == 0) take(scratch.flags + before * kScratchFlags + group_);
    group_barrier(group_);
    const float* from = left_by(scratch, before);
#pragma unroll
    for (int i = 0; i < kValues; i++) {
      if constexpr (Format::kSegments) total_[i] = __ldcg(from + i * S::kWorkers);
      if constexpr (!Format::kSegments) d_[i] = __ldcg(from + i * S::kWorkers);
      else if constexpr (S::kHasSums) d_[i] = __float_as_int(__ldcg(from + (kValues + i) * S::kWorkers));
    }
  }
  __device__ void leave_sums(const Scratch& scratch) {
    float* to = left_by(scratch, blockIdx.x);
#pragma unroll
    for (int i = 0; i < kValues; i++) {
      if constexpr (Format::kSegments) __stcg(to + i * S::kWorkers, total_[i]);
      if constexpr (!Format::kSegments) __stcg(to + i * S::kWorkers, d_[i]);
      else if constexpr (S::kHasSums) __stcg(to + (kValues + i) * S::kWorkers, __int_as_float(d_[i]));
    }
    group_barrier(group_);
    if (thread_ == 0) leave(scratch.flags + blockIdx.x * kScratchFlags + group_);
  }
  // False: others come later, and add them up.
  __device__ bool add_pieces_up(const Scratch& scratch, const ChainPart& part, int pieces, float (&sums)[kValues]) {
    float* all = scratch.pieces + (size_t)part.tile * pieces * S::kSums + threadIdx.x;
    float* to = all + part.piece * S::kSums;
#pragma unroll
    for (int i = 0; i < kValues; i++) __stcg(to + i * S::kWorkers, sums[i]);
    group_barrier(group_);
    if (thread_ == 0) {
      int* count = scratch.arrivals + part.tile * kGroups + group_;
      arrived_[group_] = arrive(count);
      if (arrived_[group_] == pieces - 1) *count = 0;
    }
    group_barrier(group_);
    if (arrived_[group_] != pieces - 1) return false;
    add_pieces<kValues, S::kWorkers, S::kSums>(all, pieces, sums);
    return true;
  }

  __device__ int codes_at(int stage, int j) const {
    return stage * S::kStageBytes + S::kGroupsAt + group_ * S::kGroupBytes + j * S::kCodesBytes;
  }
  __device__ const char* scales_at(int stage, int j) const {
    return at_.shared + stage * S::kStageBytes + S::kGroupsAt + group_ * S::kGroupBytes + S::kSetsAt +
           j * Format::kSets * S::kSetBytes + (warp_ * 8 + lane_ / 4) * 8;
  }
  // block: of K, which is number j of a stage.
  __device__ uint32_t rows_at(int stage, int j, int block) const {
    return at_.stages +
           (S::kOwns && owns_ ? S::kOwnAt + block * S::kRowsBytes : stage * S::kStageBytes + j * S::kRowsBytes);
  }

  // Products of a part's steps, added to the sums that there are if it has been begun.
  __device__ void add_products(const Product& p, const ChainPart& part, bool begun, const Segments& segments) {
    int segment_end = 0;  // a block
    if constexpr (!kFew) settle(d_);
    bool adds = begun;
    if constexpr (Format::kSegments) {
      segment_end = segments.end(part.block);
      adds = adds && segments.begin(part.block) < part.block;
    }
    if (kFew && !adds) clear(d_);
    for (int step = part.begin, block = part.block; step < part.end; step++, block += kStepBlocks, ring_.next()) {
      const int stage = ring_.stage;
      barrier_wait(&at_.full[stage], ring_.parity);
      const bool both = block + 1 < part.block_end;
      if constexpr (kFew) {
#pragma unroll
        for (int j = 0; j < kStepBlocks; j++) {
          if (j && !both) break;
          Operand a;
          load(p, stage, j, block + j, a);
          multiply_few(rows_at(stage, j, block + j), a);
          if (end_segment(stage, j, block + j, segments, segment_end)) clear(d_);
        }
      } else if constexpr (kDirect) {
        Operand none;
        multiply_block(rows_at(stage, 0, block), stage, 0, adds, none);
        if (both) multiply_block(rows_at(stage, 1, block + 1), stage, 1, true, none);  // of the same segment
        wait_products<0>();
        settle(d_);
        adds = !end_segment(stage, both, block + both, segments, segment_end);
      } else {
        Operand a[kStepBlocks];  // one is made while the product of the other is under way
        load(p, stage, 0, block, a[0]);
        multiply_block(rows_at(stage, 0, block), stage, 0, adds, a[0]);
        if (both) load(p, stage, 1, block + 1, a[1]);
        wait_products<0>();
        settle(d_);
        adds = !end_segment(stage, 0, block, segments, segment_end);
        if (both) {
          multiply_block(rows_at(stage, 1, block + 1), stage, 1, adds, a[1]);
          wait_products<0>();
          settle(d_);
          adds = !end_segment(stage, 1, block + 1, segments, segment_end);
        }
      }
      __syncwarp();
      if (lane_ == 0) barrier_arrive(&at_.empty[stage]);
    }
  }

  // Block j of a stage, which is `block` of K, as the product's first operand.
  __device__ void load(const Product& p, int stage, int j, int block, Operand& a) const {
    if constexpr (!kDirect) {
      const uint4* own = reinterpret_cast<const uint4*>(at_.shared + codes_at(stage, j));
      LaneCodes<kBits> lanes;
#pragma unroll
      for (int i = 0; i < LaneCodes<kBits>::kLoads; i++)
        lanes.loaded[i] = own[(warp_ * LaneCodes<kBits>::kLoads + i) * 32 + lane_];
      if constexpr (Format::kSegments) {
#pragma unroll
        for (int i = 0; i < 2; i++) integers<kBits>(lanes, i, a[i]);
      } else {
        const int there = p.w.k - block * kBlock;
        Affine affine[2];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          if (Format::kFine || i == 0) {
            const int set = Format::kFine ? i * (kBlock / p.w.codes.group) / 4 : 0;
            const uint2 two = *reinterpret_cast<const uint2*>(scales_at(stage, j) + set * S::kSetBytes);
            affine[0].set(two.x), affine[1].set(two.y);
          }
          lanes.fragment(i, affine, a[i]);
        }
        if (there < kBlock) {
#pragma unroll
          for (int i = 0; i < 4; i++) cut_fragment(a[i], there - i * 16);
        }
      }
    }
  }
  __device__ void multiply_block(uint32_t x, int stage, int j, bool adds, Operand& a) {
    const uint32_t own = at_.stages + codes_at(stage, j);
    begin_products();
#pragma unroll
    for (int i = 0; i < Format::kParts; i++) {
      const bool keeps = i > 0 || adds;
      if constexpr (kPlain)
        Tile<S::kRows>::multiply(d_, descriptor(own + i * kStepBytes), descriptor(x + i * kStepBytes), keeps);
      else if constexpr (Format::kFloats)
        Float8Tile<S::kRows>::multiply(d_, byte_descriptor(own + i * kStepBytes), byte_descriptor(x + i * kStepBytes),
                                       keeps);
      else if constexpr (Format::kSegments)
        ByteTile<S::kRows>::multiply(d_, a[i], byte_descriptor(x + i * kStepBytes), keeps);
      else RegisterTile<S::kRows>::multiply(d_, a[i], descriptor(x + i * kStepBytes), keeps);
    }
    commit_products();
  }
  __device__ void multiply_few(uint32_t x, const Operand& a) {
#pragma unroll
    for (int t = 0; t < S::kRows / 8; t++) {
      auto& own = reinterpret_cast<typename Format::Sum(&)[4]>(d_[4 * t]);
#pragma unroll
      for (int i = 0; i < Format::kParts; i += 2) {
        uint32_t y[4];
        load_cores(y,
                   x + t * 8 * Format::kRowBytes +
                       (S::kHasSums ? byte_piece(lane_ % 8, lane_ / 8) : piece_offset(lane_ % 8, 2 * i + lane_ / 8)));
        multiply_add(own, a[i], y[0], y[1]), multiply_add(own, a[i + 1], y[2], y[3]);
      }
    }
  }
  // Whether sums have become part of the total, as a segment ends with this block.
  __device__ bool end_segment(int stage, int j, int block, const Segments& segments, int& segment_end) {
    if constexpr (Format::kSegments) {
      if (block != segment_end) return false;
      segment_end = segments.end(block + 1);
      if constexpr (Format::kFloats) {
#pragma unroll
        for (int i = 0; i < kValues; i++) total_[i] = __fadd_rn(total_[i], d_[i]);
      } else {
        const uint2 two = *reinterpret_cast<const uint2*>(scales_at(stage, j));
        const float2* of_rows =
            reinterpret_cast<const float2*>(at_.shared + stage * S::kStageBytes + S::kSumsAt + j * S::kSumsBytes);
#pragma unroll
        for (int i = 0; i < kValues; i++) {
          const float2 activations = of_rows[i / 4 * 4 + lane_ % 4];
          add_segment(total_[i], i % 4 / 2 ? two.y : two.x, d_[i], i % 2 ? activations.y : activations.x);
        }
      }
      return true;
    }
    return false;
  }

  const ChainRing<S>& at_;
  int* const arrived_;  // of each group: how many pieces came before
  const int group_ = threadIdx.x / kGroupThreads, thread_ = threadIdx.x % kGroupThreads, warp_ = thread_ / 32,
            lane_ = threadIdx.x % 32;
  Ring<S::kStages> ring_;
  bool owns_ = false;  // rows of the product
  typename Format::Sum d_[kValues];
  float total_[Format::kSegments ? kValues : 1];
};
#endif

// What is done to rows on their way to a format's products.
template <class Format>
AS_BOTH constexpr RowBytes row_bytes_of() {
  return Format::kParts == 4 ? RowBytes::none : Format::kFloats ? RowBytes::floats : RowBytes::integers;
}

template <typename S>
__global__ void __launch_bounds__(S::kThreads, 1) chain_kernel(const __grid_constant__ ChainLinks parameters) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kStages = S::kStages;
  extern __shared__ __align__(1024) char shared[];
  __shared__ uint64_t full[kStages], empty[kStages], made;
  __shared__ int arrived[S::kGroups];
  constexpr RowBytes kBytes = row_bytes_of<typename S::Format>();
  __shared__ ChainRowsShared<kBytes> rows_shared;
  __shared__ RowShared own_shared[S::kOwns ? kOwnWarps : 1];
  __shared__ __align__(16) char links_shared[sizeof(ChainLinks)];
  constexpr int kCopyBarrier = kWorkersBarrier<S> + 1, kOwnBarrier = kCopyBarrier + 1;
  const auto copied = [&] {
    asm volatile("bar.sync %0, %1;" ::"n"(kCopyBarrier), "n"(S::kWorkers + 32 * kFetchRowWarps) : "memory");
  };
  let_next_begin();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; i++)
      barrier_init(&full[i], kWeightWarps + kFetchRowWarps), barrier_init(&empty[i], 4 * S::kGroups);
    barrier_init(&made, 1);
    barriers_are_there();
  }
  __syncthreads();
  const ChainRing<S> ring{shared, shared_address(shared), full, empty, &made};
  const ChainLinks& chain = *reinterpret_cast<const ChainLinks*>(links_shared);
  if (threadIdx.x >= S::kWorkers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(S::kCopyRegisters));
    // Issuing a copy takes some 200 cycles: so warps share them, and one thread of each asks.
    static_assert(kWeightWarps + kFetchRowWarps == kGroupThreads / 32);
    const int warp = (threadIdx.x - S::kWorkers) / 32;
    if (warp >= kWeightWarps) copied();
    if (threadIdx.x % 32 != 0) return;
    if (warp < kWeightWarps) fetch_weights<S>(parameters, ring, warp);
    else fetch_rows<S>(chain, ring, warp - kWeightWarps);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::kRegisters));
  // Every line of parameters that is read for the first time is waited for: so all at once, and not by way of the cache
  // of constants, which has one address at a time.
  const uint4* from = reinterpret_cast<const uint4*>(&parameters);
  asm volatile("" : "+l"(from));
  for (int i = threadIdx.x; i < (int)(sizeof(ChainLinks) / 16); i += S::kWorkers)
    reinterpret_cast<uint4*>(links_shared)[i] = from[i];
  copied();
  for (int i = 0; i < chain.count; i++)
    if (chain.links[i].op.kind != ChainOp::Kind::product && (int)blockIdx.x < chain.rows)
      prefetch_norm(chain.links[i].op);
  await_previous();
  int* const barriers = chain.scratch.barriers;
  const RowThreads threads{(int)threadIdx.x, S::kWorkers, kWorkersBarrier<S>};
  ChainWorker<S> worker(ring, arrived);
  for (int i = 0; i < chain.count; i++) {
    const ChainLink& link = chain.links[i];
    if ((int)blockIdx.x >= link.blocks) continue;
    const auto await_rows = [&] {
      if (threadIdx.x == 0 && link.after >= 0) await_done(barriers + link.after, chain.links[link.after].blocks);
      workers_barrier<S>();
    };
    if (link.op.kind == ChainOp::Kind::product) {
      if constexpr (S::kOwns)
        if (link.own >= 0) {
          const ChainOp& op = chain.links[link.own].op;
          touch_norm(op);
          await_rows();
          make_own_rows<kBytes>(own_shared, kOwnBarrier, op, chain.rows, shared + S::kOwnAt);
          asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
          workers_barrier<S>();
        }
      worker.multiply(link, chain.rows, chain.scratch);
    } else {
      await_rows();
      do_rows<S::kWorkers, kBytes>(threads, rows_shared, link.op, link.segments, chain.rows, blockIdx.x, link.blocks);
    }
    if (i + 1 == chain.count) break;
    fence_copies();
    workers_barrier<S>();
    if (threadIdx.x == 0) tell_done(barriers + i);
  }
  // Whoever leaves last makes all counts zero again.
  workers_barrier<S>();
  if (threadIdx.x == 0 && arrive(barriers + kMostChained) == (int)gridDim.x - 1)
    for (int i = 0; i <= kMostChained; i++) barriers[i] = 0;
#endif
}
static_assert(kMostChained < kScratchBarriers);

// Whether ops[i], a product, has its rows from the op before it, and nobody later has.
inline bool reads_alone(const ChainOp* ops, int count, int i) {
  const ChainOp& maker = ops[i - 1];
  const Product& own = ops[i].product;
  if (maker.kind == ChainOp::Kind::bytes) {
    if (own.bytes.values != maker.product.bytes.values) return false;
    return i + 1 == count || ops[i + 1].kind != ChainOp::Kind::product || !ops[i + 1].product.w.takes_bytes();
  }
  if (!maker.y.tiles || maker.y.values || own.x.tiles != maker.y.tiles) return false;
  for (int later = i + 1; later < count; later++) {
    if (ops[later].kind == ChainOp::Kind::norm && ops[later].y.tiles == maker.y.tiles) break;
    if (ops[later].product.x.tiles == maker.y.tiles && ops[later].kind != ChainOp::Kind::norm) return false;
  }
  return true;
}

// The ops as the kernel has them, for blocks of threads that are so many.
template <typename S>
ChainLinks links_of(const ChainOp* ops, int count, int rows, int blocks, const Scratch& scratch) {
  ChainLinks chain;
  chain.count = count, chain.rows = rows, chain.scratch = scratch;
  for (int i = 0; i < count; i++) {
    ChainLink& link = chain.links[i];
    link.op = ops[i], link.after = i - 1;
    const Matrix& w = ops[i].product.w;
    if (w.k) link.k = ChainSteps(Pieces(w.k, w.most_pieces)), link.segments = Segments(w, Pieces(w.k, w.most_pieces));
    if (ops[i].kind != ChainOp::Kind::product) {
      link.blocks = std::min(rows, blocks);
      continue;
    }
    link.tiles = (blocks_of(w.n) + S::kGroups - 1) / S::kGroups;
    const int pieces = link.tiles * link.k.pieces, steps = link.tiles * link.k.count;
    // Sums that one leaves for another come late: where it costs little, everybody has pieces of its own.
    constexpr int kLittle = 2;  // steps
    const bool whole = pieces <= blocks && link.k.length <= (steps + blocks - 1) / blocks + kLittle;
    link.share = whole ? ShareOf::pieces : ShareOf::steps;
    link.blocks = std::min(blocks, whole ? pieces : steps);
    if (S::kOwns && i && link.blocks >= rows && may_own(ops[i - 1], rows) && reads_alone(ops, count, i))
      link.own = i - 1, link.after = i - 2, chain.links[i - 1].blocks = 0;
  }
  return chain;
}

template <typename S>
void start_chain(const ChainOp* ops, int count, int rows, const Queue& queue) {
  const int blocks = std::min<int>(processors(), kScratchBlocks);
  const ChainLinks chain = links_of<S>(ops, count, rows, blocks, queue.scratch);
  allow_shared(chain_kernel<S>, S::kShared);
  static const bool cooperative = std::getenv("ALLSPARK_TRY_COOPERATIVE");
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = !queue.apart;
  attributes[1].id = cudaLaunchAttributeCooperative;
  attributes[1].val.cooperative = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks), config.blockDim = dim3(S::kThreads), config.dynamicSmemBytes = S::kShared;
  config.stream = queue.stream, config.attrs = attributes, config.numAttrs = cooperative ? 2 : 1;
  cudaLaunchKernelEx(&config, chain_kernel<S>, chain);
  launched("a chain of ops");
}

}  // namespace cuda
}  // namespace as
