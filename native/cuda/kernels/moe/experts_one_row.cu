// An expert layer for a step of one row, which is bound by latency. Each of its three launches prefetches its weights
// while the previous one runs, and none waits for lists that another one writes.
//
// In the first launch every CTA normalizes the row itself and computes the logit of one expert. In the two GEMM
// launches every CTA chooses the row's experts itself. Each warp computes 16 columns (rows of the weights) of an expert
// at a time, as one chain over K, and copies its weights to shared memory several stages ahead. CTAs of both fit on an
// SM together, so the second one's weights stream while the first one ends. A CTA of the second adds all experts of its
// columns.
#include <algorithm>

#include "cuda/kernels/gemm/gemm_small_n.cuh"
#include "cuda/kernels/moe/one_row.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace {

constexpr int kNormThreads = 512, kEight = 8;
constexpr int kWarps = 8;

// The logits of a row that is normalized first, with the same bits as rms_norm() and gemm_small_n().
template <bool kWhole>
__global__ void __launch_bounds__(kNormThreads)
    norm_and_logits_kernel(const float* x, Norm norm, Rows normed, const __grid_constant__ GemmArgs logits) {
  extern __shared__ __align__(128) char shared[];
  float *weights = reinterpret_cast<float*>(shared), *row = weights + padded_columns(logits.w.k);
  const int width = logits.w.k, first = kEight * threadIdx.x, expert = blockIdx.x;
  let_next_begin();
  bring_rows<kWhole>(logits.w, expert, 1, weights);
  float scales[kEight], kept[kEight], sum = 0;
  read_eight(norm.weight, first, width, scales);
  await_previous();
  read_eight(x, first, width, kept);
#pragma unroll
  for (int j = 0; j < kEight; j++) sum = fmaf(kept[j], kept[j], sum);
  const float factor = 1.0f / sqrtf(block_sum<kNormThreads>(sum, kNormThreads) / width + norm.eps);
  const float one = norm.unit_offset ? 1.0f : 0.0f;
#pragma unroll
  for (int j = 0; j < kEight; j++) kept[j] = kept[j] * factor * (scales[j] + one);
  if (expert == 0) put_eight(normed, 0, first, width, kept);
  put_eight({row, nullptr, width}, 0, first, width, kept);
  __syncthreads();
  if (threadIdx.x >= 32) return;
  float dot[1][1];
  multiply_rows<1, 1, kWhole>(row, 1, weights, width, dot);
  if (threadIdx.x == 0) logits.y.values[expert] = logits.bias ? __fadd_rn(dot[0][0], logits.bias[expert]) : dot[0][0];
}

// Bytes of a stage: a block of K of 16 columns and of the row.
template <typename S>
constexpr int kStageBytes = S::kBytes + kRowBytes;

