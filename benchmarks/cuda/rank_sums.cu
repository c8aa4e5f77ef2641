// All-reduce over two ranks after the GEMMs that make the partial sums, in layers of Qwen2.5-7B's shape or, as `70b`,
// of Llama-3.3-70B's, replayed as a graph: microseconds that a sum (with its add and norm) adds. Variants of how
// partial sums reach the other rank: read by the sum's kernel, pushed by it, or pushed by the GEMM. All must give the
// same bits on both ranks.
//   nvcc -std=c++17 -O3 -Inative -gencode=arch=compute_90a,code=sm_90a benchmarks/cuda/rank_sums.cu
//        native/cuda/kernel_choice.cpp
//        native/cuda/kernels/{gemm/{gemm_{dtype16,split_k,stream_k,prefill,mma_prefill},gemv},quantize/pack,
//        comm/sum_ranks}.cu
//        -o rank_sums
//   rank_sums [rows,rows... [70b]]
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "chosen.h"
#include "cuda/kernels/common/dtype16.h"
#include "timing.h"

using namespace as::cuda;

__global__ void next_step(int* step) { ++*step; }

constexpr int kRanks = 2, kLayers = 14, kCopies = 4, kMost = 2048;
enum Way { alone, pulled, by_sum, by_product, kWays };
const char* const kNames[] = {"products", "read", "pushed by sums", "by products"};

struct Rank {
  cudaStream_t stream;
  Queue queue;
  uint16_t *weights[2][kCopies], *x[2], *normed;
  float *y, *ones;
  char* shared;
  int *step, *failed;
  Peers peers;
  cudaEvent_t begin, end;
  cudaGraphExec_t replay;
};

