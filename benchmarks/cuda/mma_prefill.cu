// GEMMs of many rows without wgmma (gemm_mma_prefill.cu) at Qwen2.5-7B's shapes, by each shape of tiles: TFLOP/s, and
// bits (=) against gemm_mma.cuh. The columns: mma, wgmma, the chosen tiles, then those that kChoices lists in order.
//   nvcc -std=c++17 -O3 -Inative -gencode=arch=compute_90a,code=sm_90a benchmarks/cuda/mma_prefill.cu
//        native/cuda/kernels/gemm/{gemm_{dtype16,split_k,stream_k,prefill,mma_prefill},gemv}.cu
//        native/cuda/kernels/{common/stall,quantize/pack}.cu -o mma_prefill
//   mma_prefill [128,256,1024]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/kernels/by_dtype16.h"
#include "cuda/kernels/gemm/gemm_wgmma.h"
#include "timing.h"

using namespace as::cuda;

struct Shape {
  const char* name;
  int n, k;
  bool gated, adds;
};
constexpr Shape kShapes[] = {{"qkv", 4608, 3584, false, false},
                             {"o", 3584, 3584, false, true},
                             {"gate_up", 37888, 3584, true, false},
                             {"down", 3584, 18944, false, true}};
constexpr int kMma = -3, kWgmma = -2, kChosen = -1, kTiles = 6, kMost = 16384;

int main(int argc, char** argv) {
  std::string list = argc > 1 ? argv[1] : "128,256,512,1024,2048,16384";
  std::vector<int> all;
  for (char* at = std::strtok(&list[0], ","); at; at = std::strtok(nullptr, ",")) all.push_back(std::atoi(at));
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  Queue queue{stream, 90, {}};
  queue.scratch = {memory<float>(kScratchCtas * kScratchFloats * 4), memory<int>(kScratchCtas * kScratchFlags * 4)};
  uint16_t* x = memory<uint16_t>(tiles_bytes(kMost, 18944));
  uint16_t* gated = memory<uint16_t>(tiles_bytes(kMost, 18944));
  float* y = memory<float>((size_t)kMost * 4608 * 4);
  AS_DTYPE16::fill_noise(x, tiles_bytes(kMost, 18944), kDType16, 1, 99, queue);
  for (const Shape& shape : kShapes) {
    uint16_t* w = memory<uint16_t>(tiles_bytes(shape.n, shape.k));
    AS_DTYPE16::fill_noise(w, tiles_bytes(shape.n, shape.k), kDType16, 0.03f, 5, queue);
    GemmArgs p;
    p.w = {shape.n, shape.k, Kind::dtype16, kDType16, nullptr, w, {}, max_split_k(shape.n)};
    p.adds = shape.adds, p.gated = shape.gated, p.x = {nullptr, x, shape.k};
    p.y = shape.gated ? Rows{nullptr, gated, shape.n / 2} : Rows{y, nullptr, shape.n};
    const auto launch = [&](int which, int rows) {
      if (which == kMma) AS_DTYPE16::gemm_dtype16(p, rows, queue, GemmAlgo::mma);
      else if (which == kWgmma) AS_DTYPE16::gemm_dtype16(p, rows, queue, GemmAlgo::prefill);
      else AS_DTYPE16::gemm_mma_prefill(p, rows, queue, which);
    };
    for (int rows : all) {
      std::printf("%-8s %5d:", shape.name, rows);
      std::vector<char> expected, found;
      for (int which = kMma; which < kTiles; which++) {
        // The first two tiles are for whole sums.
        if ((which >= 0 && which < 2 && max_split_k(shape.n) > 1) || (which == kMma && rows > 2048)) continue;
        const char* verdict = "";
        if (rows <= 2048) {
          const int some = rows - 3;  // an odd number
          const size_t bytes = shape.gated ? tiles_bytes(some, shape.n / 2) : (size_t)some * shape.n * 4;
          void* out = shape.gated ? (void*)gated : (void*)y;
          check(cudaMemsetAsync(out, 0, bytes, stream));
          launch(which, some);
          check(cudaStreamSynchronize(stream));
          std::vector<char>& to = which == kMma ? expected : found;
          to.resize(bytes);
          check(cudaMemcpy(to.data(), out, bytes, cudaMemcpyDeviceToHost));
          verdict = which == kMma ? "" : expected == found ? "=" : " DIFFERS";
        }
        const int launches = rows > 4096 ? 3 : rows > 1024 ? 10 : 30;
        const float least = least_ms(stream, 3, [&] {
          for (int j = 0; j < launches; j++) launch(which, rows);
        });
        const char* name = which == kMma ? "mma " : which == kWgmma ? "wgmma " : which == kChosen ? "chosen " : "";
        std::printf(" %s%.0f%s", name, 2e-9 * rows * shape.n * shape.k * launches / least, verdict);
      }
      std::printf("\n");
      std::fflush(stdout);
    }
    check(cudaFree(w));
  }
}
