// An expert layer for a step of one row, which is bound by latency. Each of its three launches prefetches its weights
// while the previous one runs, and none waits for lists that another one writes.
//
// In the first launch every CTA normalizes the row itself and computes the logit of one expert. In the two GEMM
// launches every CTA chooses the row's experts itself. Each warp computes 16 columns (rows of the weights) of an expert
// at a time, as one chain over K, and copies its weights to shared memory several stages ahead. CTAs of both fit on an
// SM together, so the second one's weights stream while the first one ends. A CTA of the second adds all experts of its
// columns.
#include <algorithm>

#include "cuda/kernels/common/pipeline.cuh"
#include "cuda/kernels/common/wgmma.cuh"
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

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Prepares a CTA's barriers of stages. Synchronized by the caller.
template <typename S>
__device__ void init_stages(uint64_t* full, int count) {
  if (threadIdx.x >= count) return;
  barrier_init(&full[threadIdx.x], S::kBits == 16 ? 1 : 32);
  barriers_are_there();
}

// Copies the activations that items multiply to shared memory: the row, or those of the chosen entries. thread: number
// of the calling thread among `threads`.
__device__ __forceinline__ void copy_rows(const ExpertGemmArgs& e, char* to, int thread, int threads) {
  const int rows = e.gathers ? 1 : e.routing.top, chunks = blocks_of(e.gemm.w.k) * 8;
  const char* from = reinterpret_cast<const char*>(e.gemm.x.tiles);
  for (int row = 0; row < rows; row++, to += chunks * 16)
    for (int i = thread; i < chunks; i += threads)
      *reinterpret_cast<uint4*>(to + i * 16) =
          __ldcg(reinterpret_cast<const uint4*>(from + (size_t)(i / 8) * kBlockBytes + chunk_offset(row, i % 8)));
}

// An entry's activations there.
__device__ __forceinline__ const char* row_of(const ExpertGemmArgs& e, const char* rows, int entry) {
  return rows + (e.gathers ? 0 : entry) * blocks_of(e.gemm.w.k) * kRowBytes;
}

