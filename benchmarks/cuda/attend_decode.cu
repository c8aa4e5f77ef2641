// Decode attention (native/cuda/kernels/attention/attention_decode.cu) between kernels that read other memory, as in a
// step: the time that a layer's attention adds, against the time that its bytes take; and the number of results that
// differ from the prefill kernel's. `./attend_decode [check30 1@129 16@8000 28/4/128 int8 ...]`: N@P measures N
// sequences at position P; HEADS/KV_HEADS/SIZE, a cache type, windowW and sinks apply to those after them. nvcc -O3
// -std=c++17 -I../../../native -gencode arch=compute_90a,code=sm_90a attend_decode.cu
//   ../../../native/cuda/kernel_choice.cpp
//   ../../../native/cuda/kernels/{attention/{attention*,latent_mma},norm/rows*}.cu -o attend_decode
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#include "chosen.h"
#include "cuda/kernels/attention/attention_mma.h"
#include "cuda/kernels/common/device.cuh"

using namespace as::cuda;
#define CHECK(x) must(x, #x)
void must(cudaError_t e, const char* what) {
  if (e) printf("%s: %s\n", what, cudaGetErrorString(e)), exit(1);
}

constexpr int kLayers = 14, kSpan = 32;
constexpr size_t kBetween = 100 << 20;  // bytes that a kernel reads between those of attention

__device__ uint32_t noise(uint64_t i) {
  i = (i + 1) * 0x9E3779B97F4A7C15ull, i ^= i >> 29, i *= 0xBF58476D1CE4E5B9ull, i ^= i >> 32;
  return (uint32_t)i;
}
__device__ float normal(uint64_t i) {  // about
  const uint32_t a = noise(2 * i), b = noise(2 * i + 1);
  return ((int)(a & 0xffff) + (int)(a >> 16) + (int)(b & 0xffff) + (int)(b >> 16) - 131070) * 2.6e-5f;
}
__global__ void fill_floats(float* x, size_t count) {
  const size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
  if (i < count) x[i] = normal(i);
}
// Of a head of a span all values, or quantized values and scales.
__global__ void fill_cache(LayerCache cache, size_t words) {
  const size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
  if (i >= words) return;
  const bool scale = cache.quantized() && i * 4 % cache.head_bytes() >= cache.scales_at();
  uint32_t word = noise(i) & 0x7f7f7f7f & 0xbfbfbfbf;  // no NaN of 8 bits
  if (scale) word = __float_as_uint(normal(i) * 0.01f);
  else if (cache.type == CacheType::dtype16) word = to_dtype16x2(normal(2 * i), normal(2 * i + 1));
  reinterpret_cast<uint32_t*>(cache.data)[i] = word;
}
__global__ void differ(const float* a, const float* b, size_t count, unsigned long long* n) {
  const size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
  if (i < count && __float_as_uint(a[i]) != __float_as_uint(b[i])) atomicAdd(n, 1ull);
}
__global__ void __launch_bounds__(512) read_others(const uint4* from, size_t count, uint4* to) {
  extern __shared__ char taken[];
  let_next_begin();
  await_previous();
  uint4 sum = {};
  const size_t step = (size_t)gridDim.x * blockDim.x;
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count; i += 8 * step) {
    uint4 x[8];
#pragma unroll
    for (int j = 0; j < 8; j++) x[j] = i + j * step < count ? __ldcs(from + i + j * step) : uint4{};
#pragma unroll
    for (int j = 0; j < 8; j++) sum.x ^= x[j].x, sum.y ^= x[j].y, sum.z ^= x[j].z, sum.w ^= x[j].w;
  }
  if (sum.x == 1 && sum.y == 2) *to = sum;
}

cudaStream_t stream;
// us of what is queued, as a graph.
double time_of(const std::function<void()>& queue) {
  cudaGraph_t graph;
  cudaGraphExec_t ready;
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  queue();
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&ready, graph, 0));
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin)), CHECK(cudaEventCreate(&end));
  double best = 1e30;
  for (int i = 0; i < 12; i++) {
    CHECK(cudaEventRecord(begin, stream)), CHECK(cudaGraphLaunch(ready, stream));
    CHECK(cudaEventRecord(end, stream)), CHECK(cudaStreamSynchronize(stream));
    float ms;
    CHECK(cudaEventElapsedTime(&ms, begin, end));
    if (i > 1 && ms * 1e3 < best) best = ms * 1e3;
  }
  CHECK(cudaGraphExecDestroy(ready)), CHECK(cudaGraphDestroy(graph));
  return best;
}