// A warp's items; their weights and rows are prefetched several stages ahead.
template <typename S, int kStages, typename ItemAt>
class Stream {
 public:
  __device__ Stream(const ExpertGemmArgs& e, const Chosen& chosen, size_t expert_bytes, char* ring, int items,
                    ItemAt item_at)
      : e_(e),
        chosen_(chosen),
        expert_bytes_(expert_bytes),
        blocks_(blocks_of(e.gemm.w.k)),
        ring_(ring + threadIdx.x / 32 * kStages * kBytes),
        items_(items),
        item_at_(item_at) {
    if (items_ > 0) begin_item();
  }
  // Prefetches the first weights before the rows are known.
  __device__ void begin_weights() {
    if (items_ <= 0) return;
    for (; there_ < min(kStages - 1, blocks_); there_++) fetch_weights(there_, there_);
  }
  __device__ void begin() {
#pragma unroll 1  // the code is fetched anew at each launch, which takes longer than the loop
    for (int i = 0; i < kStages - 1; i++) fetch(i);
  }
  // Computes the next item; in every fourth lane d[0] and d[2] are the sums of columns lane / 4 and lane / 4 + 8.
  __device__ void multiply(float (&d)[4]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4; i++) d[i] = 0;
    for (int b = 0; b < blocks_; b++) {
      wait_copies<kStages - 2>();
      __syncwarp();
      fetch(stage_ == 0 ? kStages - 1 : stage_ - 1);  // the stage that was consumed last
      const char* stage = ring_ + stage_ * kBytes;
      Fragments<S> weights(stage, e_.gemm.w.k - b * kBlock);
      const uint32_t* row =
          reinterpret_cast<const uint32_t*>(stage + S::kBytes) + lane;  // read by the first four lanes
#pragma unroll
      for (int step = 0; step < 4; step++) {
        uint32_t a[4];
        weights.load(0, step, a);
        multiply_add(d, a, lane < 4 ? row[step * 8] : 0, lane < 4 ? row[step * 8 + 4] : 0);
      }
      stage_ = stage_ + 1 == kStages ? 0 : stage_ + 1;
    }
  }

 private:
  static constexpr int kBytes = kStageBytes<S>;

  __device__ void begin_item() {
    const Item item = item_at_(item_);
    const Matrix& w = e_.gemm.w;
    const int expert = chosen_.experts[item.entry], lane = threadIdx.x % 32, row = e_.gathers ? 0 : item.entry;
    weights_ = reinterpret_cast<const char*>(S::kBits == 16 ? static_cast<const void*>(w.tiles) : w.quants.words) +
               expert * expert_bytes_ + (size_t)(item.tile / 4) * blocks_ * S::kBlockBytes +
               item.tile % 4 * S::kTileBytes;
    if constexpr (S::kSets)
      scales_ = w.quants.scales + expert * expert_bytes_ / 4 + (size_t)(item.tile / 4) * w.quants.groups * kScaleWords +
                item.tile % 4 * kTileRows;
    row_ = reinterpret_cast<const char*>(e_.gemm.x.tiles) + chunk_offset(row, lane % 8);
  }
  __device__ void fetch_weights(int stage, int block) {
    const uint32_t to = shared_address(ring_ + stage * kBytes);
    copy_by_warp<S::kTileBytes>(to, weights_ + (size_t)block * S::kBlockBytes);
    if constexpr (S::kSets) {
      const int lane = threadIdx.x % 32;
      const Matrix& w = e_.gemm.w;
      const int group = min(block * kBlock + (S::kFine ? lane / 4 * 16 : 0), w.k - 1) / w.quants.group;
      if (lane < S::kSets * 4)
        copy_16(to + S::kWeights + lane * 16, scales_ + (size_t)group * kScaleWords + lane % 4 * 4);
    }
  }
  __device__ void fetch(int stage) {
    if (item_ < items_) {
      const int lane = threadIdx.x % 32;
      if (item_ || block_ >= there_) fetch_weights(stage, block_);
      if (lane < 8)
        copy_16(shared_address(ring_ + stage * kBytes + S::kBytes) + lane * 16, row_ + (size_t)block_ * kBlockBytes);
      if (++block_ == blocks_) {
        block_ = 0;
        if (++item_ < items_) begin_item();
      }
    }
    commit_copies();
  }

  const ExpertGemmArgs& e_;
  const Chosen& chosen_;
  const size_t expert_bytes_;
  const int blocks_;
  char* const ring_;
  const int items_;
  const ItemAt item_at_;
  // The next copies' item and block of K; and the blocks of the first item that begin_weights() has prefetched.
  int item_ = 0, block_ = 0, there_ = 0;
  const char *weights_ = nullptr, *row_ = nullptr;
  const uint32_t* scales_ = nullptr;
  int stage_ = 0;  // the next stage to consume
};

