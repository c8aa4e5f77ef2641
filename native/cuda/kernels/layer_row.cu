// All of a layer between two attentions for a step of one row, with experts in bfloat16, in one launch: there latencies
// are what counts, and hardly any weights can be on their way before it is known which experts these are of.
//
// Blocks of threads are all there at once, and each warp streams its part of the weights through a ring in shared
// memory, on and on from one product to the next: what attention leaves is multiplied and added to the row; the row is
// normed, and its experts' logits are made; every warp chooses the experts; gates are multiplied, and what that leaves
// with the experts' other matrices, and summed up; the row is normed again, and multiplied for the next attention.
// Between these blocks meet: one more warp tells that its block has come, and waits for all others (who asks for copies
// would wait for those, too, if it fenced), while the next weights arrive. Bits are those of the kernels for many rows.
#include <algorithm>
#include <cstdlib>

#include "cuda/kernels/copy_ring.cuh"
#include "cuda/kernels/linear_experts.cuh"
#include "cuda/kernels/linear_few.cuh"
#include "cuda/kernels/row_choice.cuh"
#include "cuda/kernels/wgmma.cuh"

namespace as {
namespace cuda {
namespace {

constexpr int kWarps = 8, kWorkers = 32 * kWarps, kThreads = 2 * kWorkers + 32;
constexpr int kHalf = 8, kHalfBytes = kHalf * kRowBytes;  // columns that lie together, and a block of K of them
constexpr int kStageBytes = 2 * kHalfBytes, kMostStages = 12;
constexpr int kEight = 8, kNormTurns = 2, kMostNormed = kNormTurns * kWorkers * kEight;
constexpr int kMostHalves = 8;  // of a product beside the experts', of a block of threads
constexpr int kMostLogits = 2;  // of a block of threads

struct Layer {
  RowLayer l;
  Pieces before_k, next_k;
  int before_halves, next_halves;  // of a block of threads
  int up_tiles, down_tiles;        // of 16 columns
  int each, at_once;  // warps that share the experts of a tile of the second product, and such tiles of a block
  int logits;         // of a block of threads
  int stages, row_bytes, near, turns;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// 16 columns, or 8, and a piece of K, of the blocks' own columns of a product beside the experts'.
struct Dense {
  int half, there, first, blocks;
};
__device__ Dense dense_at(const Pieces& k, int halves, int item) {
  const int tile = item / k.count, piece = item - tile * k.count, first = piece * k.length;
  return {(int)blockIdx.x * halves + 2 * tile, min(halves - 2 * tile, 2), first, min(k.length, k.blocks - first)};
}
// Of a warp, which has every so many.
__device__ int dense_items(const Pieces& k, int halves, int warp) {
  return max((halves + 1) / 2 * k.count - warp + kWarps - 1, 0) / kWarps;
}

// 16 columns of the weights of one of the chosen experts.
struct Item {
  int entry, tile;
};
// What a warp has of the experts' products: gates, every so many of all warps' items; then, of tiles of the block of
// threads, some of the experts.
struct Items {
  int gates, first_gate, gate_step, up_tiles;
  int sums, entry, each, per, first_tile, tile_step;

  __device__ Items(const Layer& layer, int count, int warp) : up_tiles(layer.up_tiles), each(layer.each) {
    const int own = warp / each;
    if (layer.near) {  // a block has adjacent tiles
      first_gate = warp < layer.turns ? blockIdx.x * layer.turns + warp : 1 << 30;
      gate_step = gridDim.x * layer.turns;
      gates = first_gate < count * up_tiles ? (count * up_tiles - first_gate + gate_step - 1) / gate_step : 0;
    } else {
      first_gate = warp * gridDim.x + blockIdx.x, gate_step = gridDim.x * kWarps;
      gates = max(count * up_tiles - first_gate + gate_step - 1, 0) / gate_step;
    }
    entry = warp % each, per = own < layer.at_once ? max(count - entry + each - 1, 0) / each : 0;
    first_tile = blockIdx.x * layer.at_once + own, tile_step = gridDim.x * layer.at_once;
    sums = max(layer.down_tiles - first_tile + tile_step - 1, 0) / tile_step * per;
  }
  __device__ Item gate(int i) const {
    const int number = first_gate + i * gate_step;
    return {number / up_tiles, number % up_tiles};
  }
  __device__ Item sum(int i) const { return {entry + i % per * each, first_tile + i / per * tile_step}; }
};

// A worker's ring of stages.
struct Ring {
  uint32_t memory, full, empty;
  int stages, stage = 0, parity = 0;