// Sequences, rows, heads, windows and spans at random: whether rows of few pairs have the bits of the kernel for many,
// rotated and stored on the way, or before.
void check(int seed) {
  srand(seed);
  const auto one_of = [](std::vector<int> all) { return all[rand() % all.size()]; };
  const int dim = one_of({64, 80, 96, 128, 256}), kv = one_of({1, 2, 3, 4}), group = one_of({1, 2, 3, 7, 8, 16}),
            heads = kv * group;
  const int span = one_of({16, 32, 128}), sequences = one_of({1, 2, 5, 40, 150}),
            longest = one_of({40, 256, 700, 3000});
  Attention a;
  const CacheType type = dim == 80 ? CacheType::dtype16 : (CacheType)one_of({1, 1, 2, 3, 4});
  a.cache = {nullptr, type, span, kv, dim, dim};
  a.group = group, a.queries = heads, a.scale = 1 / sqrtf(dim), a.width = (heads + 2 * kv) * dim;
  a.window = one_of({0, 0, 1, 100, 300, 700}), a.soft_cap = one_of({0, 0, 3});
  std::vector<AttentionTile> decode, prefill;
  std::vector<int> table, where;
  int rows = 0, spans = 0, splits = 1, all_splits = 0;
  for (int s = 0; s < sequences; s++) {
    const int count = 1 + rand() % (kDecodePairs / group), start = rand() % longest,
              own = (start + count - 1) / span + 1;
    prefill.push_back({rows, count, start, (int)table.size(), 0}), decode.push_back(prefill.back());
    decode.back().first = all_splits, all_splits += (start + count - 1) / kKvSplitTokens + 1;
    for (int i = 0; i < own; i++) table.push_back(spans + (own - 1 - i));
    for (int i = start; i < start + count; i++)
      where.push_back(table[decode.back().table + i / span] * span + i % span);
    rows += count, spans += own, splits = std::max(splits, (start + count - 1) / kKvSplitTokens + 1);
    if (rand() % 8 == 0) decode.push_back({0, 0, 0, 0, 0}), prefill.push_back(decode.back());
  }
  a.max_splits = splits + 1;
  const int count = (int)decode.size();
  const size_t bytes = a.cache.span_bytes() * spans, out = (size_t)rows * heads * dim;
  const auto device = [](const void* from, size_t size) {
    char* p;
    CHECK(cudaMalloc(&p, size)), CHECK(cudaMemset(p, 0, size));
    if (from) CHECK(cudaMemcpy(p, from, size, cudaMemcpyHostToDevice));
    return p;
  };
  float *qkv = (float*)device(nullptr, (size_t)rows * a.width * 4),
        *angles = (float*)device(nullptr, (size_t)(rows + heads) * dim * 4);
  a.cache.data = device(nullptr, bytes), a.cache.stride = a.cache.span_bytes(), a.qkv = qkv;
#ifndef OLD
  if (rand() % 4 == 0) a.slopes = angles;
  if (rand() % 4 == 0) a.sinks = angles + rows;
#endif
  a.tables = (int*)device(table.data(), table.size() * 4);
  a.partials = (float*)device(nullptr, partial_floats(dim) * kv * count * a.max_splits * 4);
#ifndef OLD
  a.arrivals = (int*)device(nullptr, count * kv * 4);
#endif
  const auto upload = [&](const std::vector<AttentionTile>& all) {
    return (const AttentionTile*)device(all.data(), count * sizeof(AttentionTile));
  };
  const AttentionTile *tiles = upload(decode), *others = upload(prefill);
  const int* places = (int*)device(where.data(), rows * 4);
  fill_floats<<<ceil_div((size_t)rows * a.width, 256), 256>>>(qkv, (size_t)rows * a.width);
  fill_floats<<<ceil_div((size_t)(rows + heads) * dim, 256), 256>>>(angles, (size_t)(rows + heads) * dim);
  fill_cache<<<ceil_div(bytes / 4, 256), 256>>>(a.cache, bytes / 4);
  float* results[4];
  for (float*& result : results) result = (float*)device(nullptr, out * 4);
  unsigned long long *counters = (unsigned long long*)device(nullptr, 24), found[3];
  Rope rope;
  rope.table.dim = one_of({dim, dim / 2, 10}), rope.interleaved = rand() % 2;
  rope.table.cosine = angles, rope.table.sine = angles + (size_t)rows * dim / 2;
  Queue queue;
  queue.stream = stream, queue.capability = 90;
  CHECK(cudaDeviceSynchronize());
  a.out = {results[0], nullptr, heads * dim};
  AS_DTYPE16::store_and_attend(a, &rope, tiles, count, splits > 1 ? 2 : 1, queue);
  a.out.values = results[1], AS_DTYPE16::store_cache(a, places, &rope, true, rows, queue);
  AS_DTYPE16::attend_decode(a, choice_of(a, queue).decode, tiles, count, splits > 1 ? 2 : 1, queue);
  a.out.values = results[2], AS_DTYPE16::attend_prefill(a, choice_of(a, queue).prefill, others, count, nullptr, queue);
  a.out.values = results[3];
  attend_prefill_mma(a, others, count, queue);
  CHECK(cudaDeviceSynchronize());
  for (int i = 0; i < 3; i++) differ<<<ceil_div(out, 256), 256>>>(results[i], results[3], out, counters + i);
  CHECK(cudaMemcpy(found, counters, 24, cudaMemcpyDeviceToHost));
  if (found[0] || found[1] || found[2])
    printf(
        "seed %d, type %d: %llu, %llu and %llu of %zu differ: dim %d, %d heads, %d kv, span %d, %d sequences to %d, "
        "window %d, "
        "cap %g, "
        "rotary %d %d\n",
        seed, (int)type, found[0], found[1], found[2], out, dim, heads, kv, span, sequences, longest, a.window,
        a.soft_cap, rope.table.dim, rope.interleaved);
  for (const void* p :
       {(void*)qkv, (void*)angles, (void*)a.cache.data, (void*)a.tables, (void*)a.partials, (void*)tiles, (void*)others,
        (void*)places, (void*)counters, (void*)results[0], (void*)results[1], (void*)results[2], (void*)results[3]})
    CHECK(cudaFree((void*)p));
}