template <typename S, int kStages, int kGateWarps>
__global__ void __launch_bounds__(32 * kGateWarps)
    gate_row_kernel(const __grid_constant__ ExpertGemmArgs e, const __grid_constant__ ChosenRow row, int tiles,
                    size_t expert_bytes) {
  extern __shared__ __align__(128) char shared[];
  __shared__ Chosen chosen;
  const GemmArgs& p = e.gemm;
  const bool there = is_there(row);
  await_previous();
  let_next_begin();  // it finds the logits, too, and chooses its experts while these weights stream
  choose(row, there, e.routing, reinterpret_cast<float*>(shared), chosen);
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * gridDim.x + blockIdx.x, step = gridDim.x * kGateWarps,
            items = max(chosen.count * tiles - first + step - 1, 0) / step;
  const auto item_at = [=](int i) { return Item{(first + i * step) / tiles, (first + i * step) % tiles}; };
  Stream<S, kStages, decltype(item_at)> stream(e, chosen, expert_bytes, shared, items, item_at);
  stream.begin();
  if (blockIdx.x == 0 && threadIdx.x < 32) weigh(row, e.routing, chosen), list_chosen(e.routing, chosen);
  for (int i = 0; i < items; i++) {
    float d[4];
    stream.multiply(d);
    const Item item = item_at(i);
    const int column = item.tile * (kTileRows / 2) + lane / 4;
    if (lane % 4 || column >= p.y.width) continue;
    const float* bias = bias_of(e, chosen.experts[item.entry]);
    const float gate = bias ? __fadd_rn(d[0], bias[column]) : d[0],
                up = bias ? __fadd_rn(d[2], bias[p.y.width + column]) : d[2];
    put(p.y, item.entry, column, gated_by(e.gating, gate, up));
  }
}

// each: warps that share the experts of a tile of columns. at_once: tiles that a CTA computes at a time.
template <typename S, int kStages>
__global__ void __launch_bounds__(32 * kWarps)
    combine_row_kernel(const __grid_constant__ ExpertGemmArgs e, const __grid_constant__ ChosenRow row,
                       const __grid_constant__ Combination c, int tiles, int each, int at_once, size_t expert_bytes) {
  extern __shared__ __align__(128) char shared[];
  __shared__ Chosen chosen;
  __shared__ float made[(kMaxTop > kWarps ? kMaxTop : kWarps) * kTileRows];  // [tile][entry][column]
  choose(row, is_there(row), e.routing, reinterpret_cast<float*>(shared), chosen);
  if (threadIdx.x < 32) weigh(row, e.routing, chosen);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, top = e.routing.top, own = warp / each,
            entry = warp % each, per = own < at_once ? max(chosen.count - entry + each - 1, 0) / each : 0;
  const int first = blockIdx.x * at_once + own, step = gridDim.x * at_once,
            items = max(tiles - first + step - 1, 0) / step * per;
  const auto item_at = [=](int i) { return Item{entry + i % per * each, first + i / per * step}; };
  Stream<S, kStages, decltype(item_at)> stream(e, chosen, expert_bytes, shared, items, item_at);
  stream.begin_weights();
  await_previous();
  let_next_begin();
  stream.begin();
  for (int begin = blockIdx.x * at_once; begin < tiles; begin += step) {
    // The column that a thread adds, and the value of y that the sum is added to.
    const int tile = begin + threadIdx.x / kTileRows, column = tile * kTileRows + threadIdx.x % kTileRows;
    const bool adds_up = threadIdx.x < at_once * kTileRows && column < c.y.width;
    const float before = adds_up && c.adds ? c.y.values[column] : 0;
    for (int i = 0; i < per && begin + own < tiles; i++) {
      float d[4];
      stream.multiply(d);
      float* to = made + (own * top + entry + i * each) * kTileRows + lane / 4;
      if (lane % 4 == 0) to[0] = d[0], to[8] = d[2];
    }
    __syncthreads();
    if (adds_up) {
      const float* values = made + (threadIdx.x / kTileRows * top) * kTileRows + threadIdx.x % kTileRows;
      float sum = 0;
      for (int i = 0; i < chosen.count; i++) {
        const float* bias = bias_of(e, chosen.experts[i]);
        float value = bias ? __fadd_rn(values[i * kTileRows], bias[column]) : values[i * kTileRows];
        if (e.gemm.y.tiles) value = from_dtype16(to_dtype16(value));
        sum = fmaf(value, chosen.shares[i], sum);
      }
      put(c.y, 0, column, c.adds ? __fadd_rn(before, sum) : sum);
    }
    __syncthreads();
  }
}

