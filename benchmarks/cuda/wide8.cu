// Prefill GEMM of 8-bit floats (native/cuda/kernels/gemm/gemm_8bit_prefill.cu) with each tile size: bits against the
// stream-K kernel's, error against float64, and speed at the shapes of Qwen2.5-7B or of one of two ranks of
// Llama-3.3-70B.
// `./wide8 [integers | groups | blocks] [check] [error] [tiles | layer | bytes] [rows=128,8192] [only=gate_up] [70b]`,
// integers being w8a8's, groups floats with a scale for each 128 columns, blocks the same with equal scales in all rows
// of a block
// nvcc -O3 -std=c++17 -I../../../native -gencode arch=compute_90a,code=sm_90a wide8.cu
//   ../../../native/cuda/kernels/quantize/quantize_rows.cu -o wide8
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cuda/kernels/gemm/gemm_8bit_prefill.cu"
#include "cuda/kernels/gemm/gemm_quantized_stream_k.cuh"

void as::cuda::gemm_float8_stream_k(const GemmArgs& p, int rows, const Queue& queue) {
  if (p.w.has_float_groups()) start_quantized_stream_k<Floats<true>>(p, rows, queue);
  else start_quantized_stream_k<Floats<>>(p, rows, queue);
}
void as::cuda::gemm_integer_stream_k(const GemmArgs& p, int rows, const Queue& queue) {
  start_quantized_stream_k<Integers<8>>(p, rows, queue);
}

using namespace as::cuda;
#define CHECK(x) must(x, #x)
void must(cudaError_t e, const char* what) {
  if (e) printf("%s: %s\n", what, cudaGetErrorString(e)), exit(1);
}

bool integers, groups, blocks;
void stream(const GemmArgs& p, int rows, const Queue& queue) {
  integers ? gemm_integer_stream_k(p, rows, queue) : gemm_float8_stream_k(p, rows, queue);
}
void wide(const GemmArgs& p, int rows, const Queue& queue) {
  integers ? gemm_integer_prefill(p, rows, queue) : gemm_float8_prefill(p, rows, queue);
}

__device__ float noise(uint64_t i) {  // about normal
  i = (i + 1) * 0x9E3779B97F4A7C15ull, i ^= i >> 29, i *= 0xBF58476D1CE4E5B9ull, i ^= i >> 32;
  return ((int)(i & 0xffff) + (int)(i >> 16 & 0xffff) + (int)(i >> 32 & 0xffff) + (int)(i >> 48) - 131070) * 2.6e-5f;
}
// A matrix of quantized values; padding columns have any values.
__global__ void fill(Quants quants, size_t rows, int columns, uint64_t seed) {
  const size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
  if (i >= rows * columns / 2) return;
  const int row = i / (columns / 2), column = i % (columns / 2) * 2;
  const size_t word = word_of(quants, row, column, blocks_of(columns));
  const float low = noise(2 * i + seed), high = noise(2 * i + 1 + seed),
              scale = 1e-3f * (1 + (quants.in_blocks ? row / kBlock + row % 16 / 8 : row) % 7);
  const int of_low = quants.floats ? to_e4m3(low * 100) : min(max((int)(128 + low * 40), 0), 255),
            of_high = quants.floats ? to_e4m3(high * 100) : min(max((int)(128 + high * 40), 0), 255);
  reinterpret_cast<uint16_t*>(quants.words)[word * 2 + bit_of(8, column) / 16] = of_low | of_high << 8;
  if (column) return;
  for (int group = 0; group < quants.groups; group++)
    quants.scales[scale_of(row, group, quants.groups)] =
        quants.floats ? __float_as_uint(scale * (1 + group % 3)) : to_dtype16x2(scale, scale * (row % 5));
}
__global__ void fill_floats(float* x, size_t count, uint64_t seed) {
  const size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
  if (i < count) x[i] = noise(i + seed);
}
__global__ void fill_pairs(uint32_t* x, size_t count) {  // of bfloat16
  const size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
  if (i < count) x[i] = to_dtype16x2(noise(2 * i), noise(2 * i + 1));
}
__global__ void differ(const uint32_t* a, const uint32_t* b, size_t count, unsigned long long* n) {
  const size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
  if (i < count && a[i] != b[i]) atomicAdd(n, 1ull);
}
// Sums in float64 of some of a product: out [rows, columns], and of the sizes of what is summed.
__global__ void exact(GemmArgs p, int columns, double* out) {
  const int row = blockIdx.x, column = blockIdx.y * blockDim.x + threadIdx.x, blocks = blocks_of(p.w.k);
  if (column >= columns) return;
  double sum = 0;
  for (int k = 0; k < p.w.k; k++) {
    const size_t at =
        ((size_t)(row / kBlock) * blocks + k / kBlock) * kByteBlock + byte_chunk(row % kBlock, k % kBlock / 16);
    const int within = (k % 8 / 2) * 4 + k % 16 / 8 * 2 + k % 2;
    const size_t to =
        ((size_t)(column / kBlock) * blocks + k / kBlock) * kByteBlock + byte_chunk(column % kBlock, k % kBlock / 16);
    const int group = k / p.w.quants.group, last = min((group + 1) * 2, blocks) - 1;
    const double of_row =
        p.w.quants.groups > 1 ? p.bytes.sums[(size_t)last * blocks_of(gridDim.x) * kBlock + row] : p.bytes.scales[row];
    sum += (double)from_e4m3(p.bytes.values[at + within]) *
           from_e4m3(reinterpret_cast<const uint8_t*>(p.w.quants.words)[to + within]) * of_row *
           __uint_as_float(p.w.quants.scales[scale_of(column, group, p.w.quants.groups)]);
  }
  out[(size_t)row * columns + column] = sum;
}