int main(int argc, char** argv) {
  int heads = 28, kv = 4, dim = 128, window = 0;
  bool sinks = false;
  CacheType type = CacheType::dtype16;
  CHECK(cudaStreamCreate(&stream));
  Queue queue;
  queue.stream = stream, queue.capability = 90;
  char* others;
  CHECK(cudaMalloc(&others, kBetween * kLayers)), CHECK(cudaMemset(others, 0, kBetween * kLayers));
  allow_shared(read_others, 200 << 10);
  const auto between = [&](int layer) {
    start(queue, read_others, dim3(132), 512, 200 << 10, (const uint4*)(others + layer * kBetween),
          kBetween / sizeof(uint4), (uint4*)others);
  };
  const double alone = time_of([&] {
    for (int i = 0; i < kLayers; i++) between(i);
  });
  printf("between: %.1f us each\n", alone / kLayers);
  for (int c = 1; c < argc; c++) {
    int sequences = 1, at = 1;
    if (strchr(argv[c], '/')) {
      sscanf(argv[c], "%d/%d/%d", &heads, &kv, &dim);
      continue;
    }
    if (sscanf(argv[c], "window%d", &window) == 1) continue;
    if (int seeds; sscanf(argv[c], "check%d", &seeds) == 1) {
      for (int seed = 1; seed <= seeds; seed++) check(seed);
      printf("checked %d\n", seeds);
      continue;
    }
    if (!strcmp(argv[c], "sinks")) sinks = true;
    if (!strcmp(argv[c], "bf16")) type = CacheType::dtype16;
    if (!strcmp(argv[c], "int8")) type = CacheType::int8;
    if (!strcmp(argv[c], "uint4")) type = CacheType::uint4;
    if (!strcmp(argv[c], "float8")) type = CacheType::float8;
    if (sscanf(argv[c], "%d@%d", &sequences, &at) != 2) continue;
    const int width = (heads + 2 * kv) * dim, spans = at / kSpan + 1, splits = at / kKvSplitTokens + 1,
              max_splits = std::max(splits, 32);  // as a model has it
    Attention a;
    a.cache = {nullptr, type, kSpan, kv, dim, dim};
    a.group = heads / kv, a.queries = heads, a.scale = 1 / sqrtf(dim), a.width = width, a.max_splits = max_splits;
    a.window = window;
    const size_t layer_bytes = a.cache.span_bytes() * spans * sequences, out = (size_t)sequences * heads * dim;
    float *qkv, *results[2], *partials, *angles;
    char* data;
    AttentionTile *device_tiles, *prefill_tiles;
    int *tables, *where, *arrivals;
    unsigned long long *counter, found;
    CHECK(cudaMalloc(&qkv, (size_t)sequences * width * 4)), CHECK(cudaMalloc(&data, layer_bytes * kLayers));
    CHECK(cudaMalloc(&counter, 8)), CHECK(cudaMemset(counter, 0, 8));
    CHECK(cudaMalloc(&partials, partial_floats(dim) * kv * sequences * max_splits * 4));
    CHECK(cudaMalloc(&arrivals, sequences * kv * 4)), CHECK(cudaMemset(arrivals, 0, sequences * kv * 4));
    CHECK(cudaMalloc(&angles, (size_t)std::max(sequences * dim, heads) * 4));
    fill_floats<<<ceil_div((size_t)sequences * width, 256), 256>>>(qkv, (size_t)sequences * width);
    fill_floats<<<ceil_div(std::max(sequences * dim, heads), 256), 256>>>(angles, std::max(sequences * dim, heads));
    std::vector<AttentionTile> tiles;
    std::vector<int> table, places;
    for (int s = 0; s < sequences; s++) {
      tiles.push_back({s, 1, at, s * spans, s * splits});
      for (int i = 0; i < spans; i++) table.push_back(s * spans + (i * 7 + 3) % spans);
      places.push_back(table[s * spans + at / kSpan] * kSpan + at % kSpan);
    }
    if (spans % 7 == 0)
      for (int i = 0; i < (int)table.size(); i++) table[i] = i;
    CHECK(cudaMalloc(&tables, table.size() * 4)), CHECK(cudaMalloc(&where, sequences * 4));
    CHECK(cudaMalloc(&device_tiles, tiles.size() * sizeof(AttentionTile)));
    CHECK(cudaMalloc(&prefill_tiles, tiles.size() * sizeof(AttentionTile)));
    CHECK(cudaMemcpy(tables, table.data(), table.size() * 4, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(where, places.data(), sequences * 4, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(device_tiles, tiles.data(), tiles.size() * sizeof(AttentionTile), cudaMemcpyHostToDevice));
    for (AttentionTile& tile : tiles) tile.first = 0;  // a pair
    CHECK(cudaMemcpy(prefill_tiles, tiles.data(), tiles.size() * sizeof(AttentionTile), cudaMemcpyHostToDevice));
    a.qkv = qkv, a.tables = tables, a.partials = partials, a.sinks = sinks ? angles : nullptr;
#ifndef OLD
    a.arrivals = arrivals;
#endif
    for (int l = 0; l < kLayers; l++) {
      a.cache.data = data + l * layer_bytes, a.cache.stride = a.cache.span_bytes();
      fill_cache<<<ceil_div(layer_bytes / 4, 256), 256>>>(a.cache, layer_bytes / 4);
    }
    for (float*& result : results) CHECK(cudaMalloc(&result, out * 4)), CHECK(cudaMemset(result, 0, out * 4));
    CHECK(cudaDeviceSynchronize());
    Rope rope;
    rope.table.dim = dim, rope.table.cosine = angles, rope.table.sine = angles + sequences * dim / 2;
    const int at_once = (type == CacheType::dtype16 ? 2 : 3) * sm_count() / (sequences * kv);
    const int sharers = splits > 1 ? std::min(std::max(at_once, 2), std::max(splits, 2)) : 1;
    const auto once = [&](int layer, const Rope* t) {
      a.cache.data = data + layer * layer_bytes, a.out = {results[0], nullptr, heads * dim};
      if (choice_of(a, queue).stores)
        return AS_DTYPE16::store_and_attend(a, t, device_tiles, sequences, sharers, queue);
      AS_DTYPE16::store_cache(a, where, t, true, sequences, queue);
      AS_DTYPE16::attend_decode(a, choice_of(a, queue).decode, device_tiles, sequences, sharers, queue);
    };
    once(0, nullptr);
    a.out.values = results[1];
    AS_DTYPE16::attend_prefill(a, choice_of(a, queue).prefill, prefill_tiles, sequences, nullptr, queue);
    CHECK(cudaDeviceSynchronize());
    differ<<<ceil_div(out, 256), 256>>>(results[0], results[1], out, counter);
    CHECK(cudaMemcpy(&found, counter, 8, cudaMemcpyDeviceToHost));
    const double both = time_of([&] {
      for (int i = 0; i < kLayers; i++) between(i), once(i, &rope);
    });
    const double only = time_of([&] {
      for (int i = 0; i < kLayers; i++) once(i, &rope);
    });
    printf("%d/%d/%d %s %s: %.1f us a layer, %.1f one after the other; bytes %.1f; %llu of %zu differ\n", heads, kv,
           dim,
           type == CacheType::dtype16 ? "bf16"
           : type == CacheType::int8  ? "int8"
           : type == CacheType::uint4 ? "uint4"
                                      : "float8",
           argv[c], (both - alone) / kLayers, only / kLayers,
           (double)a.cache.row_bytes() * 2 * kv * sequences * (window ? std::min(window, at + 1) : at + 1) / 4.44e6,
           found, out);
    fflush(stdout);
    float* shown[2];
    for (int i = 0; i < 2; i++) {
      shown[i] = new float[out];
      CHECK(cudaMemcpy(shown[i], results[i], out * 4, cudaMemcpyDeviceToHost));
    }
    for (int i = 0; found && i < 2; i++) {
      for (int j = 0; j < 6; j++) printf(" %.6g", shown[i][j]);
      printf(i ? "\n" : " |");
    }
    for (void* p :
         {(void*)qkv, (void*)data, (void*)counter, (void*)partials, (void*)arrivals, (void*)angles, (void*)tables,
          (void*)where, (void*)device_tiles, (void*)prefill_tiles, (void*)results[0], (void*)results[1]})
      CHECK(cudaFree(p));
  }
}
