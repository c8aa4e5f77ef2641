// The part of a Qwen3-30B-A3B layer between two attentions, in bfloat16, kernel by kernel: microseconds, and fractions
// of the time that its bytes or its operations take; and whether one row has the same bits with both sets of kernels.
//   nvcc -std=c++17 -O3 -Inative -gencode=arch=compute_90a,code=sm_90a benchmarks/cuda/experts.cu
//        native/cuda/kernel_choice.cpp
//        native/cuda/kernels/{moe/*,gemm/{gemm_{small_n,dtype16,split_k,stream_k,prefill,mma_prefill,f32},
//        gemv},norm/rows,quantize/pack}.cu
//        -o experts
//   experts [rows,rows... [rows of a tile]]
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "chosen.h"
#include "cuda/kernels/common/dtype16.h"
#include "timing.h"

using namespace as::cuda;

constexpr int kHidden = 2048, kInner = 768, kHeads = 4096, kQkv = 5120, kExperts = 128, kTop = 8, kLayers = 3;
constexpr double kBandwidth = 4.44e6, kRate = 792e6;  // bytes, operations in a microsecond

struct Layer {
  Matrix o, qkv, gate, up, down;
};

static Matrix in_tiles(int n, int k, int experts, uint64_t seed, const Queue& queue) {
  const size_t bytes = tiles_bytes(n, k) * experts;
  uint16_t* tiles = memory<uint16_t>(bytes);
  AS_DTYPE16::fill_noise(tiles, bytes, kDType16, 0.035f, seed, queue);
  Matrix m{n, k, Kind::dtype16, kDType16, nullptr, tiles, {}, max_split_k(n), experts};
  return m;
}