// A warp's items. Their weights are copied several stages ahead, 16 columns and a block of K each.
template <typename S, int kStages, typename ItemAt>
class Stream {
 public:
  // full: a barrier for each stage.
  __device__ Stream(const ExpertGemmArgs& e, const Chosen& chosen, size_t expert_bytes, char* ring, uint64_t* full,
                    int items, ItemAt item_at)
      : e_(e),
        chosen_(chosen),
        expert_bytes_(expert_bytes),
        blocks_(blocks_of(e.gemm.w.k)),
        ring_(ring + threadIdx.x / 32 * kStages * S::kBytes),
        full_(full + threadIdx.x / 32 * kStages),
        items_(items),
        item_at_(item_at) {}
  // Requests the first weights. The experts must be known.
  __device__ void begin() {
    if (items_ <= 0) return;
    begin_item();
    fence_for_wgmma();  // the ring may have been used for other things
#pragma unroll 1        // the code is fetched anew at each launch, which takes longer than the loop
    for (int i = 0; i < kStages; i++) fetch(i);
  }
  // Computes the next item; in every fourth lane d[0] and d[2] are the sums of columns lane / 4 and lane / 4 + 8. row:
  // its activations in shared memory.
  __device__ void multiply(const char* row, float (&d)[4]) {
    const int lane = threadIdx.x % 32;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; i++) d[i] = 0;
    for (int b = 0; b < blocks_; b++, row += kRowBytes) {
      barrier_wait(&full_[ring_place_.stage], ring_place_.parity);
      Fragments<S> weights(ring_ + ring_place_.stage * S::kBytes, e_.gemm.w.k - b * kBlock);
      const uint32_t* x = reinterpret_cast<const uint32_t*>(row) + lane;  // read by the first four lanes
#pragma unroll
      for (int step = 0; step < 4; step++) {
        uint32_t a[4];
        weights.load(0, step, a);
        multiply_add(d, a, lane < 4 ? x[step * 8] : 0, lane < 4 ? x[step * 8 + 4] : 0);
      }
      __syncwarp();
      fetch(ring_place_.stage);
      ring_place_.next();
    }
  }

 private:
  __device__ void begin_item() {
    const Item item = item_at_(item_);
    const Matrix& w = e_.gemm.w;
    const int expert = chosen_.experts[item.entry];
    weights_ = reinterpret_cast<const char*>(S::kBits == 16 ? static_cast<const void*>(w.tiles) : w.quants.words) +
               expert * expert_bytes_ + (size_t)(item.tile / 4) * blocks_ * S::kBlockBytes +
               item.tile % 4 * S::kTileBytes;
    if constexpr (S::kSets)
      scales_ = w.quants.scales + expert * expert_bytes_ / 4 + (size_t)(item.tile / 4) * w.quants.groups * kScaleWords +
                item.tile % 4 * kTileRows;
  }
  // Requests the next weights.
  __device__ void fetch(int stage) {
    if (item_ >= items_) return;
    const uint32_t to = shared_address(ring_ + stage * S::kBytes);
    const char* from = weights_ + (size_t)block_ * S::kBlockBytes;
    if constexpr (S::kBits == 16) {
      if (elected()) {
        barrier_expect(&full_[stage], S::kTileBytes);
        copy_bulk(to, from, S::kTileBytes, &full_[stage], evicted_first());
      }
    } else {
      copy_by_warp<S::kTileBytes>(to, from);
      if constexpr (S::kSets) {
        const int lane = threadIdx.x % 32;
        const Matrix& w = e_.gemm.w;
        const int group = min(block_ * kBlock + (S::kFine ? lane / 4 * 16 : 0), w.k - 1) / w.quants.group;
        if (lane < S::kSets * 4)
          copy_16(to + S::kWeights + lane * 16, scales_ + (size_t)group * kScaleWords + lane % 4 * 4);
      }
      arrive_with_copies(shared_address(&full_[stage]));
    }
    if (++block_ < blocks_) return;
    block_ = 0;
    if (++item_ < items_) begin_item();
  }

  const ExpertGemmArgs& e_;
  const Chosen& chosen_;
  const size_t expert_bytes_;
  const int blocks_;
  char* const ring_;
  uint64_t* const full_;
  const int items_;
  const ItemAt item_at_;
  int item_ = 0, block_ = 0;  // of the next copies
  const char* weights_ = nullptr;
  const uint32_t* scales_ = nullptr;
  Pipeline<kStages> ring_place_;
};
#endif

template <typename S, int kStages, int kGateWarps>
__global__ void __launch_bounds__(32 * kGateWarps)
    gate_row_kernel(const __grid_constant__ ExpertGemmArgs e, const __grid_constant__ ChosenRow row, int tiles,
                    size_t expert_bytes) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(128) char shared[];
  __shared__ Chosen chosen;
  __shared__ uint64_t full[kGateWarps * kStages];
  const GemmArgs& p = e.gemm;
  char* const x = shared + kGateWarps * kStages * S::kBytes;
  const bool there = is_there(row);
  init_stages<S>(full, kGateWarps * kStages);
  await_previous();
  let_next_begin();  // it finds the logits, too, and chooses its experts while these weights stream
  if (threadIdx.x >= 32) copy_rows(e, x, threadIdx.x - 32, blockDim.x - 32);  // while the first warp chooses
  choose(row, there, e.routing, reinterpret_cast<float*>(shared), chosen);
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * gridDim.x + blockIdx.x, step = gridDim.x * kGateWarps,
            items = max(chosen.count * tiles - first + step - 1, 0) / step;
  const auto item_at = [=](int i) { return Item{(first + i * step) / tiles, (first + i * step) % tiles}; };
  Stream<S, kStages, decltype(item_at)> stream(e, chosen, expert_bytes, shared, full, items, item_at);
  stream.begin();
  if (blockIdx.x == 0 && threadIdx.x < 32) weigh(row, e.routing, chosen), list_chosen(e.routing, chosen);
  for (int i = 0; i < items; i++) {
    const Item item = item_at(i);
    float d[4];
    stream.multiply(row_of(e, x, item.entry), d);
    const int column = item.tile * (kTileRows / 2) + lane / 4;
    if (lane % 4 || column >= p.y.width) continue;
    const float* bias = bias_of(e, chosen.experts[item.entry]);
    const float gate = bias ? __fadd_rn(d[0], bias[column]) : d[0],
                up = bias ? __fadd_rn(d[2], bias[p.y.width + column]) : d[2];
    put(p.y, item.entry, column, gated_by(e.gating, gate, up));
  }
