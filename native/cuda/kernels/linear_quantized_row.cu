// Products of quantized weights with one row of activations in bfloat16, by mma.sync: what a single sequence decodes
// with.
//
// A warp has 16 columns of the result (a tile of the weights) and one piece of K (tiles.h) at a time, and copies the
// codes that it needs itself, some blocks ahead; so warps wait for nobody. A block of threads has all pieces of its
// tiles, and adds them up in shared memory; the row is there as a whole, and may be normed on its way.
#include <algorithm>

#include "cuda/kernels/code_fragments.cuh"
#include "cuda/kernels/linear_quantized.h"
#include "cuda/kernels/stream_parts.cuh"

namespace as {
namespace cuda {
namespace {

constexpr int kMostWarps = 20;
constexpr int kNormed = 3, kMostNormed = 512;  // eights of a row that is normed: of a thread, of all
bool is_fine(const Codes& codes) { return codes.groups > 1 && codes.group < kBlock; }

// kFine: scales change within a block of K. A stage is some blocks of a tile: codes, and then each one's scales.
template <int kBits_, bool kFine_, int kStages_>
struct Shape {
  static constexpr int kBits = kBits_, kStages = kStages_, kBlocks = 16 / kBits, kSets = kFine_ ? 4 : 1;
  static constexpr int kTileBytes = code_bytes(kBits) / 4, kSetBytes = kTileRows * 4;
  static constexpr int kCodesBytes = kBlocks * kTileBytes, kStageBytes = kCodesBytes + kBlocks * kSets * kSetBytes;

  static size_t shared(int warps, int k_blocks) {
    return (size_t)warps * (kStages * kStageBytes + kTileRows * 4) + (size_t)k_blocks * kRowBytes;
  }
};

// The compiler has these in registers: it would work them out again in every turn of a loop.
__device__ __forceinline__ void keep(uint32_t& x) { asm volatile("" : "+r"(x)); }

template <class S>
struct BlockCodes {
  LaneCodes<S::kBits> codes;
  uint2 scales[S::kSets];

  // Block j of a stage, of which a lane has its codes and scales where these say.
  __device__ __forceinline__ void read(uint32_t codes_at, uint32_t scales_at, int j) {
#pragma unroll
    for (int i = 0; i < LaneCodes<S::kBits>::kLoads; i++)
      codes.loaded[i] = load_16(codes_at + j * S::kTileBytes + i * 512);
#pragma unroll
    for (int i = 0; i < S::kSets; i++) scales[i] = load_8(scales_at + (j * S::kSets + i) * S::kSetBytes);
  }
  __device__ __forceinline__ void values(uint32_t (&a)[4][4]) const {
    Affine rows[2];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (i < S::kSets) rows[0].set(scales[i].x), rows[1].set(scales[i].y);
      codes.fragment(i, rows, a[i]);
    }
  }
};

// What a warp copies, a stage at a time: piece [begin, end) of K of every so many tiles. All that takes a division is
// worked out before: a stage is copied in a few instructions.
template <class S>
class Copies {
 public:
  // ring: the warp's; by: tiles from one to the next. set_blocks: of a group; each: groups of a block.
  __device__ __forceinline__ Copies(const Matrix& w, uint32_t ring, int tile, int tiles, int by, const Pieces& k,
                                    int begin, int end, const Divisor& set_blocks, int each)
      : codes_(w.codes),
        set_blocks_(set_blocks),
        begin_(begin),
        end_(end),
        whole_(min(end, w.k / kBlock) - S::kBlocks),
        tile_(tile),
        tiles_(tiles),
        by_(by),
        k_blocks_(k.blocks),
        each_(each),
        to_(ring + threadIdx.x % 32 * 16) {
    const bool one = codes_.groups == 1;
    more_ = S::kSets > 1 ? S::kBlocks * each : one ? 0 : set_blocks_(S::kBlocks);
    first_ = set_of(begin);
    if (S::kSets == 1 && !one && more_ * set_blocks_.by() != S::kBlocks) whole_ = -1;  // sets go on at another pace
    has_scales_ = to_lane() < kPlaces * 4;
    keep(to_), keep(has_scales_);
    at_tile();
  }
  // Into the stage that begins so many bytes into the ring.
  __device__ __forceinline__ void fetch(uint32_t stage) {
    if (block_ <= limit_) fetch_whole(to_ + stage);
    else fetch_rest(to_ + stage);
    block_ += S::kBlocks, from_ += S::kBlocks * code_bytes(S::kBits), set_ += more_;
    commit_copies();
  }

