// A decode step's layers of Qwen2.5-7B's shape (small: of 0.5B's) in bfloat16, each kernel behind the one before as in
// a step: us a layer, and a hash of what comes out; then without some of the kernels, which tells what those add.
// `layer [rows=1,8,32] [whole] [half] [split] [small]` (whole: nothing is left out; half: a rank's part of two, without
// their sums; split: small products by clusters, too)
//   nvcc -std=c++17 -O3 -Inative -gencode=arch=compute_90a,code=sm_90a tests/perf/cuda/layer.cu
//        native/cuda/kernels/{linear_bf16,linear_split,linear_stream,linear_wide,linear_f32,rows,attention_few,ceilings}.cu
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/kernels.h"
#include "cuda/kernels/attention_mma.h"

using namespace as::cuda;

namespace {

constexpr int kLayers = 8, kSpan = 32, kAt = 129, kMostRows = 64;
cudaStream_t stream;
Queue queue;

void check(cudaError_t result) {
  if (result != cudaSuccess) std::printf("%s\n", cudaGetErrorString(result)), std::exit(1);
}
template <typename T>
T* memory(size_t bytes, float noise = 0) {
  static uint64_t seed = 1;
  void* data = nullptr;
  check(cudaMalloc(&data, bytes)), check(cudaMemset(data, 0, bytes));
  if (noise) fill_noise(data, bytes, noise, seed++, queue);
  check(cudaDeviceSynchronize());
  return static_cast<T*>(data);
}
template <typename T>
T* copied(const std::vector<T>& from) {
  T* to = memory<T>(from.size() * sizeof(T));
  check(cudaMemcpy(to, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice));
  return to;
}

struct Layer {
  Matrix qkv, o, gate_up, down;
  LayerCache cache;
};
Matrix matrix(int n, int k) {
  return {n, k, Kind::bf16, nullptr, memory<uint16_t>(tiles_bytes(n, k), 0.03f), {}, most_pieces(n)};
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<int> batches = {1, 8, 32};
  bool whole = false, half = false, split = false, small = false;
  for (int i = 1; i < argc; i++) {
    whole |= !std::strcmp(argv[i], "whole"), half |= !std::strcmp(argv[i], "half");
    split |= !std::strcmp(argv[i], "split"), small |= !std::strcmp(argv[i], "small");
    if (std::strncmp(argv[i], "rows=", 5)) continue;
    batches.clear();
    for (char* at = std::strtok(argv[i] + 5, ","); at; at = std::strtok(nullptr, ",")) batches.push_back(std::atoi(at));
  }
  const int parts = half ? 2 : 1, hidden = small ? 896 : 3584, dim = small ? 64 : 128,
            heads = (small ? 14 : 28) / parts, kv = (small ? 2 : 4) / parts, inner = (small ? 4864 : 18944) / parts,
            attended = heads * dim, wide = (heads + 2 * kv) * dim;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  queue = {stream, 90, {}};
  queue.scratch = {memory<float>(kScratchBlocks * kScratchFloats * 4), memory<int>(kScratchBlocks * kScratchFlags * 4),
                   memory<float>(kScratchPieces * 4), memory<int>(kScratchCounts * 4)};
  std::vector<Layer> layers(kLayers);
  const int spans = (kAt + kSpan) / kSpan;
  for (Layer& l : layers) {
    l.qkv = matrix(wide, hidden), l.o = matrix(hidden, attended);
    l.gate_up = matrix(2 * inner, hidden), l.down = matrix(hidden, inner);
    l.cache = {nullptr, CacheType::bf16, kSpan, kv, dim, dim};
    l.cache.data = memory<char>(l.cache.span_bytes() * spans * kMostRows, 1.0f);
  }
  std::vector<AttentionTile> tiles;
  std::vector<int> tables;
  for (int row = 0; row < kMostRows; row++) {
    tiles.push_back({row, 1, kAt, (int)tables.size(), 0});
    for (int i = 0; i < spans; i++) tables.push_back(row * spans + i);
  }
  const AttentionTile* few = copied(tiles);
  Attention a;
  a.group = heads / kv, a.queries = heads, a.scale = 0.088f, a.width = wide, a.tables = copied(tables);
  a.most_runs = 2, a.partials = nullptr;
  a.arrivals = memory<int>(kMostRows * kv * 4);
  Turn turn;
  turn.table.dim = dim, turn.table.cosine = copied(std::vector<float>(kMostRows * dim / 2, 0.8f));
  turn.table.sine = copied(std::vector<float>(kMostRows * dim / 2, 0.6f));
  const Norm norm{copied(std::vector<float>(hidden, 1.0f)), 1e-6f, false};
  const float* bias = copied(std::vector<float>(wide, 0.1f));
  std::vector<float> begin_x(kMostRows * hidden);
  for (size_t i = 0; i < begin_x.size(); i++) begin_x[i] = (float)(i * 2654435761u % 1000) / 500 - 1;
  const float* first = copied(begin_x);
  float* x = memory<float>(kMostRows * hidden * 4);
  float* qkv = memory<float>(kMostRows * wide * 4);
  uint16_t *normed = memory<uint16_t>(tiles_bytes(kMostRows, hidden)),
           *context = memory<uint16_t>(tiles_bytes(kMostRows, attended)),
           *act = memory<uint16_t>(tiles_bytes(kMostRows, inner));
  a.qkv = qkv, a.out = {nullptr, context, attended};
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin)), check(cudaEventCreate(&end));

  const auto step = [&](int rows, const std::string& without) {
    const auto has = [&](const char* what) { return without.find(what) == std::string::npos; };
    const auto product = [&](const Matrix& w, const uint16_t* from, const Rows& to, bool adds, bool gated,
                             const float* b) {
      Product p;
      p.w = w, p.x = {nullptr, const_cast<uint16_t*>(from), w.k}, p.y = to, p.adds = adds, p.gated = gated, p.bias = b;
      linear_bf16(p, rows, queue, split ? By::split : By::any);
    };
    for (const Layer& l : layers) {
      if (has("norm1")) rms_norm(x, norm, rows, {nullptr, normed, hidden}, queue);
      if (has("qkv")) product(l.qkv, normed, {qkv, nullptr, wide}, false, false, bias);
      a.cache = l.cache;
      if (has("attention")) attend_few_bf16(a, few, rows, false, true, &turn, queue);
      if (has("o ")) product(l.o, context, {x, nullptr, hidden}, true, false, nullptr);
      if (has("norm2")) rms_norm(x, norm, rows, {nullptr, normed, hidden}, queue);
      if (has("gate_up")) product(l.gate_up, normed, {nullptr, act, inner}, false, true, nullptr);
      if (has("down")) product(l.down, act, {x, nullptr, hidden}, true, false, nullptr);
    }
  };
  const auto time = [&](int rows, const std::string& without, uint32_t* hash) {
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    step(rows, without);
    check(cudaStreamEndCapture(stream, &graph));
    check(cudaGraphInstantiate(&replay, graph, 0));
    float best = 1e9;
    for (int i = 0; i < 12; i++) {
      float ms;
      check(cudaMemcpyAsync(x, first, begin_x.size() * 4, cudaMemcpyDeviceToDevice, stream));
      check(cudaEventRecord(begin, stream)), check(cudaGraphLaunch(replay, stream));
      check(cudaEventRecord(end, stream)), check(cudaEventSynchronize(end));
      check(cudaEventElapsedTime(&ms, begin, end));
      best = ms < best ? ms : best;
    }
    if (hash) {
      std::vector<uint32_t> found(rows * hidden);
      check(cudaMemcpy(found.data(), x, found.size() * 4, cudaMemcpyDeviceToHost));
      *hash = 2166136261u;
      for (uint32_t word : found) *hash = (*hash ^ word) * 16777619u;
      float value;
      std::memcpy(&value, &found[5], 4);
      if (!(value * value < 1e12f)) std::printf("not finite ");
    }
    cudaGraphExecDestroy(replay), cudaGraphDestroy(graph);
    return 1e3 * best / kLayers;
  };
  for (int rows : batches) {
    uint32_t hash = 0;
    step(rows, "");
    check(cudaStreamSynchronize(stream));
    const double all = time(rows, "", &hash);
    std::printf("%2d rows: %.2f us a layer, hash %08x%s", rows, all, hash, whole ? "\n" : "; without");
    if (whole) continue;
    for (const char* without : {"norm1", "norm2", "attention", "qkv", "o ", "gate_up", "down", "norm1 attention norm2"})
      std::printf(" %s %.2f", without, all - time(rows, without, nullptr));
    std::printf("\n");
  }
}
