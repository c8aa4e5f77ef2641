// All-reduce in rank order over peer memory on two GPUs of one process: one-shot (each rank reads all partial sums) and
// two-shot (each rank sums its part, then gathers), with bf16 or fp32 partial sums, replayed as a graph of 56 per step.
// Sums are fp32, in rank order. nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a all_reduce.cu && ./a.out
#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>
#define CHECK(x)                                      \
  do {                                                \
    cudaError_t e_ = (x);                             \
    if (e_) {                                         \
      printf("%s: %s\n", #x, cudaGetErrorString(e_)); \
      exit(1);                                        \
    }                                                 \
  } while (0)

constexpr int kRanks = 2, kMaxBlocks = 64;
struct Shared {                           // of a rank, readable and writable by all
  uint32_t flags[2][kRanks][kMaxBlocks];  // phase, from rank, block: how many calls have come that far
};
struct Peers {
  char* data[kRanks];    // partials: two buffers in turn
  char* result[kRanks];  // two-shot: sums of one's part
  Shared* shared[kRanks];
};

__device__ void signal_and_wait(const Peers& p, int rank, int phase, uint32_t call) {
  __syncthreads();
  if (threadIdx.x < kRanks) {
    const int r = threadIdx.x;
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(&p.shared[r]->flags[phase][rank][blockIdx.x]), "r"(call)
                 : "memory");
    uint32_t seen;
    do
      asm volatile("ld.acquire.sys.global.u32 %0, [%1];"
                   : "=r"(seen)
                   : "l"(&p.shared[rank]->flags[phase][r][blockIdx.x])
                   : "memory");
    while ((int32_t)(seen - call) < 0);
  }
  __syncthreads();
}

template <class E>
__device__ void add(float* sum, uint4 v) {
  if constexpr (sizeof(E) == 2) {
    const __nv_bfloat162* x = (const __nv_bfloat162*)&v;
    for (int i = 0; i < 4; i++) sum[2 * i] += __low2float(x[i]), sum[2 * i + 1] += __high2float(x[i]);
  } else {
    const float* x = (const float*)&v;
    for (int i = 0; i < 4; i++) sum[i] += x[i];
  }
}
template <class E>
__device__ uint4 pack(const float* sum) {
  uint4 v;
  if constexpr (sizeof(E) == 2)
    for (int i = 0; i < 4; i++) ((__nv_bfloat162*)&v)[i] = __floats2bfloat162_rn(sum[2 * i], sum[2 * i + 1]);
  else
    for (int i = 0; i < 4; i++) ((float*)&v)[i] = sum[i];
  return v;
}

// x [n vectors of 16 bytes] of this rank is already in its shared buffer (the product before writes it there).
template <class E, bool kTwoShot>
__global__ void all_reduce(Peers p, int rank, uint4* y, int n, uint32_t* calls) {
  const uint32_t call = calls[blockIdx.x] + 1;
  const int half = call & 1;
  const size_t room = (size_t)1 << 25;
  signal_and_wait(p, rank, 0, call);
  const int threads = gridDim.x * blockDim.x, first = blockIdx.x * blockDim.x + threadIdx.x;
  if (!kTwoShot) {
    for (int i = first; i < n; i += threads) {
      float sum[8] = {};
      uint4 v[kRanks];
      for (int r = 0; r < kRanks; r++) v[r] = ((const uint4*)(p.data[r] + half * room))[i];
      for (int r = 0; r < kRanks; r++) add<E>(sum, v[r]);
      y[i] = pack<E>(sum);
    }
  } else {
    const int part = (n + kRanks - 1) / kRanks;
    for (int i = rank * part + first; i < min(n, (rank + 1) * part); i += threads) {
      float sum[8] = {};
      for (int r = 0; r < kRanks; r++) add<E>(sum, ((const uint4*)(p.data[r] + half * room))[i]);
      ((uint4*)(p.result[rank] + half * room))[i] = pack<E>(sum);
    }
    signal_and_wait(p, rank, 1, call);  // block b of each rank summed what block b of the others gathers
    for (int r = 0; r < kRanks; r++)
      for (int i = r * part + first; i < min(n, (r + 1) * part); i += threads)
        y[i] = ((const uint4*)(p.result[r] + half * room))[i];
  }
  if (threadIdx.x == 0) calls[blockIdx.x] = call;
}