 private:
  static constexpr int kCopies = S::kTileBytes / 512,
                       kPlaces = S::kBlocks * S::kSets;  // of a block; of sets of a stage

  __device__ __forceinline__ void fetch_whole(uint32_t to) const {
#pragma unroll
    for (int i = 0; i < S::kBlocks * kCopies; i++) copy_codes(to, i);
#pragma unroll
    for (int i = 0; i < kPlaces; i += 8) copy_scales(to, i, set_ + i / S::kSets * each_, kPlaces >= 8 || has_scales_);
  }
  // A stage that is not whole, or of another pace of sets, or the first of the next tile.
  __device__ __forceinline__ void fetch_rest(uint32_t to) {
    if (block_ >= end_ && tile_ < tiles_) tile_ += by_, at_tile();
    if (tile_ >= tiles_) return;
    if (block_ <= limit_) return fetch_whole(to);
#pragma unroll
    for (int i = 0; i < S::kBlocks * kCopies; i++)
      if (block_ + i / kCopies < end_) copy_codes(to, i);
#pragma unroll
    for (int i = 0; i < kPlaces; i += 8) {
      const int own = block_ + i / S::kSets, set = set_of(own);
      copy_scales(to, i, min(set, codes_.groups - 1),
                  (kPlaces >= 8 || has_scales_) && own + to_lane() / 4 / S::kSets < end_);
    }
  }
  __device__ __forceinline__ int to_lane() const { return threadIdx.x % 32; }
  __device__ __forceinline__ void copy_codes(uint32_t to, int i) const {
    copy_16(to + i * 512, from_ + i / kCopies * code_bytes(S::kBits) + i % kCopies * 512);
  }
  __device__ __forceinline__ void copy_scales(uint32_t to, int i, int set, int there) const {
    asm volatile("{ .reg .pred p;\nsetp.ne.s32 p, %2, 0;\n@p cp.async.cg.shared.global [%0], [%1], 16; }" ::"r"(
                     to + S::kCodesBytes + i * S::kSetBytes),
                 "l"(scales_ + (size_t)set * (kScaleWords * 4)), "r"(there)
                 : "memory");
  }
  // What a lane copies of a stage's scales, if that begins with this block.
  __device__ __forceinline__ int set_of(int block) const {
    const int place = to_lane() / 4, own = block + place / S::kSets;
    return S::kSets > 1 ? own * each_ + place % S::kSets * each_ / S::kSets : set_blocks_(own);
  }
  __device__ __forceinline__ void at_tile() {
    const int row_block = tile_ / 4, first = tile_ % 4;
    block_ = begin_, set_ = first_, limit_ = tile_ < tiles_ ? whole_ : -1;
    from_ = reinterpret_cast<const char*>(codes_.words) +
            ((size_t)row_block * k_blocks_ + begin_) * code_bytes(S::kBits) + first * S::kTileBytes + to_lane() * 16;
    scales_ = reinterpret_cast<const char*>(codes_.scales) + (size_t)row_block * codes_.groups * (kScaleWords * 4) +
              first * S::kSetBytes + to_lane() % 4 * 16;
  }

