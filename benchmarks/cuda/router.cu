// The choice of experts of a layer of gpt-oss-20b, Qwen3-30B-A3B or Qwen3.6-35B-A3B, from the normed rows on:
// microseconds, alone the logits, and the bits of the result.
//   nvcc -std=c++17 -O3 -Inative -gencode=arch=compute_90a,code=sm_90a benchmarks/cuda/router.cu
//        native/cuda/kernels/{moe/experts,gemm/gemm_small_n}.cu -o router
//   router 20b|30b|35b rows,rows...
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/kernels/moe/moe.h"
#include "timing.h"

using namespace as::cuda;

int main(int argc, char** argv) {
  const std::string model = argc > 1 ? argv[1] : "20b";
  const bool large = model != "20b";
  const int hidden = large ? 2048 : 2880, experts = model == "35b" ? 256 : large ? 128 : 32, top = large ? 8 : 4;
  std::vector<int> all;
  for (char* at = std::strtok(argc > 2 ? argv[2] : strdup("32"), ","); at; at = std::strtok(nullptr, ","))
    all.push_back(std::atoi(at));
  const int most = *std::max_element(all.begin(), all.end());
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const Queue queue{stream, 90, {}};
  const auto random = [](size_t count, float size) {
    std::vector<float> values(count);
    for (float& v : values) v = size * (rand() / (float)RAND_MAX - 0.5f);
    float* to = memory<float>(count * 4);
    check(cudaMemcpy(to, values.data(), count * 4, cudaMemcpyHostToDevice));
    return to;
  };
  GemmArgs p;
  p.w = {experts, hidden, Kind::f32}, p.w.values = random((size_t)experts * hidden, 0.1f);
  p.x = {random((size_t)most * hidden, 2), nullptr, hidden},
  p.y = {memory<float>((size_t)most * experts * 4), nullptr, experts};
  p.bias = random(experts, 1);
  Routing routing;
  routing.top = top, routing.end = experts;
  place_routing(memory<char>(routing_bytes(most, top, experts)), most, experts, routing);
  check(cudaMemset(routing.ended, 0, 4));
  Router router;
  router.experts = experts, router.normalized = true;
  const auto time_of = [&](auto launch) {
    constexpr int kLaunches = 20;
    return 1e3 *
           least_ms_of_graph(stream, 5,
                             [&] {
                               for (int i = 0; i < kLaunches; i++) launch();
                             }) /
           kLaunches;
  };
  for (int rows : all) {
    const double logits = time_of([&] { gemm_small_n(p, rows, queue); });
    const double routed = time_of([&] { route(p, router, routing, nullptr, rows, 8, queue); });
    uint32_t bits = 0;
    const auto add = [&](const void* from, size_t count) {
      std::vector<uint32_t> values(count);
      check(cudaMemcpy(values.data(), from, count * 4, cudaMemcpyDeviceToHost));
      for (uint32_t value : values) bits = (bits ^ value) * 16777619u;
    };
    check(cudaStreamSynchronize(stream));
    add(p.y.values, (size_t)rows * experts), add(routing.shares, (size_t)rows * top), add(routing.tile_count, 1);
    std::printf("%d rows of %d experts: %.1f us, logits alone %.1f; %08x\n", rows, experts, routed, logits, bits);
  }
}