Queue queue{nullptr, 90};
template <typename T>
T* memory(size_t bytes) {
  void* data;
  CHECK(cudaMalloc(&data, bytes)), CHECK(cudaMemset(data, 0, bytes));
  return (T*)data;
}

struct Problem {
  GemmArgs p;
  int rows;
  size_t y_bytes;
  std::vector<uint32_t*> copies;  // of the weights
  void *y, *x;
  char* bytes;

  Problem(int n, int k, int rows, bool gated, bool adds, bool bias, int count = 1) : rows(rows) {
    const int whole_rows = (rows + 127) / 128 * 128;
    p.w.n = n, p.w.k = k, p.w.kind = integers ? Kind::integers : Kind::float8,
    p.w.max_split_k = quant_split_k(n, k, kMaxSplitK);
    const int group = groups ? kFloatGroup : k, count_of = (k + group - 1) / group;
    p.w.quants = {Codes::integers, 8, group, count_of, !integers, true};
    p.w.quants.scales = memory<uint32_t>(scales_bytes(n, count_of)), p.w.quants.in_blocks = blocks;
    for (int i = 0; i < count; i++) {
      copies.push_back(memory<uint32_t>(quants_bytes(n, k, 8)));
      p.w.quants.words = copies.back();
      fill<<<ceil_div((size_t)n * k / 2, 256), 256>>>(p.w.quants, n, k, 1);
    }
    x = memory<float>((size_t)rows * k * 4), bytes = memory<char>(byte_rows_bytes(rows, k));
    fill_floats<<<ceil_div((size_t)rows * k, 256), 256>>>((float*)x, (size_t)rows * k, 77);
    p.x = {(float*)x, nullptr, k};
    quantize(rows);
    const int width = gated ? n / 2 : n;
    y_bytes = gated ? tiles_bytes(whole_rows, width) : (size_t)rows * width * 4;
    y = memory<char>(y_bytes);
    p.gated = gated, p.adds = adds;
    p.y = {gated ? nullptr : (float*)y, gated ? (uint16_t*)y : nullptr, width};
    float* b = nullptr;
    if (bias) b = memory<float>((n + 1) * 4), fill_floats<<<ceil_div(n, 256), 256>>>(b, n, 5);
    p.bias = b;
    reset();
  }
  ~Problem() {
    for (uint32_t* w : copies) CHECK(cudaFree(w));
    CHECK(cudaFree(p.w.quants.scales)), CHECK(cudaFree(x)), CHECK(cudaFree(y)), CHECK(cudaFree(bytes)),
        CHECK(cudaFree((void*)p.bias));
  }
  // The first rows alone: where sums lie depends on how many there are.
  void quantize(int rows) { p.bytes = byte_rows(bytes, rows, p.w.k), quantize_activations(p, rows, queue); }
  void reset() {
    if (p.gated) CHECK(cudaMemset(y, 0, y_bytes));
    else fill_floats<<<ceil_div(y_bytes / 4, 256), 256>>>((float*)y, y_bytes / 4, 9);
  }
};

struct Way {
  char name[32];
  const Choice* choice;
  void (*stream)(const GemmArgs&, int, const Queue&);

