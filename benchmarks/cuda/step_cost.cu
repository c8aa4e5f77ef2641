// Costs of a decode step besides its bytes: kernels of a graph with and without programmatic dependent launch, and grid
// barriers of one persistent kernel; then all of these while streaming Qwen2.5-7B's weights once. nvcc -O3
// -std=c++17 -gencode arch=compute_90a,code=sm_90a step_cost.cu && ./a.out
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>
#define CHECK(x)                                      \
  do {                                                \
    cudaError_t e_ = (x);                             \
    if (e_) {                                         \
      printf("%s: %s\n", #x, cudaGetErrorString(e_)); \
      exit(1);                                        \
    }                                                 \
  } while (0)

struct Piece {
  const uint4* data;
  size_t count;
};  // of 16 bytes

__device__ uint4 stream(Piece p, size_t first, size_t stride) {
  uint4 sum = {};
  size_t i = first;
  for (; i + 7 * stride < p.count; i += 8 * stride) {
    uint4 v[8];
#pragma unroll
    for (int u = 0; u < 8; u++)
      asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(v[u].x), "=r"(v[u].y), "=r"(v[u].z), "=r"(v[u].w)
                   : "l"(p.data + i + u * stride));
#pragma unroll
    for (int u = 0; u < 8; u++) sum.x ^= v[u].x, sum.y ^= v[u].y, sum.z ^= v[u].z, sum.w ^= v[u].w;
  }
  for (; i < p.count; i += stride) sum.x ^= p.data[i].x;
  return sum;
}

// dependent: waits for the kernel before only after it has asked the second level for its own first lines.
__global__ void read_kernel(Piece p, uint32_t* out, bool dependent, int ahead) {
  const size_t first = blockIdx.x * (size_t)blockDim.x + threadIdx.x, stride = (size_t)gridDim.x * blockDim.x;
  if (dependent) {
    for (int a = 0; a < ahead; a++)
      if (first + a * stride < p.count && threadIdx.x % 8 == 0)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(p.data + first + a * stride));
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  }
  const uint4 s = stream(p, first, stride);
  if ((s.x ^ s.y ^ s.z ^ s.w) == 12345) out[0] = s.x;
  if (first == 0) out[1]++;
}

// All pieces in one launch, with a barrier of the grid after each.
__global__ void persistent(const Piece* pieces, int n, unsigned* counter, uint32_t* out) {
  const size_t first = blockIdx.x * (size_t)blockDim.x + threadIdx.x, stride = (size_t)gridDim.x * blockDim.x;
  for (int k = 0; k < n; k++) {
    const uint4 s = stream(pieces[k], first, stride);
    if ((s.x ^ s.y ^ s.z ^ s.w) == 12345) out[0] = s.x;
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      atomicAdd(counter, 1);
      while (*(volatile unsigned*)counter < (unsigned)(k + 1) * gridDim.x) {}
      __threadfence();
    }
    __syncthreads();
  }
}

int main() {
  int sms;
  CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  const size_t h = 3584, sizes[4] = {4608 * h, h * h, 2 * 18944 * h, h * 18944};  // qkv, o, gate and up, down
  size_t total = 0;
  for (size_t s : sizes) total += 28 * s * 2;
  char* weights;
  uint32_t* out;
  unsigned* counter;
  CHECK(cudaMalloc(&weights, total));
  CHECK(cudaMemset(weights, 1, total));
  CHECK(cudaMalloc(&out, 4096));
  CHECK(cudaMalloc(&counter, 4));
  std::vector<Piece> full, none;
  size_t at = 0;
  for (int layer = 0; layer < 28; layer++)
    for (size_t s : sizes)
      full.push_back({(const uint4*)(weights + at), s * 2 / 16}), at += s * 2,
          none.push_back({(const uint4*)weights, 0});
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  auto best = [&](auto launch) {
    float least = 1e9;
    for (int i = 0; i < 12; i++) {
      CHECK(cudaEventRecord(begin, stream));
      launch();
      CHECK(cudaEventRecord(end, stream));
      CHECK(cudaEventSynchronize(end));
      float ms;
      CHECK(cudaEventElapsedTime(&ms, begin, end));
      least = std::min(least, ms);
    }
    return least * 1e3;
  };
  for (int which = 0; which < 2; which++) {
    const auto& pieces = which ? full : none;
    const double floor = which ? total / 4.44e6 : 0;  // us, at 4.44 TB/s
    printf("%s: %zu kernels; bytes alone %.0f us\n", which ? "weights of 7B" : "empty", pieces.size(), floor);
    for (int blocks = 1; blocks <= 4; blocks *= 2)
      for (int mode = 0; mode < 4; mode++) {  // plain, dependent launch, with 8 and with 32 lines ahead
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        for (const Piece& p : pieces) {
          cudaLaunchConfig_t config = {};
          config.gridDim = sms * blocks, config.blockDim = 256, config.stream = stream;
          cudaLaunchAttribute attribute;
          attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
          attribute.val.programmaticStreamSerializationAllowed = 1;
          if (mode) config.attrs = &attribute, config.numAttrs = 1;
          CHECK(cudaLaunchKernelEx(&config, read_kernel, p, out, mode > 0, mode < 2 ? 0 : mode == 2 ? 8 : 32));
        }
        CHECK(cudaStreamEndCapture(stream, &graph));
        CHECK(cudaGraphInstantiate(&exec, graph, 0));
        const double us = best([&] { CHECK(cudaGraphLaunch(exec, stream)); });
        const char* names[] = {"graph", "graph, dependent launch", "graph, dependent, 8 lines ahead",
                               "graph, dependent, 32 lines ahead"};
        printf("  %-34s %d blocks an SM: %8.1f us, %.2f us a kernel beyond the bytes\n", names[mode], blocks, us,
               (us - floor) / pieces.size());
        CHECK(cudaGraphExecDestroy(exec));
        CHECK(cudaGraphDestroy(graph));
      }
    Piece* device;
    CHECK(cudaMalloc(&device, pieces.size() * sizeof(Piece)));
    CHECK(cudaMemcpy(device, pieces.data(), pieces.size() * sizeof(Piece), cudaMemcpyHostToDevice));
    for (int blocks = 1; blocks <= 2; blocks++) {
      int n = (int)pieces.size();
      void* arguments[] = {&device, &n, &counter, &out};
      const double us = best([&] {
        CHECK(cudaMemsetAsync(counter, 0, 4, stream));
        CHECK(cudaLaunchCooperativeKernel(persistent, sms * blocks, 512, arguments, 0, stream));
      });
      printf("  %-34s %d blocks an SM: %8.1f us, %.2f us a barrier beyond the bytes\n", "one kernel, grid barriers",
             blocks, us, (us - floor) / n);
    }
    // a kernel alone, from memory: what its ramp-up and tail cost
    if (which)
      for (int m = 0; m < 4; m++) {
        const double us = best([&] { read_kernel<<<sms * 2, 256, 0, stream>>>(full[m], out, false, 0); });
        printf("  matrix %d alone: %.1f us for %.1f MB (%.1f us at 4.44 TB/s)\n", m, us, full[m].count * 16e-6,
               full[m].count * 16 / 4.44e6);
      }
  }
}