template <typename S, int kStages, int kGateWarps>
void start_gates_of(const ExpertGemmArgs& e, const ChosenRow& row, int tiles, const Queue& queue) {
  const auto kernel = gate_row_kernel<S, kStages, kGateWarps>;
  constexpr size_t shared = kGateWarps * kStages * kStageBytes<S>;
  static_assert(shared >= 2 * sizeof(float) * kMaxExperts);
  const int grid = std::min(ceil_div((size_t)tiles * e.routing.top, kGateWarps), sm_count());
  start(queue, kernel, grid, 32 * kGateWarps, shared, e, row, tiles, bytes_of_expert(e.gemm.w));
}

// Few columns have fewer warps, with more stages each, so that all SMs have some.
template <typename S, int kStages>
void start_gates(const ExpertGemmArgs& e, const ChosenRow& row, const Queue& queue) {
  const int tiles = ceil_div(e.gemm.w.n, kTileRows), each = ceil_div(tiles * e.routing.top, sm_count());
  if (each <= 4) start_gates_of<S, 2 * kStages, 4>(e, row, tiles, queue);
  else if (each <= 6) start_gates_of<S, 4 * kStages / 3, 6>(e, row, tiles, queue);
  else start_gates_of<S, kStages, kWarps>(e, row, tiles, queue);
}

template <typename S, int kStages>
void start_sums(const ExpertGemmArgs& e, const ChosenRow& row, const Combination& c, const Queue& queue) {
  const auto kernel = combine_row_kernel<S, kStages>;
  const int tiles = ceil_div(e.gemm.w.n, kTileRows), each = std::min(e.routing.top, kWarps);
  const int at_once = std::min(kWarps / each, ceil_div(tiles, sm_count()));
  constexpr size_t shared = kWarps * kStages * kStageBytes<S>;
  static_assert(shared >= 2 * sizeof(float) * kMaxExperts);
  start(queue, kernel, std::min(ceil_div(tiles, at_once), sm_count()), 32 * kWarps, shared, e, row, c, tiles, each,
        at_once, bytes_of_expert(e.gemm.w));
}

// Stages of a warp with 16-bit weights; both launches fit an SM together. Narrower weights have more stages.
constexpr int kGateStages = 5, kSumStages = 8, kMaxStages = 16;

template <typename S>
constexpr int stages_of(int plain) {
  const int found = plain * kStageBytes<ColumnTiles<WeightType<16, Scales::none>, 1>> / kStageBytes<S>;
  return found < kMaxStages ? found : kMaxStages;
}

}  // namespace

bool norms_with_logits(const GemmArgs& logits) { return has_small_n(logits.w) && logits.w.k <= kEight * kNormThreads; }

void norm_and_logits(const float* x, const Norm& norm, const Rows& normed, const GemmArgs& logits, const Queue& queue) {
  const auto kernel = logits.w.k % kLaneColumns ? norm_and_logits_kernel<false> : norm_and_logits_kernel<true>;
  const size_t shared = 2 * sizeof(float) * padded_columns(logits.w.k);
  start(queue, kernel, logits.w.n, kNormThreads, shared, x, norm, normed, logits);
}

void gate_row(const ExpertGemmArgs& e, const ChosenRow& row, const Queue& queue) {
  by_type<false>(e.gemm.w, [&](auto type) {
    using S = ColumnTiles<decltype(type), 1>;
    start_gates<S, stages_of<S>(kGateStages)>(e, row, queue);
  });
}

void combine_row(const ExpertGemmArgs& e, const ChosenRow& row, const Combination& c, const Queue& queue) {
  by_type<false>(e.gemm.w, [&](auto type) {
    using S = ColumnTiles<decltype(type), 1>;
    start_sums<S, stages_of<S>(kSumStages)>(e, row, c, queue);
  });
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