int main(int argc, char** argv) {
  int devices = 0;
  check(cudaGetDeviceCount(&devices));
  if (devices < kRanks) return std::printf("needs %d GPUs\n", kRanks), 1;
  const bool large = argc > 2 && !std::strcmp(argv[2], "70b");
  const int hidden = large ? 8192 : 3584, inner[2] = {large ? 4096 : 1792, large ? 14336 : 9472};
  std::vector<int> all;
  for (char* at = std::strtok(argc > 1 ? argv[1] : strdup("1,8,32,64,128,256,512,1024,2048"), ","); at;
       at = std::strtok(nullptr, ","))
    all.push_back(std::atoi(at));
  const size_t half = tiles_bytes(kMost, hidden), places = tiles_bytes(kPushedRows, hidden), header = 4096;
  Rank ranks[kRanks];
  const auto on_each = [&](auto work) {
    std::vector<std::thread> threads;
    for (int r = 0; r < kRanks; r++) threads.emplace_back([&, r] { check(cudaSetDevice(r)), work(r, ranks[r]); });
    for (std::thread& thread : threads) thread.join();
  };
  on_each([&](int r, Rank& k) {
    check(cudaDeviceEnablePeerAccess(1 - r, 0));
    check(cudaStreamCreateWithFlags(&k.stream, cudaStreamNonBlocking));
    k.queue = {k.stream, 90, {}};
    k.queue.scratch = {memory<float>(kScratchCtas * kScratchFloats * 4), memory<int>(kScratchCtas * kScratchFlags * 4),
                       memory<float>(kScratchParts * 4), memory<int>(kScratchCounts * 4)};
    for (int i = 0; i < 2; i++) {
      for (int c = 0; c < kCopies; c++) {
        const size_t bytes = tiles_bytes(hidden, inner[i]);
        k.weights[i][c] = memory<uint16_t>(bytes);
        AS_DTYPE16::fill_noise(k.weights[i][c], bytes, kDType16, 0.05f, 100 * r + 10 * i + c, k.queue);
      }
      const size_t bytes = tiles_bytes(kMost, inner[i]);
      k.x[i] = memory<uint16_t>(bytes);
      AS_DTYPE16::fill_noise(k.x[i], bytes, kDType16, 1, 1000 + 10 * r + i, k.queue);
    }
    k.normed = memory<uint16_t>(half), k.y = memory<float>((size_t)kMost * hidden * 4);
    k.ones = memory<float>(hidden * 4, 0x3f);
    k.shared = memory<char>(header + 2 * half + 2 * kRanks * places);
    check(cudaMemset(k.shared + header + 2 * half, 0xff, 2 * kRanks * places));
    k.step = memory<int>(4);
    check(cudaMallocHost(&k.failed, 4));
    *k.failed = 0;
    check(cudaEventCreate(&k.begin)), check(cudaEventCreate(&k.end));
    check(cudaDeviceSynchronize());
  });
  for (int r = 0; r < kRanks; r++) {
    Peers& p = ranks[r].peers;
    p.rank = r, p.world = kRanks, p.buffer_bytes = half, p.step = ranks[r].step, p.failed = ranks[r].failed;
    p.limit = 2000000000ull;
    for (int o = 0; o < kRanks; o++) {
      p.partials[o] = ranks[o].shared + header, p.flags[o] = reinterpret_cast<uint32_t*>(ranks[o].shared);
      p.pushed[o] = ranks[o].shared + header + 2 * half;
    }
  }
  std::printf("us of o + down, and of each sum beside it; of the link alone, copying as many bytes both ways:\n");
  for (int rows : all) {
    double us[kWays] = {};
    std::vector<float> found[kWays][kRanks];
    for (int way = 0; way < kWays; way++) {
      if (way > pulled && rows > kPushedRows) continue;
      const auto queue_all = [&](int r, Rank& k) {
        Peers peers = k.peers;
        if (way > pulled) peers.pushed_bytes = places;
        int call = 0;
        for (int layer = 0; layer < kLayers; layer++)
          for (int i = 0; i < 2; i++, call++) {
            GemmArgs p;
            p.w = {hidden, inner[i],           Kind::dtype16, kDType16, nullptr, k.weights[i][layer % kCopies],
                   {},     max_split_k(hidden)};
            p.x = {nullptr, k.x[i], inner[i]};
            p.y = {nullptr, reinterpret_cast<uint16_t*>(k.shared + header + call % 2 * half), hidden};
            if (way == by_product) p.y.copy = reinterpret_cast<uint16_t*>(peers.place(1 - r, r, call));
            AS_DTYPE16::gemm_dtype16(p, rows, k.queue, plain(p, rows, k.queue));
            if (way == alone) continue;
            RankSum s;
            s.peers = peers, s.call = call, s.calls = 2 * kLayers, s.is_dtype16 = true, s.dtype = kDType16,
            s.adds = true;
            s.on_its_way = way == by_product;
            s.y = {k.y, nullptr, hidden}, s.norm = {k.ones, 1e-6f, false}, s.normed = {nullptr, k.normed, hidden};
            AS_DTYPE16::sum_ranks(s, rows, k.queue);
          }
        next_step<<<1, 1, 0, k.stream>>>(k.step);
      };
      on_each([&](int r, Rank& k) {
        check(cudaMemsetAsync(k.y, 0, (size_t)rows * hidden * 4, k.stream));
        queue_all(r, k);
        check(cudaStreamSynchronize(k.stream));
        found[way][r].resize((size_t)rows * hidden);
        check(cudaMemcpy(found[way][r].data(), k.y, found[way][r].size() * 4, cudaMemcpyDeviceToHost));
        cudaGraph_t graph;
        check(cudaStreamBeginCapture(k.stream, cudaStreamCaptureModeThreadLocal));
        queue_all(r, k);
        check(cudaStreamEndCapture(k.stream, &graph));
        check(cudaGraphInstantiate(&k.replay, graph, 0));
        cudaGraphDestroy(graph);
      });
      double best = 1e9;
      for (int turn = 0; turn < 8; turn++) {
        float ms[kRanks];
        on_each([&](int r, Rank& k) {
          for (int i = 0; i < 2; i++) {  // the first aligns the ranks
            if (i) check(cudaEventRecord(k.begin, k.stream));
            check(cudaGraphLaunch(k.replay, k.stream));
          }
          check(cudaEventRecord(k.end, k.stream));
          check(cudaEventSynchronize(k.end));
          check(cudaEventElapsedTime(&ms[r], k.begin, k.end));
        });
        if (turn && ms[0] < best) best = ms[0];
      }
      us[way] = 1e3 * best / kLayers;
      for (Rank& k : ranks) cudaGraphExecDestroy(k.replay);
    }
    std::printf("%5d rows: %s %.1f", rows, kNames[0], us[0]);
    for (int way = pulled; way < kWays; way++) {
      if (!us[way]) continue;
      bool same = true;
      double sum = 0;
      for (int r = 0; r < kRanks; r++) same = same && found[way][r] == found[pulled][0];
      for (float value : found[way][0]) sum += (double)value * value;
      std::printf("   %s %.2f (%s, rms %.2f)", kNames[way], (us[way] - us[alone]) / 2,
                  same ? "same bits" : "BITS DIFFER", sqrt(sum / found[way][0].size()));
    }
    float copies[kRanks];
    on_each([&](int r, Rank& k) {
      constexpr int kTimes = 20;
      for (int i = 0; i <= kTimes; i++) {
        if (i == 1) check(cudaEventRecord(k.begin, k.stream));
        check(cudaMemcpyPeerAsync(k.y, r, ranks[1 - r].shared + header, 1 - r, tiles_bytes(rows, hidden), k.stream));
      }
      check(cudaEventRecord(k.end, k.stream));
      check(cudaEventSynchronize(k.end));
      check(cudaEventElapsedTime(&copies[r], k.begin, k.end));
      copies[r] /= kTimes;
    });
    std::printf("   link %.1f", 1e3 * copies[0]);
    std::printf("%s\n", *ranks[0].failed || *ranks[1].failed ? "  A RANK DID NOT COME" : "");
    std::fflush(stdout);
  }
}
