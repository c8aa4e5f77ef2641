// Prefill attention (native/cuda/kernels/attention/attention_prefill_wgmma.cu and attention_prefill_wide.cu) at the
// shape of Qwen2.5-7B, Qwen2.5-0.5B, Qwen3.6-35B-A3B or gpt-oss: its bits against the mma.sync kernel's, and the time
// of both. `./attend_prefill [small] [1x8192 ...] [wide] [1x8192 ...]`: sequences x rows, without earlier context;
// `small` selects 0.5B, `wide` 35B-A3B and `oss` gpt-oss for the arguments after it; windowW, sinks and float8 (the
// cache) do what they say.
// nvcc -O3 -std=c++17 -I../../native -gencode arch=compute_90a,code=sm_90a attend_prefill.cu
//   ../../native/cuda/kernels/attention/attention_prefill_{mma,wide}.cu -o attend
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cuda/kernels/attention/attention_mma.h"
#include "cuda/kernels/attention/attention_prefill_wgmma.cu"

using namespace as::cuda;
#define CHECK(x) must(x, #x)
void must(cudaError_t e, const char* what) {
  if (e) printf("%s: %s\n", what, cudaGetErrorString(e)), exit(1);
}

__device__ float noise(uint64_t i) {  // about normal
  i = (i + 1) * 0x9E3779B97F4A7C15ull, i ^= i >> 29, i *= 0xBF58476D1CE4E5B9ull, i ^= i >> 32;
  return ((int)(i & 0xffff) + (int)(i >> 16 & 0xffff) + (int)(i >> 32 & 0xffff) + (int)(i >> 48) - 131070) * 2.6e-5f;
}
__global__ void fill(float* x, uint16_t* y, bool float8, size_t count, uint64_t seed) {
  const size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
  if (i >= count) return;
  if (x) x[i] = noise(i + seed);
  else y[i] = float8 ? two_e4m3(noise(2 * i + seed), noise(2 * i + 1 + seed)) : to_dtype16(noise(i + seed));
}
__global__ void differ(const uint32_t* a, const uint32_t* b, size_t count, unsigned long long* n) {
  const size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
  if (i < count && a[i] != b[i]) atomicAdd(n, 1ull);
}

int main(int argc, char** argv) {
  constexpr int kSpan = 32;
  int heads = 28, kv_heads = 4, dim = 128, width = (heads + 2 * kv_heads) * dim, window = 0;
  bool sinks = false;
  CacheType type = CacheType::dtype16;
  const Queue queue{nullptr, 90};
  for (int c = 1; c < argc; c++) {
    if (!strcmp(argv[c], "small")) {
      heads = 14, kv_heads = 2, dim = 64, width = (heads + 2 * kv_heads) * dim;
      continue;
    }
    if (!strcmp(argv[c], "wide")) {
      heads = 16, kv_heads = 2, dim = 256, width = (heads + 2 * kv_heads) * dim;
      continue;
    }
    if (!strcmp(argv[c], "oss")) {
      heads = 64, kv_heads = 8, dim = 64, width = (heads + 2 * kv_heads) * dim;
      continue;
    }
    if (sscanf(argv[c], "window%d", &window) == 1) continue;
    if (!strcmp(argv[c], "sinks")) {
      sinks = true;
      continue;
    }
    if (!strcmp(argv[c], "float8")) {
      type = CacheType::float8;
      continue;
    }
    int sequences = 1, length = 1;
    sscanf(argv[c], "%dx%d", &sequences, &length);
    const int rows = sequences * length, spans = (length + kSpan - 1) / kSpan;
    Attention a;
    a.cache = {nullptr, type, kSpan, kv_heads, dim, dim};
    a.group = heads / kv_heads, a.queries = heads, a.scale = 1 / sqrtf(dim), a.width = width, a.window = window;
    const size_t cache = a.cache.span_bytes() * spans * sequences, out = tiles_bytes(rows, heads * dim);
    float* qkv;
    uint16_t *data, *results[2];
    AttentionTile* device_tiles;
    int* tables;
    unsigned long long *counter, found;
    CHECK(cudaMalloc(&qkv, (size_t)rows * width * 4)), CHECK(cudaMalloc(&data, cache));
    CHECK(cudaMalloc(&counter, 8)), CHECK(cudaMemset(counter, 0, 8));
    fill<<<ceil_div((size_t)rows * width, 256), 256>>>(qkv, nullptr, false, (size_t)rows * width, 1);
    fill<<<ceil_div(cache / 2, 256), 256>>>(nullptr, data, type == CacheType::float8, cache / 2, 2);
    std::vector<AttentionTile> tiles;
    std::vector<int> table;
    for (int s = 0; s < sequences; s++) {
      for (int first = 0; first < length * a.group; first += kPrefillPairs)
        tiles.push_back({s * length, length, 0, s * spans, first});
      for (int i = 0; i < spans; i++) table.push_back(s * spans + (i * 7 + 3) % spans);
    }
    CHECK(cudaMalloc(&tables, table.size() * 4)),
        CHECK(cudaMalloc(&device_tiles, tiles.size() * sizeof(AttentionTile)));
    CHECK(cudaMemcpy(tables, table.data(), table.size() * 4, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(device_tiles, tiles.data(), tiles.size() * sizeof(AttentionTile), cudaMemcpyHostToDevice));
    a.cache.data = (char*)data, a.cache.stride = a.cache.span_bytes(), a.qkv = qkv, a.tables = tables;
    a.sinks = sinks ? qkv : nullptr;
    printf("%s:", argv[c]);
    for (int by = 0; by < 2; by++) {
      CHECK(cudaMalloc(&results[by], out)), CHECK(cudaMemset(results[by], 0, out));
      a.out = {nullptr, results[by], heads * dim};
      const auto once = [&] {
        if (by) attend_prefill_mma(a, device_tiles, (int)tiles.size(), queue);
        else attend_prefill_wgmma(a, device_tiles, (int)tiles.size(), nullptr, queue);
      };
      cudaEvent_t begin, end;
      CHECK(cudaEventCreate(&begin)), CHECK(cudaEventCreate(&end));
      once(), CHECK(cudaDeviceSynchronize()), CHECK(cudaEventRecord(begin));
      for (int i = 0; i < 5; i++) once();
      CHECK(cudaEventRecord(end)), CHECK(cudaEventSynchronize(end));
      float ms;
      CHECK(cudaEventElapsedTime(&ms, begin, end));
      const double work = 2.0 * sequences * heads * dim * length * (double)length;
      printf(" %s %.1f us, %.0f TFLOP/s;", by ? "mma" : "wgmma", ms * 200, work / (ms * 2e-4) / 1e12);
    }
    differ<<<ceil_div(out / 4, 256), 256>>>((uint32_t*)results[0], (uint32_t*)results[1], out / 4, counter);
    CHECK(cudaMemcpy(&found, counter, 8, cudaMemcpyDeviceToHost));
    printf(" %llu of %zu differ\n", found, out / 4);
    for (int by = 0; found && by < 2; by++) {
      uint32_t first[8];
      CHECK(cudaMemcpy(first, results[by], sizeof(first), cudaMemcpyDeviceToHost));
      for (uint32_t word : first) printf(" %08x", word);
      printf(by ? "\n" : " |");
    }
  }
}
