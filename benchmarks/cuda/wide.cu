// Prefill GEMM (native/cuda/kernels/gemm/gemm_prefill.cu) with each tile size: bits against the kernel for fewer rows,
// and speed at the shapes of Qwen2.5-7B and, with `small`, 0.5B.
// `./wide [check] [time] [split] [tiles] [small] [rows=1024,8192] [qkv o gate_up down head]`: all matrices, or
// these. nvcc -O3 -std=c++17 -I../../../native -gencode arch=compute_90a,code=sm_90a wide.cu
//   ../../../native/cuda/kernels/gemm/{gemm_{dtype16,split_k,stream_k,mma_prefill},gemv}.cu -o wide
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cuda/kernels/gemm/gemm_prefill.cu"

using namespace as::cuda;
#define CHECK(x) must(x, #x)
void must(cudaError_t e, const char* what) {
  if (e) printf("%s: %s\n", what, cudaGetErrorString(e)), exit(1);
}

__device__ float noise(uint64_t i) {  // about normal
  i = (i + 1) * 0x9E3779B97F4A7C15ull, i ^= i >> 29, i *= 0xBF58476D1CE4E5B9ull, i ^= i >> 32;
  return ((int)(i & 0xffff) + (int)(i >> 16 & 0xffff) + (int)(i >> 32 & 0xffff) + (int)(i >> 48) - 131070) * 2.6e-5f;
}
__global__ void fill(uint16_t* tiles, size_t rows, int columns, float scale, uint64_t seed) {
  const size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
  if (i >= rows * columns) return;
  tiles[tile_offset(i / columns, i % columns, blocks_of(columns))] = to_dtype16(noise(i + seed) * scale);
}
__global__ void fill_floats(float* x, size_t count, uint64_t seed) {
  const size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
  if (i < count) x[i] = noise(i + seed);
}
__global__ void differ(const uint32_t* a, const uint32_t* b, size_t count, unsigned long long* n) {
  const size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
  if (i < count && a[i] != b[i]) atomicAdd(n, 1ull);
}

struct Problem {
  GemmArgs p;
  int rows;
  size_t y_bytes;
  void* y = nullptr;

  Problem(int n, int k, int rows, bool gated, bool adds, bool bias) : rows(rows) {
    const int blocks = (rows + 127) / 128 * 128;
    uint16_t *w, *x;
    CHECK(cudaMalloc(&w, tiles_bytes(n, k))), CHECK(cudaMalloc(&x, tiles_bytes(blocks, k)));
    CHECK(cudaMemset(w, 0, tiles_bytes(n, k))), CHECK(cudaMemset(x, 0, tiles_bytes(blocks, k)));
    fill<<<ceil_div((size_t)n * k, 256), 256>>>(w, n, k, 0.02f, 1);
    fill<<<ceil_div((size_t)rows * k, 256), 256>>>(x, rows, k, 1, 77);
    const int width = gated ? n / 2 : n;
    y_bytes = gated ? tiles_bytes(blocks, width) : (size_t)rows * width * 4;
    CHECK(cudaMalloc(&y, y_bytes));
    reset();
    p.w.n = n, p.w.k = k, p.w.kind = Kind::dtype16, p.w.tiles = w, p.w.max_split_k = max_split_k(n);
    p.x = {nullptr, x, k}, p.gated = gated, p.adds = adds;
    p.y = {gated ? nullptr : (float*)y, gated ? (uint16_t*)y : nullptr, width};
    float* b = nullptr;
    if (bias) CHECK(cudaMalloc(&b, (n + 1) * 4)), fill_floats<<<ceil_div(n, 256), 256>>>(b, n, 5);
    p.bias = b;
  }
  ~Problem() {
    CHECK(cudaFree((void*)p.w.tiles)), CHECK(cudaFree((void*)p.x.tiles)), CHECK(cudaFree(y)),
        CHECK(cudaFree((void*)p.bias));
  }
  void reset() {
    if (p.gated) CHECK(cudaMemset(y, 0, y_bytes));
    else fill_floats<<<ceil_div(y_bytes / 4, 256), 256>>>((float*)y, y_bytes / 4, 9);
  }
};

Queue queue{nullptr, 90};
std::vector<Choice> choices(const Problem& a) {
  const bool one = SplitK(a.p.w.k, a.p.w.max_split_k).count == 1;
  std::vector<Choice> found;
  for (const Choice& choice : kTiles)
    if ((choice.sums == Sums::whole) == one && choice.cost(a.p.w, a.rows, choice.nanoseconds) < INT64_MAX)
      found.push_back(choice);
  return found;
}
// choice: null for what gemm_prefill() chooses, &kSplit for the kernel of some rows.
const Choice kSplit{};
void by(const Choice* choice, const Problem& a) {
  if (choice == &kSplit) return gemm_split_k(a.p, a.rows, queue);
  if (!choice) return gemm_prefill(a.p, a.rows, queue);
  choice->start(a.p, a.rows, choice->nanoseconds, queue);
}

unsigned long long* counter;