  const Codes& codes_;
  const Divisor& set_blocks_;
  const int begin_, end_;
  int whole_, limit_;    // up to this block stages are whole and regular; of the tile
  uint32_t has_scales_;  // whether the lane copies some
  int tile_, block_;
  const int tiles_, by_, k_blocks_, each_;
  uint32_t to_;
  int first_, set_,
      more_;  // a lane's set of scales: of the piece's first stage, of the next; how many further one goes
  const char *from_, *scales_;
};

// The row, as it lies: sixteen bytes a thread, all asked for before any are put down.
__device__ __forceinline__ void copy_row(const Product& p, int blocks, char* x) {
  const char* from = reinterpret_cast<const char*>(p.x.tiles) + threadIdx.x % 8 * 16;
  for (int first = threadIdx.x / 8; first < blocks; first += blockDim.x) {
    uint4 v[8];
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (const int b = first + i * (blockDim.x / 8); b < blocks)
        v[i] = __ldcg(reinterpret_cast<const uint4*>(from + (size_t)b * kBlockBytes));
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (const int b = first + i * (blockDim.x / 8); b < blocks)
        *reinterpret_cast<uint4*>(x + b * kRowBytes + threadIdx.x % 8 * 16) = v[i];
  }
}

// The row, normed on the way with the bits of rms_norm(), whose threads (eight columns each) are here several of a
// thread's.
__device__ __forceinline__ void read_row(const float* row, int width, float (&values)[kNormed][8]) {
#pragma unroll
  for (int i = 0; i < kNormed; i++) read_eight(row, (i * blockDim.x + threadIdx.x) * 8, width, values[i]);
}
__device__ __forceinline__ void norm_row(const Product& p, const float (&weights)[kNormed][8], float* squares,
                                         char* x) {
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
    for (int j = 0; j < 4; j++) pairs[j] = two_bf16(values[i][2 * j], values[i][2 * j + 1]);
    *reinterpret_cast<uint4*>(x + place * 16) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
}

// tiles: of 16 columns, of which a block of threads has `together` at a time. set_blocks: of a group; each: groups of a
// block.
template <class S>
__global__ void __launch_bounds__(32 * kMostWarps)
    row_kernel(const __grid_constant__ Product p, int tiles, int together, Pieces k,
               const __grid_constant__ Divisor set_blocks, int each) {
  extern __shared__ __align__(128) char shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const int beside = warp / k.count, piece = warp - beside * k.count;
  const int begin = piece * k.length, end = min(begin + k.length, k.blocks);
  const int whole_end = min(end, p.w.k / kBlock);  // blocks with all columns
  float* const sums = reinterpret_cast<float*>(shared);
  char* const x = shared + warps * kTileRows * 4;
  const uint32_t ring = shared_address(x) + k.blocks * kRowBytes + warp * S::kStages * S::kStageBytes;
  let_next_begin();
  // Weights are on their way before the kernel before this one has made the rows.
  Copies<S> copies(p.w, ring, blockIdx.x * together + beside, tiles, gridDim.x * together, k, begin, end, set_blocks,
                   each);
#pragma unroll
  for (int i = 0; i < S::kStages - 1; i++) copies.fetch(i * S::kStageBytes);
  float norm_weights[kNormed][8];
  if (p.unnormed) read_row(p.norm.weight, p.w.k, norm_weights);  // nobody makes these
  await_previous();
  if (p.unnormed) norm_row(p, norm_weights, sums, x);
  else copy_row(p, k.blocks, x);
  __syncthreads();
  // Where products want more rows, there is this one again.
  uint32_t codes_at = ring + lane * 16, scales_at = ring + S::kCodesBytes + lane / 4 * 8,
           row_at = shared_address(x) + begin * kRowBytes + lane / 8 * 16;
  keep(codes_at), keep(scales_at), keep(row_at);

  // Of what pieces' sums in shared memory make, which a thread may have one of and asks ahead for what that is added
  // to.
  struct Value {
    int beside, place, column;  // place: of the column in its tile
    bool there;
  };
  struct Before {
    float bias, value;
  };
  const int shift = p.gated ? 3 : 4;  // of a tile's columns
  const auto value_at = [&](int i, int first) {
    Value v{i >> shift, i & ((1 << shift) - 1)};
    v.column = ((first + v.beside) << shift) + v.place;
    v.there = v.beside < together && v.column < (p.gated ? p.y.width : p.w.n);
    return v;
  };
  const auto before_of = [&](const Value& v) {
    return Before{p.bias ? p.bias[v.column] : 0.0f, p.adds ? p.y.values[v.column] : 0.0f};
  };

  uint32_t stage = (S::kStages - 1) * S::kStageBytes;  // what was computed with last
  for (int first = blockIdx.x * together; first < tiles; first += gridDim.x * together) {
    const int tile = first + beside;
    Before before = {};
    if (const Value v = value_at(threadIdx.x, first); k.count > 1 && !p.gated && v.there) before = before_of(v);
    float d[4] = {};
    uint32_t x_at = 0;
    const auto multiply = [&](const uint32_t(&y)[2][4], const uint32_t(&a)[4][4]) {
#pragma unroll
      for (int i = 0; i < 4; i++) multiply_add(d, a[i], y[i / 2][i % 2 * 2], y[i / 2][i % 2 * 2 + 1]);
    };
    const auto load_rows = [&](uint32_t(&y)[2][4], int j) {
      load_cores(y[0], row_at + x_at + j * kRowBytes), load_cores(y[1], row_at + x_at + j * kRowBytes + 64);
    };
    for (int b = begin; tile < tiles && b < end; b += S::kBlocks) {
      wait_copies<S::kStages - 2>();
      __syncwarp();
      const uint32_t done = stage;
      stage = stage == (S::kStages - 1) * S::kStageBytes ? 0 : stage + S::kStageBytes;
      if (b + S::kBlocks <= whole_end) {
        constexpr int kAhead = S::kSets == 1 ? S::kBlocks : 1;  // more would not fit registers
        BlockCodes<S> own[S::kBlocks];
#pragma unroll
        for (int j = 0; j < kAhead; j++) own[j].read(codes_at + stage, scales_at + stage, j);
        copies.fetch(done);
#pragma unroll
        for (int j = 0; j < S::kBlocks; j++) {
          if (j >= kAhead) own[j].read(codes_at + stage, scales_at + stage, j);
          uint32_t y[2][4], a[4][4];
          load_rows(y, j);
          own[j].values(a);
          multiply(y, a);
        }
      } else {
        copies.fetch(done);
        for (int j = 0; j < S::kBlocks && b + j < end; j++) {
          uint32_t y[2][4], a[4][4];
          load_rows(y, j);
          BlockCodes<S> own;
          own.read(codes_at + stage, scales_at + stage, j);
          own.values(a);
#pragma unroll
          for (int i = 0; i < 4; i++) cut_fragment(a[i], p.w.k - (b + j) * kBlock - i * 16);
          multiply(y, a);
        }
      }
      x_at += S::kBlocks * kRowBytes;
    }
    // The row's two values are of the first of four lanes, columns lane / 4 and eight further; gates and what they gate
    // are side by side.
    const bool has_values = lane % 4 == 0;
    if (k.count == 1) {
      if (tile >= tiles || !has_values) continue;
      if (p.gated) {
        if (const int column = tile * 8 + lane / 4; column < p.y.width) finish_gated(p, 0, column, d[0], d[2]);
      } else {
        const float two[2] = {d[0], d[2]};
        finish<2>(p, 1, p.w.n, two, [&](int i) { return Place{0, tile * kTileRows + lane / 4 + i * 8}; });
      }
      continue;
    }
    if (has_values) sums[warp * kTileRows + lane / 4] = d[0], sums[warp * kTileRows + lane / 4 + 8] = d[2];
    __syncthreads();
    const auto total = [&](const Value& v, int place) {
      const float* at = sums + v.beside * k.count * kTileRows + place;
      float all[kMostCodePieces];
#pragma unroll
      for (int i = 0; i < kMostCodePieces; i++)
        if (i < k.count) all[i] = at[i * kTileRows];
#pragma unroll
      for (int i = 1; i < kMostCodePieces; i++)
        if (i < k.count) all[0] = __fadd_rn(all[0], all[i]);
      return all[0];
    };
    if (const Value v = value_at(threadIdx.x, first); v.there) {
      if (p.gated) {
        finish_gated(p, 0, v.column, total(v, v.place), total(v, v.place + 8));
      } else {
        float sum = total(v, v.place);
        if (p.bias) sum = __fadd_rn(sum, before.bias);
        if (p.adds) sum = added_to(before.value, sum);
        put(p.y, 0, v.column, sum);
      }
    }
    __syncthreads();
  }
}

// How blocks of threads share a product, if they can: so that none has more tiles than it must, and the row is read
// by as few of them as can be.
struct Plan {
  int together = 0, warps, stages = 0;  // stages: 0 if the row is too long for a processor's shared memory

