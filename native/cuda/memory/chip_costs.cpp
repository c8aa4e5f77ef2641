#include "cuda/memory/chip_costs.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <vector>

#include "cuda/kernels/common/roofline.h"
#include "cuda/kernels/common/shared_limit.h"
#include "cuda/kernels/gemm/gemm.h"
#include "cuda/kernels/gemm/mma_prefill_plan.h"
#include "cuda/memory/timing.h"
#include "cuda/weights/weights.h"

namespace as::cuda {
namespace {

constexpr size_t kPool = 256 << 20;  // bytes that are read; also what GEMMs read
constexpr int kTimes = 5, kLaunches = 128;
constexpr double kWarmUp = 0.03, kDelay = 2e6;  // seconds until clocks are high; ns in which the host queues launches
// A GEMM in tiles of few columns.
constexpr int kColumns = 8192, kDepth = 4096, kRows = 4 * kBlock;
// A GEMM of as many tiles as there are SMs or a few less, eight of them down, for two numbers of blocks of K. If K has
// parts, they are of eight blocks.
constexpr int kDown = 8, kFewBlocks = 16, kManyBlocks = 64, kPart = 8;
// Where the middle run takes so much longer than the least one in so many of the measurements, something else ran.
constexpr double kUneven = 1.3, kMostUneven = 0.3;

class Meter {
 public:
  explicit Meter(int index)
      : device_(index),
        queue_(device_.queue()),
        pool_(kPool, "measuring"),
        rows_(tiles_bytes(kDown * 256, kManyBlocks * kBlock), "measuring"),
        sums_((size_t)kDown * std::max(256 * columns_of_tiles(), kBlock * kColumns) * sizeof(float), "measuring"),
        weights_(device_) {
    fill_bf16(pool_.as(), kPool, queue_), fill_bf16(rows_.as(), rows_.size(), queue_);
  }

  MeasuredCosts measure() {
    warm_up();
    MeasuredCosts found;
    ChipCosts& costs = found.costs;
    costs.read = kPool / time([&] { read_memory(pool_.as(), kPool, sums_.as<uint32_t>(), queue_); });
    launches(costs);
    mma_prefill(costs);
    few_columns(costs);
    const auto uneven = std::count_if(ratios_.begin(), ratios_.end(), [](double ratio) { return ratio > kUneven; });
    if (uneven > kMostUneven * ratios_.size()) found.doubt = "times differ from run to run: the GPU has other work";
    return found;
  }

 private:
  // Nanoseconds.
  double time(const std::function<void()>& work, const std::function<void()>& prepare = nullptr) {
    const Seconds seconds = seconds_of(device_, kTimes, work, prepare);
    ratios_.push_back(seconds.middle / seconds.least);
    return 1e9 * seconds.least;
  }

  GemmArgs gemm(int n, int k, int max_split_k) const {
    GemmArgs p;
    p.w.kind = Kind::dtype16, p.w.n = n, p.w.k = k, p.w.tiles = pool_.as<uint16_t>(), p.w.max_split_k = max_split_k;
    p.x = {nullptr, rows_.as<uint16_t>(), k}, p.y = {sums_.as<float>(), nullptr, n};
    return p;
  }

  // Of kDown rows of tiles for nearly all SMs.
  int columns_of_tiles() const { return std::max(1, device_.sm_count() / kDown) * MmaPrefillShape::kColumns; }

  void warm_up() {
    const GemmArgs p = gemm(kColumns, kDepth, 1);
    const auto began = std::chrono::steady_clock::now();
    do {
      for (int i = 0; i < 4; i++) gemm_dtype16(p, kDown * kBlock, queue_, GemmAlgo::mma_prefill);
      device_.wait();
    } while (std::chrono::steady_clock::now() - began < std::chrono::duration<double>(kWarmUp));
  }

  void launches(ChipCosts& costs) {
    const auto launch = [&] {
      for (int i = 0; i < kLaunches; i++) do_nothing(queue_);
    };
    costs.launch = time(launch, [&] { pass_time(kDelay, queue_); }) / kLaunches;
    cudaGraph_t recorded = nullptr;
    cudaGraphExec_t graph = nullptr;
    check(cudaStreamBeginCapture(device_.stream(), cudaStreamCaptureModeThreadLocal), "recording launches");
    launch();
    check(cudaStreamEndCapture(device_.stream(), &recorded), "recording launches");
    const cudaError_t made = cudaGraphInstantiate(&graph, recorded, 0);
    cudaGraphDestroy(recorded);
    check(made, "recording launches");
    costs.graph_node = time([&] { check(cudaGraphLaunch(graph, device_.stream()), "launching a graph"); }) / kLaunches;
    cudaGraphExecDestroy(graph);
    costs.launch = std::max(costs.launch, costs.graph_node);
  }

  void mma_prefill(ChipCosts& costs) {
    const int shared = max_shared(), last = kMmaPrefillShapes - 1;
    double ends[kMmaPrefillShapes];
    for (int i = last; i >= 0; i--) {
      const MmaPrefillShape& shape = kMmaPrefill[i];
      if (shape.shared() > shared) {  // the next shape has the same tile in fewer stages
        costs.mma_prefill[i] = costs.mma_prefill[i + 1], ends[i] = ends[i + 1];
        continue;
      }
      ChipCosts alone;  // so that this shape is chosen
      std::fill_n(alone.mma_prefill, kMmaPrefillShapes, 1e9);
      alone.mma_prefill[i] = 1;
      Queue queue = queue_;
      queue.costs = &alone;
      const auto of_blocks = [&](int blocks) {
        const GemmArgs p = gemm(columns_of_tiles(), blocks * kBlock, shape.whole ? 1 : blocks / kPart);
        return time([&] { gemm_dtype16(p, kDown * shape.rows, queue, GemmAlgo::mma_prefill); });
      };
      const double few = of_blocks(kFewBlocks), many = of_blocks(kManyBlocks);
      costs.mma_prefill[i] = (many - few) / (kManyBlocks - kFewBlocks);
      ends[i] = few - kFewBlocks * costs.mma_prefill[i];
    }
    // Ends differ by their rows alone.
    costs.mma_prefill_row = std::max(0.0, (ends[0] - ends[last]) / (kMmaPrefill[0].rows - kMmaPrefill[last].rows));
  }