  __device__ Ring(char* memory, uint64_t (*barriers)[kMostStages], int warp, int stages)
      : memory(shared_address(memory) + warp * stages * kStageBytes),
        full(shared_address(barriers[warp])),
        empty(shared_address(barriers[kWarps + warp])),
        stages(stages) {}
  __device__ void advance() {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
  __device__ uint32_t at() const { return memory + stage * kStageBytes; }

  // By the worker: row, in bfloat16, times the columns of the next so many blocks, of which a lane that is a multiple
  // of four has lane / 4, and 8 + lane / 4 in number 2. What is multiplied next is read before.
  __device__ void multiply(float (&d)[4], const char* row, int blocks) {
#pragma unroll
    for (int i = 0; i < 4; i++) d[i] = 0;
    Operands now, then;
    now.read(*this, row);
    for (int b = 1; b < blocks; b += 2) {
      then.read(*this, row + b * kRowBytes);
      now.multiply(d);
      if (b + 1 < blocks) now.read(*this, row + (b + 1) * kRowBytes);
      then.multiply(d);
    }
    if (blocks % 2) now.multiply(d);
  }
  // By the warp that asks for its weights: blocks from these two places on, of 8 columns each, or of those of the
  // first alone.
  __device__ void fetch(const char* low, const char* high, int blocks) {
    const bool together = high == low + kHalfBytes, both = high != low;
    for (int b = 0; b < blocks; b++, advance(), low += kBlockBytes, high += kBlockBytes) {
      wait_barrier(empty + 8 * stage, parity ^ 1);
      if (elected()) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(full + 8 * stage),
                     "r"(both ? kStageBytes : kHalfBytes)
                     : "memory");
        copy(at(), low, together ? kStageBytes : kHalfBytes);
        if (both && !together) copy(at() + kHalfBytes, high, kHalfBytes);
      }
      __syncwarp();
    }
  }

 private:
  struct Operands {
    uint32_t a[4][4], y[8];

    __device__ void read(Ring& ring, const char* row) {
      const int lane = threadIdx.x % 32;
      const uint32_t* values = reinterpret_cast<const uint32_t*>(row) + lane;  // of the first four lanes
#pragma unroll
      for (int i = 0; i < 8; i++) y[i] = lane < 4 ? values[i * 4] : 0;
      wait_barrier(ring.full + 8 * ring.stage, ring.parity);
#pragma unroll
      for (int step = 0; step < 4; step++)
        load_cores(a[step], ring.at() + piece_offset(lane % 16, 2 * step + lane / 16));
      __syncwarp();
      if (lane == 0) arrive(ring.empty + 8 * ring.stage);
      ring.advance();
    }
    __device__ void multiply(float (&d)[4]) const {
#pragma unroll
      for (int step = 0; step < 4; step++) multiply_add(d, a[step], y[2 * step], y[2 * step + 1]);
    }
  };

  __device__ void copy(uint32_t to, const char* from, int bytes) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(full + 8 * stage)
                 : "memory");
  }
};

__device__ void fetch_dense(Ring& ring, const Product& p, const Pieces& k, int halves, int warp) {
  const int last = blocks_of(p.w.n) * (kBlock / kHalf) - 1;
  for (int i = 0; i < dense_items(k, halves, warp); i++) {
    const Dense own = dense_at(k, halves, warp + i * kWarps);
    const auto at = [&](int half) {
      half = min(half, last);
      return reinterpret_cast<const char*>(p.w.tiles) +
             ((size_t)(half / (kBlock / kHalf)) * k.blocks + own.first) * kBlockBytes +
             half % (kBlock / kHalf) * kHalfBytes;
    };
    const char* low = at(own.half);
    ring.fetch(low, own.there > 1 ? at(own.half + 1) : low, own.blocks);
  }
}
__device__ void fetch_expert(Ring& ring, const Matrix& w, int expert, int tile) {
  const int blocks = blocks_of(w.k);
  const char* from = reinterpret_cast<const char*>(w.tiles) +
                     ((size_t)expert * blocks_of(w.n) + tile / 4) * blocks * kBlockBytes + tile % 4 * kStageBytes;
  ring.fetch(from, from + kHalfBytes, blocks);
}

__device__ inline void workers_meet() { asm volatile("bar.sync 1, %0;" ::"n"(kWorkers) : "memory"); }

// Of one warp, which its block's workers tell that they have come: other blocks are told, and when all have come, so
// are all warps. arrived: blocks that have come; and those that need no longer know, of which the last leaves zeros.
struct Meeting {
  int* arrived;
  uint32_t come, open;
  int times = 0;