  void start(const GemmArgs& p, int rows, const Queue& queue) const {
    choice ? choice->start(p, rows, choice->nanoseconds, queue) : stream(p, rows, queue);
  }
};
std::vector<Way> ways(const Problem& a, bool streams) {
  std::vector<Way> all;
  if (streams) { all.push_back({"stream", nullptr, stream}); }
  const auto add = [&](const Choice& c) {
    if ((c.sums == Sums::whole) != (SplitK(a.p.w.k, a.p.w.max_split_k).count == 1)) return;
    Way way{"", &c, nullptr};
    snprintf(way.name, sizeof way.name, "%d%s/%dx%d", c.columns, c.sums == Sums::beside ? "b" : "", c.down, c.across);
    all.push_back(way);
  };
  if (integers)
    for (const Choice& c : kOfIntegers) add(c);
  else if (blocks)
    for (const Choice& c : kOfFloatBlocks) add(c);
  else if (groups)
    for (const Choice& c : kOfFloatGroups) add(c);
  else
    for (const Choice& c : kOfFloats) add(c);
  return all;
}

unsigned long long* counter;

void check(int n, int k, int rows, bool gated, bool adds, bool bias) {
  if (groups && (blocks_of(k) % 2 || k <= kFloatGroup)) return;  // stream-K alone computes these
  Problem a(n, k, rows, gated, adds, bias);
  stream(a.p, rows, queue);
  char* expected = memory<char>(a.y_bytes);
  CHECK(cudaMemcpy(expected, a.y, a.y_bytes, cudaMemcpyDeviceToDevice));
  const auto found = [&](size_t bytes) {
    CHECK(cudaMemset(counter, 0, 8));
    differ<<<ceil_div(bytes / 4, 256), 256>>>((uint32_t*)a.y, (uint32_t*)expected, bytes / 4, counter);
    unsigned long long count;
    CHECK(cudaMemcpy(&count, counter, 8, cudaMemcpyDeviceToHost));
    return count;
  };
  printf("%dx%d, %d rows%s%s%s, %d pieces: differ", n, k, rows, gated ? ", gated" : "", adds ? ", adds" : "",
         bias ? ", bias" : "", SplitK(k, a.p.w.max_split_k).count);
  if (!gated)
    for (int few : {1, 9, 20, 64, 100})
      if (few < rows) {
        a.reset(), a.quantize(few), stream(a.p, few, queue), a.quantize(rows);
        printf(" %d:%llu", few, found((size_t)few * n * 4));
      }
  for (const Way& way : ways(a, true)) {
    a.reset(), way.start(a.p, rows, queue);
    printf(" %s:%llu", way.name, found(a.y_bytes));
  }
  printf("\n");
  CHECK(cudaFree(expected));
}

void error(int n, int k) {
  const int rows = 128, columns = std::min(n, 512);
  Problem a(n, k, rows, false, false, false);
  double* expected = memory<double>((size_t)rows * columns * 8);
  exact<<<dim3(rows, ceil_div(columns, 128)), 128>>>(a.p, columns, expected);
  wide(a.p, rows, queue);
  std::vector<double> e((size_t)rows * columns);
  std::vector<float> y((size_t)rows * n);
  CHECK(cudaMemcpy(e.data(), expected, e.size() * 8, cudaMemcpyDeviceToHost));
  CHECK(cudaMemcpy(y.data(), a.y, y.size() * 4, cudaMemcpyDeviceToHost));
  double square = 0, wrong = 0, most = 0, slope = 0;
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < columns; c++) {
      const double x = e[(size_t)r * columns + c] / (1 + c % 7), d = y[(size_t)r * n + c] / (1. + c % 7) - x;
      square += x * x, wrong += d * d, slope += d * x, most = std::max(most, std::fabs(d));
    }
  const double size = std::sqrt(square / e.size());
  printf("%dx%d, %d pieces: error rms %.2e, most %.2e of the results' rms; slope %.2e\n", n, k,
         SplitK(k, a.p.w.max_split_k).count, std::sqrt(wrong / e.size()) / size, most / size, slope / square);
  CHECK(cudaFree(expected));
}

constexpr int kRounds = 5, kTurns = 3;  // of which the median counts: replays of a graph, and turns of all tiles
// Of what `run` launches on a queue, in a graph.
template <typename Run>
float seconds(const Run& run) {
  cudaStream_t stream;
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  Queue on = queue;
  on.stream = stream;
  run(on);
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin)), CHECK(cudaEventCreate(&end)), CHECK(cudaStreamSynchronize(stream));
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  run(on);
  CHECK(cudaStreamEndCapture(stream, &graph)), CHECK(cudaGraphInstantiate(&replay, graph, 0));
  std::vector<float> found;
  for (int i = 0; i < kRounds; i++) {
    float ms;
    CHECK(cudaEventRecord(begin, stream)), CHECK(cudaGraphLaunch(replay, stream)), CHECK(cudaEventRecord(end, stream));
    CHECK(cudaEventSynchronize(end)), CHECK(cudaEventElapsedTime(&ms, begin, end));
    found.push_back(ms);
  }
  cudaGraphExecDestroy(replay), cudaGraphDestroy(graph), cudaEventDestroy(begin), cudaEventDestroy(end);
  cudaStreamDestroy(stream);
  std::sort(found.begin(), found.end());
  return found[kRounds / 2] * 1e-3f;
}
float seconds(const Way& way, Problem& a, int times) {
  return seconds([&](const Queue& on) {
           for (int i = 0; i < times; i++)
             a.p.w.quants.words = a.copies[i % a.copies.size()], way.start(a.p, a.rows, on);
         }) /
         times;
}