void check(int n, int k, int rows, bool gated, bool adds, bool bias) {
  Problem a(n, k, rows, gated, adds, bias);
  a.reset(), by(&kSplit, a);
  void* expected;
  CHECK(cudaMalloc(&expected, a.y_bytes)), CHECK(cudaMemcpy(expected, a.y, a.y_bytes, cudaMemcpyDeviceToDevice));
  printf("%d x %d, %d rows%s%s%s: differ", n, k, rows, gated ? ", gated" : "", adds ? ", adds" : "",
         bias ? ", bias" : "");
  for (const Choice& choice : choices(a)) {
    CHECK(cudaMemset(counter, 0, 8));
    a.reset(), by(&choice, a);
    differ<<<ceil_div(a.y_bytes / 4, 256), 256>>>((uint32_t*)a.y, (uint32_t*)expected, a.y_bytes / 4, counter);
    unsigned long long found;
    CHECK(cudaMemcpy(&found, counter, 8, cudaMemcpyDeviceToHost));
    printf(" %llu", found);
  }
  printf("\n");
  CHECK(cudaFree(expected));
}

float seconds(const Choice* choice, const Problem& a, int times) {
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin)), CHECK(cudaEventCreate(&end));
  by(choice, a);
  CHECK(cudaEventRecord(begin));
  for (int i = 0; i < times; i++) by(choice, a);
  CHECK(cudaEventRecord(end)), CHECK(cudaEventSynchronize(end));
  float ms;
  CHECK(cudaEventElapsedTime(&ms, begin, end));
  CHECK(cudaEventDestroy(begin)), CHECK(cudaEventDestroy(end));
  return ms / times * 1e-3f;
}

int main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  CHECK(cudaMalloc(&counter, 8));
  CHECK(cudaMalloc(&queue.scratch.sums, sizeof(float) * kScratchCtas * kScratchFloats));
  CHECK(cudaMalloc(&queue.scratch.flags, sizeof(int) * kScratchCtas * kScratchFlags));
  CHECK(cudaMemset(queue.scratch.flags, 0, sizeof(int) * kScratchCtas * kScratchFlags));
  const auto asked = [&](const char* what) {
    for (int i = 1; i < argc; i++)
      if (!strcmp(argv[i], what)) return true;
    return false;
  };
  std::vector<int> sizes;
  for (int i = 1; i < argc; i++)
    if (!strncmp(argv[i], "rows=", 5))
      for (char* at = argv[i] + 5; *at; at += *at == ',') sizes.push_back(strtol(at, &at, 10));
  if (asked("check")) {
    check(384, 64, 128, false, false, false), check(384, 3584, 256, false, false, false);
    check(1152, 3584, 1000, false, true, true), check(2 * 1216, 896, 321, true, false, false);
    check(3584, 18944, 700, false, true, false), check(1036, 900, 301, false, false, true);
    check(2 * 328, 1000, 530, true, false, true), check(4608, 3584, 1024, false, false, true);
    check(2 * 8232, 1000, 430, true, false, true), check(16396, 900, 301, false, true, false);
    check(2 * 9000, 1000, 700, true, false, true), check(2900, 1100, 3000, false, true, true);
  }
  struct Linear {
    const char* name;
    int n, k;
    bool gated, adds, bias;
  };
  const Linear large[] = {{"qkv", 4608, 3584, false, false, true},
                          {"o", 3584, 3584, false, true, false},
                          {"gate_up", 37888, 3584, true, false, false},
                          {"down", 3584, 18944, false, true, false},
                          {"head", 152064, 3584, false, false, false}};
  const Linear small[] = {{"qkv", 1152, 896, false, false, true},
                          {"o", 896, 896, false, true, false},
                          {"gate_up", 9728, 896, true, false, false},
                          {"down", 896, 4864, false, true, false},
                          {"head", 151936, 896, false, false, false}};
  for (int rows : sizes) {
    double all = 0, work = 0;
    for (const auto& s : asked("small") ? small : large) {
      if (!asked(s.name) && (rows > 512 && s.n > 100000 || asked("qkv") || asked("o") || asked("gate_up") ||
                             asked("down") || asked("head")))
        continue;
      Problem a(s.n, s.k, rows, s.gated, s.adds, s.bias);
      const double operations = 2.0 * rows * s.n * s.k;
      const int times = std::max(3, (int)(2e13 / operations));
      printf("%d rows, %s:", rows, s.name);
      if (asked("time")) {
        const float t = seconds(nullptr, a, times);
        all += t, work += operations;
        printf(" %.1f us, %.0f TFLOP/s", t * 1e6, operations / t / 1e12);
      }
      if (asked("split")) printf("; split %.0f", operations / seconds(&kSplit, a, times) / 1e12);
      if (asked("tiles"))
        for (const Choice& c : choices(a))
          printf("; %d/%dx%d %.0f", c.columns, c.down, c.across, operations / seconds(&c, a, times) / 1e12);
      printf("\n");
    }
    if (all > 0) printf("%d rows: %.1f us a layer, %.0f TFLOP/s\n", rows, all * 1e6, work / all / 1e12);
  }
  CHECK(cudaDeviceSynchronize());
}