  __device__ void meet() {
    wait_barrier(come, times++ % 2);
    if (threadIdx.x % 32 == 0) {
      __threadfence();
      atomicAdd(&arrived[0], 1);
      int count;
      do {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(count) : "l"(arrived) : "memory");
      } while (count < times * (int)gridDim.x);
      arrive(open);
    }
    __syncwarp();
  }
  __device__ void leave() {
    if (threadIdx.x % 32 || atomicAdd(&arrived[1], 1) != (int)gridDim.x - 1) return;
    arrived[0] = 0, arrived[1] = 0;
  }
};

// Of a row that other blocks of this kernel have written.
__device__ inline void read_eight_now(const float* row, int column, int width, float (&values)[8]) {
#pragma unroll
  for (int j = 0; j < 8; j += 4) {
    const float4 v = column + j + 4 <= width ? __ldcg(reinterpret_cast<const float4*>(row + column + j))
                                             : make_float4(0, 0, 0, 0);  // the width is a multiple of four
    values[j] = v.x, values[j + 1] = v.y, values[j + 2] = v.z, values[j + 3] = v.w;
  }
}

// The row normed, as rms_norm() has it: in bfloat16, and, unless null, as it is. Of a thread number i is of columns
// from eights_at(i) on.
__device__ inline int eights_at(int i) { return (i * kWorkers + (int)threadIdx.x) * kEight; }
__device__ void norm_row(const float* x, const Norm& norm, const float (&scales)[kNormTurns][kEight], int width,
                         const Rows& normed, char* row, float* wide, float* squares) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float kept[kNormTurns][kEight];
#pragma unroll
  for (int i = 0; i < kNormTurns; i++) read_eight_now(x, eights_at(i), width, kept[i]);
#pragma unroll
  for (int i = 0; i < kNormTurns; i++) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < kEight; j++) sum = fmaf(kept[i][j], kept[i][j], sum);
    sum = warp_sum(sum);
    if (lane == 0) squares[i * kWarps + warp] = sum;
  }
  workers_meet();
  float total = 0;
#pragma unroll
  for (int i = 0; i < kNormTurns * kWarps; i++) total += squares[i];
  const float factor = 1.0f / sqrtf(total / width + norm.eps), one = norm.unit_offset ? 1.0f : 0.0f;
#pragma unroll
  for (int i = 0; i < kNormTurns; i++) {
    const int column = eights_at(i);
    if (column >= blocks_of(width) * kBlock) continue;
#pragma unroll
    for (int j = 0; j < kEight; j++) kept[i][j] = column + j < width ? kept[i][j] * factor * (scales[i][j] + one) : 0;
    *reinterpret_cast<uint4*>(row + column * 2) =
        make_uint4(two_bf16(kept[i][0], kept[i][1]), two_bf16(kept[i][2], kept[i][3]), two_bf16(kept[i][4], kept[i][5]),
                   two_bf16(kept[i][6], kept[i][7]));
    if (wide) put_eight({wide, nullptr, width}, 0, column, width, kept[i]);
    if (blockIdx.x == 0) put_eight(normed, 0, column, width, kept[i]);  // others may want it
  }
  workers_meet();
}
#endif