struct Linear {
  const char* name;
  int n, k;
  bool gated, adds, bias;
};
constexpr Linear kOf7B[] = {{"qkv", 4608, 3584, false, false, true},
                            {"o", 3584, 3584, false, true, false},
                            {"gate_up", 37888, 3584, true, false, false},
                            {"down", 3584, 18944, false, true, false},
                            {"head", 152064, 3584, false, false, false}},
                 kOf70B[] = {{"qkv", 5120, 8192, false, false, false},
                             {"o", 8192, 4096, false, true, false},
                             {"gate_up", 28672, 8192, true, false, false},
                             {"down", 8192, 14336, false, true, false},
                             {"head", 64128, 8192, false, false, false}};
const Linear* shapes = kOf7B;

// A layer's products one after the other, rows on their way to each quantized, without attention.
void layer(int rows) {
  constexpr int kLayers = 4;
  std::vector<Problem*> all;
  for (int i = 0; i < 4; i++)
    all.push_back(
        new Problem(shapes[i].n, shapes[i].k, rows, shapes[i].gated, shapes[i].adds, shapes[i].bias, kLayers));
  const int hidden = shapes[0].k, heads = shapes[1].k, inner = shapes[3].k;
  float* weight = memory<float>(hidden * 4);
  fill_floats<<<ceil_div(hidden, 256), 256>>>(weight, hidden, 3);
  const Norm norm{weight, 1e-6f, false};
  // What o and down add to, attention's rows and gated ones.
  GemmArgs o = all[1]->p, down = all[3]->p, qkv = all[0]->p, gate_up = all[2]->p;
  down.y = o.y;
  o.x = {nullptr, memory<uint16_t>(tiles_bytes((rows + 127) / 128 * 128, heads)), heads};
  down.x = {nullptr, gate_up.y.tiles, inner};
  for (int which = 0; which < 8; which++) {
    for (int i = 0; i < 3; i++) tells_late[i] = which >> i & 1;
    const float t = seconds([&](const Queue& on) {
      for (int i = 0; i < kLayers; i++) {
        qkv.w.quants.words = all[0]->copies[i], o.w.quants.words = all[1]->copies[i];
        gate_up.w.quants.words = all[2]->copies[i], down.w.quants.words = all[3]->copies[i];
        rms_norm_into_bytes(o.y.values, norm, qkv, rows, on), wide(qkv, rows, on);
        quantize_activations(o, rows, on), wide(o, rows, on);
        rms_norm_into_bytes(o.y.values, norm, gate_up, rows, on), wide(gate_up, rows, on);
        quantize_activations(down, rows, on), wide(down, rows, on);
      }
    });
    printf("%d rows: layer %.1f us, late: whole %d chained %d beside %d\n", rows, t / kLayers * 1e6, which & 1,
           which >> 1 & 1, which >> 2);
  }
  CHECK(cudaFree(weight)), CHECK(cudaFree(o.x.tiles));
  for (Problem* p : all) delete p;
}

// Rows become 8 bits: normed ones, attention's, gated ones.
void bytes(int rows) {
  const Linear &of_o = shapes[1], &of_down = shapes[3];
  const Problem down(of_down.n, of_down.k, rows, false, true, false), o(of_o.n, of_o.k, rows, false, true, false),
      qkv(shapes->n, shapes->k, rows, false, false, false);
  float* weight = memory<float>(shapes->k * 4);
  fill_floats<<<ceil_div(shapes->k, 256), 256>>>(weight, shapes->k, 3);
  const auto show = [&](const char* name, double bytes, const auto& run) {
    const float t = seconds([&](const Queue& on) {
      for (int i = 0; i < 10; i++) run(on);
    });
    printf(" %s %.1f us, %.2f TB/s", name, t * 1e5, bytes / t * 10 / 1e12);
  };
  printf("%d rows:", rows);
  show("normed", rows * 5. * shapes->k,
       [&](const Queue& on) { rms_norm_into_bytes(qkv.p.x.values, {weight, 1e-6f, false}, qkv.p, rows, on); });
  for (const Problem* a : {&o, &down}) {
    const size_t pairs = (size_t)rows * a->p.w.k / 2;
    fill_pairs<<<ceil_div(pairs, 256), 256>>>((uint32_t*)a->x, pairs);
    GemmArgs p = a->p;
    p.x = {nullptr, (uint16_t*)a->x, a->p.w.k};
    show(a == &o ? "attention's" : "gated", rows * 3. * p.w.k,
         [&](const Queue& on) { quantize_activations(p, rows, on); });
  }
  printf("\n");
  CHECK(cudaFree(weight));
}

