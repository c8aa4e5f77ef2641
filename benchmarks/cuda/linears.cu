// GEMM at Qwen2.5-7B's shapes by each kernel alone: microseconds, and the fraction of the time that reading the weights
// takes.
//   nvcc -std=c++17 -O3 -Inative -gencode=arch=compute_90a,code=sm_90a benchmarks/cuda/linears.cu
//        native/cuda/kernel_choice.cpp
//        native/cuda/kernels/gemm/{gemm_{dtype16,split_k,stream_k,prefill,mma_prefill,f32},gemv}.cu
//        native/cuda/kernels/quantize/pack.cu -o linears
//   linears [rows,rows... [ranks]]
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "chosen.h"
#include "cuda/kernels/common/dtype16.h"
#include "timing.h"

using namespace as::cuda;

int main(int argc, char** argv) {
  struct {
    const char* name;
    int n, k;
    bool gated, adds;
  } shapes[] = {{"qkv", 4608, 3584, false, false},
                {"o", 3584, 3584, false, true},
                {"gate_up", 37888, 3584, true, false},
                {"down", 3584, 18944, false, true},
                {"head", 152064, 3584, false, false}};
  const struct {
    const char* name;
    GemmAlgo algo;
    int least, most;
  } kernels[] = {{"mma", GemmAlgo::mma, 1, 32},
                 {"split", GemmAlgo::split_k, 8, 256},
                 {"stream", GemmAlgo::stream_k, 1, 512},
                 {"wide", GemmAlgo::prefill, 17, 4096}};
  const int ranks = argc > 2 ? std::atoi(argv[2]) : 1;  // of which one's part is multiplied
  std::vector<int> all;
  for (char* at = std::strtok(argc > 1 ? argv[1] : strdup("1,8,16,32,64,128,256"), ","); at;
       at = std::strtok(nullptr, ","))
    all.push_back(std::atoi(at));
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  Queue queue{stream, 90, {}};
  queue.scratch = {memory<float>(kScratchCtas * kScratchFloats * 4), memory<int>(kScratchCtas * kScratchFlags * 4)};
  const int most_rows = 4096;
  uint16_t* x = memory<uint16_t>(tiles_bytes(most_rows, 18944));
  float* y = memory<float>((size_t)most_rows * 152064 * 4 / 8);
  uint16_t* gated = memory<uint16_t>(tiles_bytes(most_rows, 18944));
  AS_DTYPE16::fill_noise(x, tiles_bytes(most_rows, 18944), kDType16, 1, 99, queue);
  for (auto& shape : shapes) {
    (shape.adds ? shape.k : shape.n) /= ranks;
    const size_t bytes = tiles_bytes(shape.n, shape.k);
    const int copies = bytes > (200 << 20) ? 1 : (int)((400 << 20) / bytes) + 1,
              launches = bytes > (200 << 20) ? 10 : 32;
    std::vector<uint16_t*> weights;
    for (int i = 0; i < copies; i++) {
      weights.push_back(memory<uint16_t>(bytes));
      AS_DTYPE16::fill_noise(weights.back(), bytes, kDType16, 0.03f, i, queue);  // zeros take less power
    }
    for (int rows : all) {
      if (shape.n > 100000 && rows > 256) continue;
      std::printf("%-8s %4d rows:", shape.name, rows);
      for (const auto& kernel : kernels) {
        if (rows < kernel.least || rows > kernel.most) continue;
        GemmArgs p;
        p.w = {shape.n, shape.k, Kind::dtype16, kDType16, nullptr, nullptr, {}, max_split_k(shape.n)};
        const bool partial = shape.adds && ranks > 1;  // other ranks add to it
        p.adds = shape.adds && !partial, p.gated = shape.gated;
        p.x = {nullptr, x, shape.k};
        p.y = shape.gated ? Rows{nullptr, gated, shape.n / 2}
              : partial   ? Rows{nullptr, gated, shape.n}
                          : Rows{y, nullptr, shape.n};
        const auto run = [&] {
          for (int i = 0; i < launches; i++)
            p.w.tiles = weights[i % copies],
            AS_DTYPE16::gemm_dtype16(p, rows, queue, plain(p, rows, queue, kernel.algo));
        };
        run();
        check(cudaStreamSynchronize(stream));
        const double us = 1e3 * least_ms_of_graph(stream, 3, run) / launches;
        std::printf("  %s %.1f (%.2f)", kernel.name, us, bytes / 4.44e6 / us);
      }
      std::printf("\n");
    }
    for (uint16_t* w : weights) cudaFree(w);
  }
}