__global__ void __launch_bounds__(kThreads, 1) layer_row_kernel(const __grid_constant__ Layer layer) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(128) char shared[];
  __shared__ Chosen chosen_by[kWarps], all_chosen;
  __shared__ float made[(kMostTop > 2 * kMostHalves ? kMostTop : 2 * kMostHalves) * kTileRows];
  __shared__ float squares[kNormTurns * kWarps];
  __shared__ uint64_t barriers[5], rings[2 * kWarps][kMostStages];
  const RowLayer& l = layer.l;
  const uint32_t come = shared_address(&barriers[0]), open = shared_address(&barriers[1]),
                 known = shared_address(&barriers[2]), picked = shared_address(&barriers[3]),
                 listed = shared_address(&barriers[4]);
  const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0), width = l.logits.w.k;
  char *row = shared + kWarps * layer.stages * kStageBytes, *others = row + layer.row_bytes;
  float *wide = reinterpret_cast<float*>(others), *router = wide + padded_columns(width);
  const bool has_before = l.before.w.n > 0, has_next = l.next.w.n > 0;
  if (threadIdx.x == 0)
    init_barrier(come, kWorkers), init_barrier(open, 1), init_barrier(known, 1), init_barrier(picked, kWarps),
        init_barrier(listed, 1);
  for (int i = threadIdx.x; i < 2 * kWarps * kMostStages; i += kThreads)
    init_barrier(shared_address(&rings[0][0]) + 8 * i, 1);
  barriers_are_there();
  __syncthreads();
  const Routing& routing = l.up.routing;
  if (warp == 2 * kWarps) {
    Meeting meeting{routing.arrived, come, open};
    await_previous();
    if (has_before) meeting.meet();
    meeting.meet();
    if (lane == 0) arrive(known);
    choose_alone(l.row, routing, wide, reinterpret_cast<uint32_t*>(wide) + l.row.router.experts, all_chosen);
    if (lane == 0) arrive(listed);
    if (blockIdx.x == 0) {  // for who wants to know
      if (lane < all_chosen.count) routing.tiles[lane] = {all_chosen.experts[lane], lane, 1};
      if (lane == 0) *routing.tile_count = all_chosen.count;
    }
    meeting.meet();
    if (has_next) meeting.meet();
    return meeting.leave();
  }
  Ring ring(shared, rings, warp % kWarps, layer.stages);
  if (warp >= kWarps) {
    const int worker = warp - kWarps;
    if (has_before) fetch_dense(ring, l.before, layer.before_k, layer.before_halves, worker);
    await_previous();  // of itself, before it reads what others have made
    wait_barrier(known, 0);
    Chosen& chosen = chosen_by[worker];
    if (!has_quick_choice(l.row.router) || !choose_quickly(l.row, routing, chosen)) {
      wait_barrier(listed, 0);
      if (lane < all_chosen.count) chosen.experts[lane] = all_chosen.experts[lane];
      if (lane == 0) chosen.count = all_chosen.count;
      __syncwarp();
    }
    if (lane == 0) arrive(picked);
    const Items items(layer, chosen.count, worker);
    for (int i = 0; i < items.gates; i++) {
      const Item item = items.gate(i);
      fetch_expert(ring, l.up.product.w, chosen.experts[item.entry], item.tile);
    }
    for (int i = 0; i < items.sums; i++) {
      const Item item = items.sum(i);
      fetch_expert(ring, l.down.product.w, chosen.experts[item.entry], item.tile);
    }
    if (has_next) fetch_dense(ring, l.next, layer.next_k, layer.next_halves, worker);
    if (worker == 0) let_next_begin();  // sooner what that asks for would only delay these
    return;
  }

  int met = 0;
  const auto meet = [&] {
    arrive(come);
    wait_barrier(open, met++ % 2);
  };
  for (int i = threadIdx.x * kLaneColumns; i < layer.logits * padded_columns(width); i += kWorkers * kLaneColumns) {
    const int expert = blockIdx.x * layer.logits + i / padded_columns(width), column = i % padded_columns(width);
    *reinterpret_cast<float4*>(router + i) =
        expert < l.logits.w.n && column < width
            ? *reinterpret_cast<const float4*>(l.logits.w.values + (size_t)expert * width + column)
            : make_float4(0, 0, 0, 0);
  }
  float scales[kNormTurns][kEight];