  template <int kBits, bool kFine>
  static size_t shared(int stages, int warps, int k_blocks) {
    return stages == 4 ? Shape<kBits, kFine, 4>::shared(warps, k_blocks)
                       : Shape<kBits, kFine, 3>::shared(warps, k_blocks);
  }
  explicit Plan(const Product& p) {
    const Pieces k(p.w.k, p.w.most_pieces);
    const int tiles = ceil_div(p.w.n, kTileRows), processors = cuda::processors();
    const auto tiles_of_one = [&](int together) {  // that a processor has
      return ceil_div(ceil_div(tiles, together), processors) * together;
    };
    for (int some = 1; some * k.count <= kMostWarps; some++)
      if (!together || tiles_of_one(some) <= tiles_of_one(together)) together = some;
    warps = together * k.count;
    const auto bytes = p.w.codes.bits == 4  ? is_fine(p.w.codes) ? shared<4, true> : shared<4, false>
                        : is_fine(p.w.codes) ? shared<8, true>
                                            : shared<8, false>;
    for (int depth : {4, 3})
      if (!stages && bytes(depth, warps, k.blocks) <= (size_t)most_shared()) stages = depth;
  }
};

template <int kBits, bool kFine, int kStages>
void start_row(const Product& p, const Plan& plan, const Queue& queue) {
  using S = Shape<kBits, kFine, kStages>;
  const Pieces k(p.w.k, p.w.most_pieces);
  const size_t shared = S::shared(plan.warps, k.blocks);
  const Codes& codes = p.w.codes;
  const int tiles = ceil_div(p.w.n, kTileRows), groups = ceil_div(tiles, plan.together);
  const int each = kFine ? kBlock / codes.group : 1;
  const Divisor set_blocks(codes.groups == 1 ? std::max(k.blocks, 1) : std::max(codes.group / kBlock, 1));
  allow_shared(row_kernel<S>, shared);
  int at_once = 0;
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&at_once, row_kernel<S>, 32 * plan.warps, shared);
  // As many turns for every block of threads, if there are several.
  const int most = processors() * std::max(at_once, 1), turns = (groups + most - 1) / most;
  start(queue, row_kernel<S>, dim3((groups + turns - 1) / turns), 32 * plan.warps, shared, p, tiles, plan.together, k,
        set_blocks, each);
  launched("linear with quantized weights, one row");
}

template <int kBits, bool kFine>
void start_stages(const Product& p, const Plan& plan, const Queue& queue) {
  if (plan.stages == 4) start_row<kBits, kFine, 4>(p, plan, queue);
  else start_row<kBits, kFine, 3>(p, plan, queue);
}

}  // namespace

bool linear_quantized_row(const Product& p, const Queue& queue) {
  const Plan plan(p);
  if (!plan.stages) return false;
  const bool fine = is_fine(p.w.codes);
  if (p.w.codes.bits == 4) fine ? start_stages<4, true>(p, plan, queue) : start_stages<4, false>(p, plan, queue);
  else fine ? start_stages<8, true>(p, plan, queue) : start_stages<8, false>(p, plan, queue);
  return true;
}

bool linear_quantized_norms(const Product& p, int rows, const Queue& queue) {
  if (queue.capability != 90 || rows != 1 || p.w.kind != Kind::codes) return false;
  const Plan plan(p);
  const int eights = blocks_of(p.w.k) * 8;
  return plan.stages && eights <= kMostNormed && eights <= kNormed * 32 * plan.warps;
}

}  // namespace cuda
}  // namespace as