  void few_columns(ChipCosts& costs) {
    const double blocks = (double)kDepth / kBlock, sms = device_.sm_count();
    // Per SM, of a tile for a block of K.
    const auto of_tile = [&](int columns, double nanoseconds) {
      return nanoseconds * sms / ((double)kColumns / columns * (kRows / kBlock) * blocks);
    };
    GemmArgs p = gemm(kColumns, kDepth, kMaxSplitK);
    costs.mma[0] = of_tile(kTileRows, time([&] { gemm_dtype16(p, kRows, queue_, GemmAlgo::mma); }));
    for (int i = 0; i < 2; i++) {
      const int id = weights_.add_matrix(kColumns, kDepth, i ? "int4" : "int8", kBlock);
      p.w = weights_.matrix(id);
      fill_bf16(p.w.quants.words, matrix_bytes(p.w), queue_);
      costs.mma[1 + i] = of_tile(2 * kTileRows, time([&] { gemm_quantized(p, kRows, queue_, GemmAlgo::mma); }));
      costs.widen[i] =
          time([&] { widen_quantized(p.w, pool_.as<uint16_t>(), queue_); }) / ((double)kColumns / kBlock * blocks);
    }
  }

  const Device device_;
  const Queue queue_;
  const Memory pool_, rows_, sums_;
  Weights weights_;
  std::vector<double> ratios_;
};

// Products of a tensor core's instructions that an SM starts in a cycle, for bfloat16 with sums in float32, counted as
// two operations each: the greatest that chips of a capability have.
double operations_a_cycle(int capability) {
  const bool large = capability == 80 || capability == 90 || (capability >= 100 && capability < 120);
  return large ? 2048 : 1024;  // by mma.sync; Hopper's wgmma has twice as many
}

}  // namespace

ChipLimits limits_of(int device) {
  check_index(device);
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, device), "asking what the GPU is");
  const auto attribute = [&](cudaDeviceAttr which) {
    int value = 0;
    return cudaDeviceGetAttribute(&value, which, device) == cudaSuccess ? value : 0;
  };
  ChipLimits limits;
  limits.name = properties.name;
  for (const char byte : properties.uuid.bytes) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", (unsigned char)byte);
    limits.uuid += digits;
  }
  limits.capability = 10 * properties.major + properties.minor, limits.sms = properties.multiProcessorCount;
  limits.shared_bytes = max_shared(device);
  limits.clock = 1e-6 * attribute(cudaDevAttrClockRate);
  limits.memory = 2e-6 * attribute(cudaDevAttrMemoryClockRate) * attribute(cudaDevAttrGlobalMemoryBusWidth) / 8;
  return limits;
}

MeasuredCosts measure_costs(int device) {
  MeasuredCosts found = Meter(device).measure();
  if (const std::string why = why_implausible(found.costs, limits_of(device)); !why.empty()) found.doubt = why;
  return found;
}

std::string why_implausible(const ChipCosts& costs, const ChipLimits& limits) {
  std::string why;
  const auto bound = [&](const std::string& what, double value, double least, double most) {
    if (!why.empty() || (value >= least && value <= most)) return;
    char numbers[96];
    std::snprintf(numbers, sizeof numbers, " of %.4g, which should be %.4g to %.4g", value, least, most);
    why = what + numbers;
  };
  if (limits.memory > 0) bound("read", costs.read, 0.35 * limits.memory, 1.2 * limits.memory);
  bound("read", costs.read, 20, 20000);
  bound("graph_node", costs.graph_node, 100, 20000);
  bound("launch", costs.launch, costs.graph_node, 50000);
  const double clock = limits.clock > 0 ? limits.clock : 1.5, most = operations_a_cycle(limits.capability);
  // Operations of an SM in a cycle. The best tile should use a good part of those that it can start.
  const auto rate = [&](int rows, int columns, double nanoseconds) {
    return 2.0 * rows * columns * kBlock / nanoseconds / clock;
  };
  double best = 0;
  for (int i = 0; i < kMmaPrefillShapes; i++) {
    if (kMmaPrefill[i].shared() > limits.shared_bytes) continue;
    const double found = rate(kMmaPrefill[i].rows, MmaPrefillShape::kColumns, costs.mma_prefill[i]);
    bound("mma_prefill[" + std::to_string(i) + "]: operations a cycle", found, 0.02 * most, 1.3 * most);
    best = std::max(best, found);
  }
  bound("mma_prefill: operations a cycle of the best tile", best, 0.15 * most, 1.3 * most);
  bound("mma_prefill_row", costs.mma_prefill_row, 0, 2000);
  for (int i = 0; i < 3; i++)
    bound("mma[" + std::to_string(i) + "]: operations a cycle",
          rate(kBlock, i ? 2 * kTileRows : kTileRows, costs.mma[i]), 0.01 * most, 1.3 * most);
  for (int i = 0; i < 2; i++)
    bound("widen[" + std::to_string(i) + "]: bytes a nanosecond", 2.0 * kBlockValues / costs.widen[i],
          0.05 * costs.read, 10 * costs.read);
  return why;
}

}  // namespace as::cuda
