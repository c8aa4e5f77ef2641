// The layers of a decode step at Qwen2.5-7B's shape in bfloat16 or 8 bits, with kernels one after the other as in a
// step: us per layer and a hash of the output; then without some of the kernels, which shows what these add. `layer
// [rows=1,8,32] [whole] [half] [split] [float8 | w8a8] [apart]` (whole: leave out nothing; half: one rank's part of
// two, without all-reduce; split: small GEMMs by split-K, too; float8, w8a8: 8-bit weights and activations; apart:
// separate kernels quantize rows)
//   nvcc -std=c++17 -O3 -Inative -gencode=arch=compute_90a,code=sm_90a benchmarks/cuda/layer.cu
//        native/cuda/kernel_choice.cpp
//        native/cuda/kernels/{gemm/{gemm_{dtype16,split_k,stream_k,prefill,mma_prefill,f32,8bit*,integer},
//        gemv},norm/rows,
//        attention/attention_decode,quantize/{quantize_rows,pack}}.cu
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "chosen.h"
#include "cuda/kernels/attention/attention_mma.h"
#include "cuda/kernels/quantize/quantized.cuh"

using namespace as::cuda;

namespace {

constexpr int kLayers = 8, kHidden = 3584, kDim = 128, kSpan = 32, kAt = 129, kMaxRows = 64;
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
  if (noise) AS_DTYPE16::fill_noise(data, bytes, kDType16, noise, seed++, queue);
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
bool float8 = false, w8a8 = false;
__global__ void fill_quants(Quants quants, size_t words, int rows, uint64_t seed) {
  const size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
  uint64_t noise = (i + seed) * 0x9E3779B97F4A7C15ull;
  noise ^= noise >> 29, noise *= 0xBF58476D1CE4E5B9ull, noise ^= noise >> 32;
  if (i < words) quants.words[i] = quants.floats ? noise & 0xbfbfbfbfu : noise;  // floats below 2, no NaN
  const float scale = (quants.floats ? 1e-2f : 2e-4f) * (1 + (noise >> 40) % 8 / 8.0f);
  if (i < (size_t)rows)
    quants.scales[i] = quants.floats ? __float_as_uint(scale) : to_dtype16x2(scale, scale * (i % 5));
}
Matrix matrix(int n, int k) {
  if (float8 || w8a8) {
    Matrix m{n, k, float8 ? Kind::float8 : Kind::integers};
    m.quants = {
        8, k, 1, float8, true, false, memory<uint32_t>(quants_bytes(n, k, 8)), memory<uint32_t>(scales_bytes(n, 1))};
    m.max_split_k = quant_split_k(n, k, kMaxSplitK);
    const size_t words = quants_bytes(n, k, 8) / 4;
    static uint64_t seed = 1;
    fill_quants<<<(words + 255) / 256, 256>>>(m.quants, words, blocks_of(n) * kBlock, seed);
    seed += words;
    check(cudaDeviceSynchronize());
    return m;
  }
  return {n, k, Kind::dtype16, kDType16, nullptr, memory<uint16_t>(tiles_bytes(n, k), 0.03f), {}, max_split_k(n)};
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<int> batches = {1, 8, 32};
  bool whole = false, half = false, split = false, apart = false;
  for (int i = 1; i < argc; i++) {
    whole |= !std::strcmp(argv[i], "whole"), half |= !std::strcmp(argv[i], "half");
    split |= !std::strcmp(argv[i], "split"), float8 |= !std::strcmp(argv[i], "float8");
    w8a8 |= !std::strcmp(argv[i], "w8a8"), apart |= !std::strcmp(argv[i], "apart");
    if (std::strncmp(argv[i], "rows=", 5)) continue;
    batches.clear();
    for (char* at = std::strtok(argv[i] + 5, ","); at; at = std::strtok(nullptr, ",")) batches.push_back(std::atoi(at));
  }
  const int parts = half ? 2 : 1, heads = 28 / parts, kv = 4 / parts, inner = 18944 / parts, attended = heads * kDim,
            wide = (heads + 2 * kv) * kDim;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  queue = {stream, 90, {}};
  queue.scratch = {memory<float>(kScratchCtas * kScratchFloats * 4), memory<int>(kScratchCtas * kScratchFlags * 4),
                   memory<float>(kScratchParts * 4), memory<int>(kScratchCounts * 4)};
  std::vector<Layer> layers(kLayers);
  const int spans = (kAt + kSpan) / kSpan;
  for (Layer& l : layers) {
    l.qkv = matrix(wide, kHidden), l.o = matrix(kHidden, attended);
    l.gate_up = matrix(2 * inner, kHidden), l.down = matrix(kHidden, inner);
    l.cache = {nullptr, CacheType::dtype16, kSpan, kv, kDim, kDim};
    l.cache.stride = l.cache.span_bytes();
    l.cache.data = memory<char>(l.cache.stride * spans * kMaxRows, 1.0f);
  }
  std::vector<AttentionTile> tiles;
  std::vector<int> tables;
  for (int row = 0; row < kMaxRows; row++) {
    tiles.push_back({row, 1, kAt, (int)tables.size(), 0});
    for (int i = 0; i < spans; i++) tables.push_back(row * spans + i);
  }
  const AttentionTile* decode_tiles = copied(tiles);
  Attention a;
  a.group = heads / kv, a.queries = heads, a.scale = 0.088f, a.width = wide, a.tables = copied(tables);
  a.max_splits = 2, a.partials = nullptr;
  a.arrivals = memory<int>(kMaxRows * kv * 4);
  Rope rope;
  rope.table.dim = kDim, rope.table.cosine = copied(std::vector<float>(kMaxRows * kDim / 2, 0.8f));
  rope.table.sine = copied(std::vector<float>(kMaxRows * kDim / 2, 0.6f));
  const Norm norm{copied(std::vector<float>(kHidden, 1.0f)), 1e-6f, false};
  const float* bias = copied(std::vector<float>(wide, 0.1f));
  std::vector<float> begin_x(kMaxRows * kHidden);
  for (size_t i = 0; i < begin_x.size(); i++) begin_x[i] = (float)(i * 2654435761u % 1000) / 500 - 1;
  const float* first = copied(begin_x);
  float* x = memory<float>(kMaxRows * kHidden * 4);
  float* qkv = memory<float>(kMaxRows * wide * 4);
  uint16_t *normed = memory<uint16_t>(tiles_bytes(kMaxRows, kHidden)),
           *context = memory<uint16_t>(tiles_bytes(kMaxRows, attended)),
           *act = memory<uint16_t>(tiles_bytes(kMaxRows, inner));
  a.qkv = qkv, a.out = {nullptr, context, attended};
  const bool bytes = float8 || w8a8;
  const ByteRows rows_of_bytes = byte_rows(memory<char>(byte_rows_bytes(kMaxRows, inner)), kMaxRows, inner);
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin)), check(cudaEventCreate(&end));

  const auto step = [&](int rows, const std::string& without) {
    const auto has = [&](const char* what) { return without.find(what) == std::string::npos; };
    // norms: of what the product has from `from`, if that is not null.
    const auto product = [&](const Matrix& w, const uint16_t* from, const Rows& to, bool adds, bool gated,
                             const float* b, const char* norms = nullptr) {
      GemmArgs p;
      p.w = w, p.x = {nullptr, const_cast<uint16_t*>(from), w.k}, p.y = to, p.adds = adds, p.gated = gated, p.bias = b;
      if (bytes) {
        p.bytes = rows_of_bytes;
        if (norms) p.unnormed = x, p.norm = norm;
        if (const GemmChoice choice = chosen(p, rows, queue); choice.fused && !apart)
          return gemv_8bit(p, queue, choice.algo);
        if (!norms) quantize_activations(p, rows, queue);
        else if (has(norms)) rms_norm_into_bytes(x, norm, p, rows, queue);
        const GemmAlgo algo = plain(p, rows, queue);
        float8 ? gemm_float8(p, rows, queue, algo) : gemm_integer(p, rows, queue, algo);
        return;
      }
      if (norms) {
        p.unnormed = x, p.norm = norm;
        if (const GemmChoice choice = chosen(p, rows, queue); choice.fused && !apart)
          return AS_DTYPE16::gemm_dtype16(p, rows, queue, choice.algo);
        p.unnormed = nullptr;
        if (has(norms)) AS_DTYPE16::rms_norm(x, norm, rows, {nullptr, normed, kHidden}, queue);
      }
      AS_DTYPE16::gemm_dtype16(p, rows, queue, plain(p, rows, queue, split ? GemmAlgo::split_k : GemmAlgo::any));
    };
    for (const Layer& l : layers) {
      if (has("qkv")) product(l.qkv, normed, {qkv, nullptr, wide}, false, false, bias, "norm1");
      a.cache = l.cache;
      if (has("attention")) attend_decode_dtype16(a, decode_tiles, rows, false, true, &rope, queue);
      if (has("o ")) product(l.o, context, {x, nullptr, kHidden}, true, false, nullptr);
      if (has("gate_up")) product(l.gate_up, normed, {nullptr, act, inner}, false, true, nullptr, "norm2");
      if (has("down")) product(l.down, act, {x, nullptr, kHidden}, true, false, nullptr);
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
      std::vector<uint32_t> found(rows * kHidden);
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