int main() {
  int devices;
  CHECK(cudaGetDeviceCount(&devices));
  if (devices < kRanks) {
    printf("needs %d GPUs, has %d\n", kRanks, devices);
    return 0;
  }
  Peers p;
  uint4* y[kRanks];
  uint32_t* calls[kRanks];
  cudaStream_t streams[kRanks];
  cudaEvent_t begin[kRanks], end[kRanks];
  for (int r = 0; r < kRanks; r++) {
    CHECK(cudaSetDevice(r));
    for (int o = 0; o < kRanks; o++)
      if (o != r) CHECK(cudaDeviceEnablePeerAccess(o, 0));
    CHECK(cudaMalloc(&p.data[r], (size_t)2 << 25));
    CHECK(cudaMalloc(&p.result[r], (size_t)2 << 25));
    CHECK(cudaMalloc(&p.shared[r], sizeof(Shared)));
    CHECK(cudaMemset(p.shared[r], 0, sizeof(Shared)));
    CHECK(cudaMalloc(&y[r], (size_t)1 << 25));
    CHECK(cudaMalloc(&calls[r], kMaxBlocks * 4));
    CHECK(cudaMemset(calls[r], 0, kMaxBlocks * 4));
    std::vector<__nv_bfloat16> x((size_t)2 << 24);
    for (size_t i = 0; i < x.size(); i++) x[i] = __float2bfloat16(((i * 2654435761u + r * 97) % 1000) / 500.f - 1);
    CHECK(cudaMemcpy(p.data[r], x.data(), x.size() * 2, cudaMemcpyHostToDevice));
    CHECK(cudaStreamCreate(&streams[r]));
    CHECK(cudaEventCreate(&begin[r]));
    CHECK(cudaEventCreate(&end[r]));
    CHECK(cudaDeviceSynchronize());
  }
  constexpr int kCalls = 56;
  printf("us an all-reduce of [rows, 3584], best over blocks (number of blocks):\n%6s %22s %22s %22s %22s\n", "rows",
         "one-shot bf16", "two-shot bf16", "one-shot fp32", "two-shot fp32");
  for (int rows : {1, 8, 32, 128, 256, 1024}) {
    printf("%6d", rows);
    for (int kind = 0; kind < 4; kind++) {
      const int bytes = rows * 3584 * (kind < 2 ? 2 : 4), n = bytes / 16;
      double least = 1e9;
      int with = 0;
      for (int blocks : {1, 2, 4, 8, 16, 32, 64}) {
        cudaGraphExec_t exec[kRanks];
        for (int r = 0; r < kRanks; r++) {
          CHECK(cudaSetDevice(r));
          cudaGraph_t graph;
          CHECK(cudaStreamBeginCapture(streams[r], cudaStreamCaptureModeThreadLocal));
          for (int c = 0; c < kCalls; c++) {
            if (kind == 0) all_reduce<__nv_bfloat16, false><<<blocks, 512, 0, streams[r]>>>(p, r, y[r], n, calls[r]);
            if (kind == 1) all_reduce<__nv_bfloat16, true><<<blocks, 512, 0, streams[r]>>>(p, r, y[r], n, calls[r]);
            if (kind == 2) all_reduce<float, false><<<blocks, 512, 0, streams[r]>>>(p, r, y[r], n, calls[r]);
            if (kind == 3) all_reduce<float, true><<<blocks, 512, 0, streams[r]>>>(p, r, y[r], n, calls[r]);
          }
          CHECK(cudaStreamEndCapture(streams[r], &graph));
          CHECK(cudaGraphInstantiate(&exec[r], graph, 0));
        }
        for (int turn = 0; turn < 6; turn++) {
          double us[kRanks];
          std::vector<std::thread> threads;
          for (int r = 0; r < kRanks; r++)
            threads.emplace_back([&, r] {
              CHECK(cudaSetDevice(r));
              CHECK(cudaEventRecord(begin[r], streams[r]));
              CHECK(cudaGraphLaunch(exec[r], streams[r]));
              CHECK(cudaEventRecord(end[r], streams[r]));
              CHECK(cudaEventSynchronize(end[r]));
              float ms;
              CHECK(cudaEventElapsedTime(&ms, begin[r], end[r]));
              us[r] = ms * 1e3 / kCalls;
            });
          for (auto& t : threads) t.join();
          if (turn && std::min(us[0], us[1]) < least) least = std::min(us[0], us[1]), with = blocks;
        }
        for (int r = 0; r < kRanks; r++) CHECK(cudaGraphExecDestroy(exec[r]));
      }
      printf(" %14.2f (%2d)    ", least, with);
      fflush(stdout);
    }
    printf("\n");
  }
  // both ranks must hold the same bits, and the right sum
  std::vector<uint16_t> a(3584), b(3584), x(3584), z(3584);
  for (int r = 0; r < kRanks; r++) {
    CHECK(cudaSetDevice(r));
    CHECK(cudaMemset(calls[r], 0, kMaxBlocks * 4));
    CHECK(cudaMemset(p.shared[r], 0, sizeof(Shared)));
    CHECK(cudaDeviceSynchronize());
  }
  for (int r = 0; r < kRanks; r++) {
    CHECK(cudaSetDevice(r));
    all_reduce<__nv_bfloat16, true><<<4, 512, 0, streams[r]>>>(p, r, y[r], 3584 * 2 / 16, calls[r]);
  }
  for (int r = 0; r < kRanks; r++) CHECK(cudaStreamSynchronize(streams[r]));
  CHECK(cudaMemcpy(a.data(), y[0], 7168, cudaMemcpyDefault));
  CHECK(cudaMemcpy(b.data(), y[1], 7168, cudaMemcpyDefault));
  CHECK(cudaMemcpy(x.data(), p.data[0] + ((size_t)1 << 25), 7168, cudaMemcpyDefault));
  CHECK(cudaMemcpy(z.data(), p.data[1] + ((size_t)1 << 25), 7168, cudaMemcpyDefault));
  int differ = 0, wrong = 0;
  auto f = [](uint16_t u) {
    uint32_t w = (uint32_t)u << 16;
    float v;
    memcpy(&v, &w, 4);
    return v;
  };
  for (int i = 0; i < 3584; i++) differ += a[i] != b[i], wrong += fabs(f(a[i]) - (f(x[i]) + f(z[i]))) > 0.01;
  printf("ranks differ in %d of 3584, wrong %d\n", differ, wrong);
}