#pragma unroll
  for (int i = 0; i < kNormTurns; i++) read_eight(l.norm.weight, eights_at(i), width, scales[i]);
  float* x = l.y.values;
  float d[4];
  // A product beside the experts': of columns from the block's first on all pieces are added up in ascending order.
  const auto multiply = [&](const Product& p, const Pieces& k, int halves) {
    const int column = blockIdx.x * halves * kHalf + threadIdx.x;
    const bool ends = threadIdx.x < halves * kHalf && column < p.w.n;
    const float bias = ends && p.bias ? p.bias[column] : 0, old = ends && p.adds ? __ldcg(p.y.values + column) : 0;
    for (int i = 0; i < dense_items(k, halves, warp); i++) {
      const int item = warp + i * kWarps;
      const Dense own = dense_at(k, halves, item);
      ring.multiply(d, row + own.first * kRowBytes, own.blocks);
      if (lane % 4 == 0) made[item * kTileRows + lane / 4] = d[0], made[item * kTileRows + kHalf + lane / 4] = d[2];
    }
    workers_meet();
    if (!ends) return;
    const float* pieces = made + threadIdx.x / kTileRows * k.count * kTileRows + threadIdx.x % kTileRows;
    float total = pieces[0];
    for (int i = 1; i < k.count; i++) total = __fadd_rn(total, pieces[i * kTileRows]);
    if (p.bias) total = __fadd_rn(total, bias);
    if (p.adds) total = __fadd_rn(old, total);
    put(p.y, 0, column, total);
  };

  await_previous();
  if (has_before) {
#pragma unroll 4
    for (int i = threadIdx.x; i < layer.before_k.blocks * 8; i += kWorkers)
      *reinterpret_cast<uint4*>(row + i * 16) = __ldcg(reinterpret_cast<const uint4*>(
          reinterpret_cast<const char*>(l.before.x.tiles) + (size_t)(i / 8) * kBlockBytes + i % 8 * 16));
    workers_meet();
    multiply(l.before, layer.before_k, layer.before_halves);
    meet();
  }
  norm_row(x, l.norm, scales, width, l.normed, row, wide, squares);
  if (const int expert = blockIdx.x * layer.logits + warp; warp < layer.logits && expert < l.logits.w.n) {
    float dot[1][1];
    multiply_rows<1, 1, true>(wide, 1, router + warp * padded_columns(width), width, dot);
    if (lane == 0) l.logits.y.values[expert] = l.logits.bias ? __fadd_rn(dot[0][0], l.logits.bias[expert]) : dot[0][0];
  }
  meet();

  const Product &up = l.up.product, &down = l.down.product;
  wait_barrier(picked, 0);
  const Chosen& chosen = chosen_by[warp];
  const Items items(layer, chosen.count, warp);
  for (int i = 0; i < items.gates; i++) {
    ring.multiply(d, row, blocks_of(up.w.k));
    const Item item = items.gate(i);
    const int column = item.tile * kHalf + lane / 4;
    if (lane % 4 || column >= up.y.width) continue;
    const float* bias = bias_of(l.up, chosen.experts[item.entry]);
    const float gate = bias ? __fadd_rn(d[0], bias[column]) : d[0],
                value = bias ? __fadd_rn(d[2], bias[up.y.width + column]) : d[2];
    put(up.y, item.entry, column, gated_by(l.up.gating, gate, value));
  }
  meet();

  const int inner = blocks_of(down.w.k);
#pragma unroll 4
  for (int i = threadIdx.x; i < chosen.count * inner * 8; i += kWorkers) {
    const int entry = i / (inner * 8), b = i / 8 % inner;
    *reinterpret_cast<uint4*>(others + i * 16) = __ldcg(reinterpret_cast<const uint4*>(
        reinterpret_cast<const char*>(down.x.tiles) + (size_t)b * kBlockBytes + piece_offset(entry, i % 8)));
  }
  workers_meet();
  const int own = warp / layer.each, tile_step = gridDim.x * layer.at_once;
  for (int begin = blockIdx.x * layer.at_once; begin < layer.down_tiles; begin += tile_step) {
    // Of a thread, which adds up a column: what that is added to.
    const int tile = begin + threadIdx.x / kTileRows, column = tile * kTileRows + threadIdx.x % kTileRows;
    const bool adds_up = threadIdx.x < layer.at_once * kTileRows && column < l.y.width;
    const float old = adds_up && l.adds ? __ldcg(x + column) : 0;
    for (int i = 0; i < items.per && begin + own < layer.down_tiles; i++) {
      const int entry = items.entry + i * layer.each;
      ring.multiply(d, others + entry * inner * kRowBytes, inner);
      float* to = made + (own * routing.top + entry) * kTileRows + lane / 4;
      if (lane % 4 == 0) to[0] = d[0], to[kHalf] = d[2];
    }
    workers_meet();
    if (adds_up) {
      const float* values = made + (threadIdx.x / kTileRows * routing.top) * kTileRows + threadIdx.x % kTileRows;
      float sum = 0;
      for (int i = 0; i < chosen.count; i++) {
        const float* bias = bias_of(l.down, chosen.experts[i]);
        const float value = bias ? __fadd_rn(values[i * kTileRows], bias[column]) : values[i * kTileRows];
        sum = fmaf(value, all_chosen.shares[i], sum);  // there since the last meeting
      }
      put(l.y, 0, column, l.adds ? __fadd_rn(old, sum) : sum);
    }
    workers_meet();
  }
  if (!has_next) return;