#endif
}

// each: warps that share the experts of a tile of columns. at_once: tiles that a CTA computes at a time.
template <typename S, int kStages>
__global__ void __launch_bounds__(32 * kWarps)
    combine_row_kernel(const __grid_constant__ ExpertGemmArgs e, const __grid_constant__ ChosenRow row,
                       const __grid_constant__ Combination c, int tiles, int each, int at_once, size_t expert_bytes) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(128) char shared[];
  __shared__ Chosen chosen;
  __shared__ uint64_t full[kWarps * kStages];
  __shared__ float made[(kMaxTop > kWarps ? kMaxTop : kWarps) * kTileRows];  // [tile][entry][column]
  char* const x = shared + kWarps * kStages * S::kBytes;
  init_stages<S>(full, kWarps * kStages);
  choose(row, is_there(row), e.routing, reinterpret_cast<float*>(shared), chosen);
  if (threadIdx.x < 32) weigh(row, e.routing, chosen);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, top = e.routing.top, own = warp / each,
            entry = warp % each, per = own < at_once ? max(chosen.count - entry + each - 1, 0) / each : 0;
  const int first = blockIdx.x * at_once + own, step = gridDim.x * at_once,
            items = max(tiles - first + step - 1, 0) / step * per;
  const auto item_at = [=](int i) { return Item{entry + i % per * each, first + i / per * step}; };
  Stream<S, kStages, decltype(item_at)> stream(e, chosen, expert_bytes, shared, full, items, item_at);
  stream.begin();
  await_previous();
  let_next_begin();
  copy_rows(e, x, threadIdx.x, blockDim.x);
  __syncthreads();
  for (int begin = blockIdx.x * at_once; begin < tiles; begin += step) {
    // The column that a thread adds, and the value of y that the sum is added to.
    const int tile = begin + threadIdx.x / kTileRows, column = tile * kTileRows + threadIdx.x % kTileRows;
    const bool adds_up = threadIdx.x < at_once * kTileRows && column < c.y.width;
    const float before = adds_up && c.adds ? c.y.values[column] : 0;
    for (int i = 0; i < per && begin + own < tiles; i++) {
      float d[4];
      stream.multiply(row_of(e, x, entry + i * each), d);
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
#endif
}

// Bytes of shared memory of a CTA's stages and of the activations.
template <typename S>
size_t shared_of(const ExpertGemmArgs& e, int warps, int stages) {
  const size_t ring = (size_t)warps * stages * S::kBytes, row = blocks_of(e.gemm.w.k) * kRowBytes;
  return std::max(ring + (e.gathers ? 1 : e.routing.top) * row, 2 * sizeof(float) * kMaxExperts);
}

template <typename S, int kStages, int kGateWarps>
void start_gates_of(const ExpertGemmArgs& e, const ChosenRow& row, int tiles, const Queue& queue) {
  const auto kernel = gate_row_kernel<S, kStages, kGateWarps>;
  const size_t shared = shared_of<S>(e, kGateWarps, kStages);
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
  const size_t shared = shared_of<S>(e, kWarps, kStages);
  start(queue, kernel, std::min(ceil_div(tiles, at_once), sm_count()), 32 * kWarps, shared, e, row, c, tiles, each,
        at_once, bytes_of_expert(e.gemm.w));
}

// Stages of a warp with 16-bit weights; both launches fit an SM together. Narrower weights have more stages.
constexpr int kGateStages = 4, kSumStages = 9, kMaxStages = 16;

template <typename S>
constexpr int stages_of(int plain) {
  const int found = plain * ColumnTiles<WeightType<16, Scales::none>, 1>::kBytes / S::kBytes;
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