int main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  CHECK(cudaMalloc(&counter, 8));
  queue.scratch = {memory<float>(kScratchCtas * kScratchFloats * 4), memory<int>(kScratchCtas * kScratchFlags * 4),
                   memory<float>(kScratchParts * 4), memory<int>(kScratchCounts * 4)};
  const auto asked = [&](const char* what) {
    for (int i = 1; i < argc; i++)
      if (!strcmp(argv[i], what)) return true;
    return false;
  };
  integers = asked("integers"), blocks = asked("blocks"), groups = blocks || asked("groups");
  const char* only = "";
  std::vector<int> sizes;
  for (int i = 1; i < argc; i++) {
    if (!strncmp(argv[i], "only=", 5)) only = argv[i] + 5;
    if (!strncmp(argv[i], "rows=", 5))
      for (char* at = argv[i] + 5; *at; at += *at == ',') sizes.push_back(strtol(at, &at, 10));
  }
  if (asked("70b")) shapes = kOf70B;
  if (asked("check")) {
    check(384, 64, 128, false, false, false), check(384, 3584, 256, false, false, false);
    check(1152, 3584, 300, false, true, true), check(2 * 1216, 896, 321, true, false, false);
    check(3584, 18944, 200, false, true, false), check(1036, 900, 301, false, false, true);
    check(2 * 328, 1000, 130, true, false, true), check(4608, 3584, 700, false, false, true);
    check(2 * 8232, 1000, 430, true, false, true), check(16900, 900, 301, false, true, false);
    check(20000, 3584, 1100, false, true, true), check(2 * 18944, 3584, 256, true, false, false);
    // Clusters whose blocks have a tile and then none: of rows, and of columns.
    check(3584, 3584, 8300, false, true, false), check(2 * 9000, 896, 4200, true, false, false);
  }
  if (asked("error")) error(3584, 3584), error(17408, 3584), error(3584, 18944), error(17408, 18944);
  if (asked("bytes")) {
    for (int rows : sizes) bytes(rows);
    return 0;
  }
  if (asked("layer")) {
    for (int rows : sizes) layer(rows);
    return 0;
  }
  for (int rows : sizes) {
    double all = 0, work = 0;
    for (int i = 0; i < 5; i++) {
      const Linear& s = shapes[i];
      if (*only && !strstr(only, s.name)) continue;
      if (i == 4 && rows > 256) continue;
      const double operations = 2.0 * rows * s.n * s.k, bytes = (double)s.n * s.k;
      Problem a(s.n, s.k, rows, s.gated, s.adds, s.bias, (int)std::min(8.0, 200e6 / bytes + 1));
      const int times = std::clamp((int)(4e-3 / std::max(operations / 1e15, bytes / 4e12)), 3, 60);
      printf("%d rows, %s:", rows, s.name);
      double best = 1;
      if (asked("tiles")) {
        const std::vector<Way> all = ways(a, rows <= 512);
        std::vector<std::vector<float>> found(all.size());
        for (int turn = 0; turn < kTurns; turn++)  // as the clock falls while it is measured
          for (size_t i = 0; i < all.size(); i++) found[i].push_back(seconds(all[i], a, times));
        for (size_t i = 0; i < all.size(); i++) {
          std::sort(found[i].begin(), found[i].end());
          const float t = found[i][kTurns / 2];
          best = std::min(best, (double)t), printf(" %s %.1f", all[i].name, t * 1e6);
        }
      }
      const float t = seconds({"", nullptr, wide}, a, times);
      printf(" -- %.1f us, %.0f TFLOP/s, %.2f of bandwidth\n", t * 1e6, operations / t / 1e12, bytes / 4.44e12 / t);
      if (i < 4) all += std::min(best, (double)t), work += operations;
    }
    printf("%d rows: %.1f us a layer, %.0f TFLOP/s\n", rows, all * 1e6, work / all / 1e12);
  }
  CHECK(cudaDeviceSynchronize());
}