#pragma unroll
  for (int i = 0; i < kNormTurns; i++) read_eight(l.next_norm.weight, eights_at(i), width, scales[i]);
  meet();
  norm_row(x, l.next_norm, scales, width, l.next_normed, row, nullptr, squares);
  multiply(l.next, layer.next_k, layer.next_halves);
#endif
}

// How many columns of eight of a product beside the experts' a block of threads has.
int halves_of(const Matrix& w, int grid) { return w.n ? ceil_div(ceil_div(w.n, kHalf), grid) : 0; }

struct Plan {
  Layer layer;
  int grid = 0;
  size_t shared = 0;
};

// No stages: this cannot be.
Plan plan_of(const RowLayer& l) {
  const Matrix &up = l.up.product.w, &down = l.down.product.w;
  const int top = l.up.routing.top, most = processors(), width = l.logits.w.k;
  const auto pieces_of = [](const Matrix& w) { return Pieces(std::max(w.k, 1), w.most_pieces); };
  Plan plan{{l, pieces_of(l.before.w), pieces_of(l.next.w), 0, 0, ceil_div(up.n, kTileRows),
             ceil_div(down.n, kTileRows), std::min(top, kWarps), 0, 0, 0, 0, 0, 0}};
  Layer& layer = plan.layer;
  const auto is_bf16 = [](const Matrix& w) { return w.kind == Kind::bf16; };
  if (!is_bf16(up) || !is_bf16(down) || (l.before.w.n && !is_bf16(l.before.w)) || (l.next.w.n && !is_bf16(l.next.w)))
    return plan;
  layer.at_once = std::min(kWarps / layer.each, ceil_div(layer.down_tiles, most));
  // As many gates for all that have some.
  const int all = layer.up_tiles * top, turns = std::max(std::min(ceil_div(all, most), kWarps), 1);
  plan.grid = std::min(std::max(ceil_div(all, turns), ceil_div(layer.down_tiles, layer.at_once)), most);
  layer.near = !std::getenv("FAR"), layer.turns = turns;
  layer.logits = ceil_div(l.logits.w.n, plan.grid);
  layer.before_halves = halves_of(l.before.w, plan.grid), layer.next_halves = halves_of(l.next.w, plan.grid);
  if (width > kMostNormed || width % 4 || layer.logits > kMostLogits || top > kBlock ||
      std::max(layer.before_halves, layer.next_halves) > kMostHalves)
    return plan;
  layer.row_bytes = std::max(blocks_of(width), blocks_of(l.before.w.k)) * kRowBytes;
  const size_t others =
      std::max({(1 + layer.logits) * padded_columns(width) * sizeof(float), (size_t)top * blocks_of(down.k) * kRowBytes,
                2 * sizeof(float) * l.row.router.experts});
  for (int stages : {kMostStages, 8, 4}) {
    const size_t shared = (size_t)kWarps * stages * kStageBytes + layer.row_bytes + others;
    if (shared + (9 << 10) > (size_t)most_shared()) continue;
    layer.stages = std::getenv("STAGES") ? std::atoi(std::getenv("STAGES")) : stages, plan.shared = shared;
    break;
  }
  return plan;
}

}  // namespace

bool has_row_layer(const RowLayer& l, const Queue& queue) {
  return queue.capability == 90 && std::getenv("ROW_LAYER") && plan_of(l).layer.stages;
}

void layer_of_row(const RowLayer& l, const Queue& queue) {
  const Plan plan = plan_of(l);
  allow_shared(layer_row_kernel, plan.shared);
  start(queue, layer_row_kernel, plan.grid, kThreads, plan.shared, plan.layer);
  launched("layer of a row");
}

}  // namespace cuda
}  // namespace as