int main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IONBF, 0);
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  Queue queue{stream, 90, {}};
  queue.scratch = {memory<float>(kScratchCtas * kScratchFloats * 4), memory<int>(kScratchCtas * kScratchFlags * 4),
                   memory<float>(kScratchParts * 4), memory<int>(kScratchCounts * 4)};
  std::vector<int> all;
  for (char* at = std::strtok(argc > 1 ? argv[1] : strdup("1"), ","); at; at = std::strtok(nullptr, ","))
    all.push_back(std::atoi(at));
  int most = 1;
  for (int rows : all) most = rows > most ? rows : most;

  std::vector<Layer> layers;
  for (int i = 0; i < kLayers; i++) {
    Layer layer;
    layer.o = in_tiles(kHidden, kHeads, 1, 10 * i + 1, queue),
    layer.qkv = in_tiles(kQkv, kHidden, 1, 10 * i + 2, queue);
    layer.up = in_tiles(2 * kInner, kHidden, kExperts, 10 * i + 3, queue);
    layer.down = in_tiles(kHidden, kInner, kExperts, 10 * i + 4, queue);
    std::vector<float> values(kExperts * kHidden);
    srand(i);
    for (float& v : values) v = rand() / (float)RAND_MAX - 0.5f;
    float* gate = memory<float>(values.size() * 4);
    check(cudaMemcpy(gate, values.data(), values.size() * 4, cudaMemcpyHostToDevice));
    layer.gate = {kExperts, kHidden, Kind::f32, kDType16, gate};
    layers.push_back(layer);
  }
  const size_t entries = (size_t)most * kTop;
  const Rows context{nullptr, memory<uint16_t>(tiles_bytes(most, kHeads)), kHeads},
      x{memory<float>((size_t)most * kHidden * 4), nullptr, kHidden},
      y{memory<float>((size_t)most * kHidden * 4), memory<uint16_t>(tiles_bytes(most, kHidden)), kHidden},
      qkv{memory<float>((size_t)most * kQkv * 4), nullptr, kQkv},
      logits{memory<float>((size_t)most * kExperts * 4), nullptr, kExperts},
      gated{nullptr, memory<uint16_t>(tiles_bytes((int)entries, kInner)), kInner},
      made{memory<float>(entries * kHidden * 4), nullptr, kHidden};
  AS_DTYPE16::fill_noise(context.tiles, tiles_bytes(most, kHeads), kDType16, 1, 77, queue);
  std::vector<float> ones(kHidden, 1.0f), start((size_t)most * kHidden);
  for (float& v : start) v = rand() / (float)RAND_MAX - 0.5f;
  float* weight = memory<float>(kHidden * 4);
  check(cudaMemcpy(weight, ones.data(), kHidden * 4, cudaMemcpyHostToDevice));
  Routing routing;
  routing.top = kTop, routing.end = kExperts;
  place_routing(memory<char>(routing_bytes(most, kTop, kExperts)), most, kExperts, routing);
  Router router;
  router.experts = kExperts, router.normalized = true;
  const Norm norm{weight, 1e-6f, false};
  check(cudaDeviceSynchronize());

  using Part = std::function<void(const Layer&, int rows)>;
  const auto product = [](const Matrix& w, const Rows& from, const Rows& to, bool adds, bool gates) {
    GemmArgs p;
    p.w = w, p.x = from, p.y = to, p.adds = adds, p.gated = gates;
    return p;
  };
  const auto up = [&](const Layer& l) {
    ExpertGemmArgs e;
    e.gemm = product(l.up, y, gated, false, true), e.routing = routing, e.gathers = true;
    return e;
  };
  const auto down = [&](const Layer& l) {
    ExpertGemmArgs e;
    e.gemm = product(l.down, gated, made, false, false), e.routing = routing, e.follows = true;
    return e;
  };
  const int given = argc > 2 ? std::atoi(argv[2]) : 0;
  const auto tile_rows = [&](int rows) {
    return given ? given : choose_expert_gemm(chip_of(queue), Kind::dtype16, rows * kTop, kExperts).tile_rows;
  };
  const auto gemm = [&](const GemmArgs& p, int rows) {
    AS_DTYPE16::gemm_dtype16(p, rows, queue, plain(p, rows, queue));
  };
  const auto gemm_of_experts = [&](const ExpertGemmArgs& e, int rows) {
    const ExpertChoice choice =
        choose_expert_gemm(chip_of(queue), Kind::dtype16, rows * kTop, kExperts, GemmAlgo::any, tile_rows(rows));
    AS_DTYPE16::gemm_experts(e, rows * kTop, choice.tile_rows, queue, choice.algo);
  };
  const ChosenRow chosen_row{router, logits.values, nullptr};
  const Combination sum{{true, x, {}, {}}, made.values, routing}, normed{{true, x, norm, y}, made.values, routing};
  const std::pair<const char*, Part> o{
      "o", [&](const Layer& l, int rows) { gemm(product(l.o, context, x, true, false), rows); }},
      next{"qkv", [&](const Layer& l, int rows) { gemm(product(l.qkv, y, qkv, false, false), rows); }};
  using Parts = std::vector<std::pair<const char*, Part>>;
  const Parts many{o,
                   {"norm", [&](const Layer&, int rows) { AS_DTYPE16::rms_norm(x.values, norm, rows, y, queue); }},
                   {"route",
                    [&](const Layer& l, int rows) {
                      route(product(l.gate, y, logits, false, false), router, routing, nullptr, rows, tile_rows(rows),
                            queue);
                    }},
                   {"gate_up", [&](const Layer& l, int rows) { gemm_of_experts(up(l), rows); }},
                   {"down", [&](const Layer& l, int rows) { gemm_of_experts(down(l), rows); }},
                   {"combine, norm", [&](const Layer&, int rows) { AS_DTYPE16::combine_experts(normed, rows, queue); }},
                   next};
  const Parts one{o,
                  {"norm, logits",
                   [&](const Layer& l, int) {
                     AS_DTYPE16::norm_and_logits(x.values, norm, y, product(l.gate, y, logits, false, false), queue);
                   }},
                  {"gate_up", [&](const Layer& l, int) { AS_DTYPE16::gate_row(up(l), chosen_row, queue); }},
                  {"down, sum", [&](const Layer& l, int) { AS_DTYPE16::combine_row(down(l), chosen_row, sum, queue); }},
                  {"norm", [&](const Layer&, int rows) { AS_DTYPE16::rms_norm(x.values, norm, rows, y, queue); }},
                  next};

  const auto reset = [&] {
    check(cudaMemcpyAsync(x.values, start.data(), start.size() * 4, cudaMemcpyHostToDevice, stream));
    check(cudaStreamSynchronize(stream));
  };
  // Of a layer, of the first so many parts.
  const auto time_of = [&](const Parts& parts, size_t count, int rows) {
    constexpr int kLaunches = 12;
    reset();
    const float ms = least_ms_of_graph(stream, 5, [&] {
      for (int i = 0; i < kLaunches; i++)
        for (size_t part = 0; part < count; part++) parts[part].second(layers[i % kLayers], rows);
    });
    return 1e3 * ms / kLaunches;
  };
  const auto results = [&](const Parts& parts, int rows) {
    reset();
    std::vector<char> found((size_t)rows * (2 * kHidden + kQkv) * 4 * kLayers);
    char* to = found.data();
    for (const Layer& layer : layers) {
      for (const auto& part : parts) part.second(layer, rows);
      check(cudaStreamSynchronize(stream));
      for (const Rows& r : {x, y, qkv}) {
        check(cudaMemcpy(to, r.values, (size_t)rows * r.width * 4, cudaMemcpyDeviceToHost));
        to += (size_t)rows * r.width * 4;
      }
    }
    return found;
  };
  for (int rows : all) {
    std::vector<const Parts*> ways{&many};
    if (rows == 1) ways.push_back(&one);
    for (const Parts* parts : ways) {
      const std::vector<char> found = results(*parts, rows);
      double before = 0;
      std::printf("%d rows:", rows);
      for (size_t count = 1; count <= parts->size(); count++) {
        const double us = time_of(*parts, count, rows);
        std::printf("  %s %.1f", (*parts)[count - 1].first, us - before);
        before = us;
      }
      int tiles = 0;
      check(cudaMemcpy(&tiles, routing.tile_count, 4, cudaMemcpyDeviceToHost));
      const double experts = (double)tiles_bytes(2 * kInner, kHidden) + tiles_bytes(kHidden, kInner),
                   bytes = experts * tiles + tiles_bytes(kQkv, kHidden) + tiles_bytes(kHidden, kHeads) +
                           4.0 * kExperts * kHidden,
                   work = 2.0 * rows * kHidden * (3.0 * kInner * kTop + kQkv + kHeads);
      std::printf("  all %.1f: %.2f of bandwidth with %d tiles, %.2f of products\n", before,
                  bytes / kBandwidth / before, tiles, work / kRate / before);
      if (parts == &one) std::printf("  %s\n", found == results(many, rows) ? "the same bits" : "OTHER BITS");
    }
  }
}
