// GEMM of quantized weights and 16-bit activations at Qwen2.5-7B's shapes: microseconds, the fraction of the time that
// reading quantized values and scales takes, and bits against GEMM of the same values in bfloat16. norm: a kernel norms
// the row first; norms: the GEMM kernel norms it.
//   nvcc -std=c++17 -O3 -Inative -gencode=arch=compute_90a,code=sm_90a benchmarks/cuda/quantized.cu
//        native/cuda/kernel_choice.cpp -o quantized
//        native/cuda/kernels/{gemm/{gemm_{quantized*,dtype16,split_k,stream_k,prefill,mma_prefill,f32},
//        gemv*},norm/rows}.cu
//   quantized [check] [by=stream|mma] [norm|norms] [rows=1,8,16,32] [forms=4:64,4:128,4:0,8:64]
//   [shapes=qkv,o,gate_up,down,head]
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "chosen.h"
#include "cuda/kernels/quantize/quantized.cuh"
#include "timing.h"

using namespace as::cuda;

static __device__ uint32_t noise(uint64_t i) {
  i = (i + 1) * 0x9E3779B97F4A7C15ull, i ^= i >> 29, i *= 0xBF58476D1CE4E5B9ull, i ^= i >> 32;
  return (uint32_t)(i * 0x94D049BB133111EBull >> 32);
}
static __global__ void fill_words(uint32_t* words, size_t count) {
  const size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
  if (i < count) words[i] = noise(i);
}
// About 1/64 to 1/32, and offsets around zero.
static __global__ void fill_scales(uint32_t* scales, size_t count) {
  const size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
  if (i < count) scales[i] = (0x3c80 | (noise(i) & 0x7f)) | ((noise(i) >> 8 & 0x80ff) | 0x3c00) << 16;
}
static __global__ void fill_rows(uint16_t* tiles, int rows, int columns) {
  const size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
  if (i < (size_t)rows * columns)
    tiles[tile_offset(i / columns, i % columns, blocks_of(columns))] =
        to_dtype16((int)(noise(i) >> 8) * 0x1p-24f - 0.5f);
}
static __global__ void fill_floats(float* values, int count, float size) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) values[i] = ((int)(noise(i + 77) >> 8) * 0x1p-24f - 0.5f) * size;
}
static __global__ void widen(Quants quants, int n, int k, uint16_t* tiles) {
  const size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
  if (i < (size_t)n * k)
    tiles[tile_offset(i / k, i % k, blocks_of(k))] = to_dtype16(value_of(quants, (int)(i / k), (int)(i % k), k));
}
static __global__ void differ(const uint32_t* a, const uint32_t* b, size_t count, unsigned long long* found) {
  const size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
  if (i < count && a[i] != b[i]) atomicAdd(found, 1ull);
}

static std::vector<std::string> split(const char* text) {
  std::vector<std::string> parts(1);
  for (; *text; text++) *text == ',' ? (void)parts.emplace_back() : (void)(parts.back() += *text);
  return parts;
}

int main(int argc, char** argv) {
  const struct {
    const char* name;
    int n, k;
    bool gated, adds;
  } shapes[] = {{"qkv", 4608, 3584, false, false},     {"o", 3584, 3584, false, true},
                {"gate_up", 37888, 3584, true, false}, {"down", 3584, 18944, false, true},
                {"head", 152064, 3584, false, false},  {"odd", 1036, 900, false, true},
                {"small", 2 * 328, 1000, true, false}, {"uneven", 3700, 2944, false, false}};
  const char *rows_asked = "1,8,16,32", *forms = "4:64,4:128,4:0,8:64", *asked = "qkv,o,gate_up,down,head";
  bool checks = false, normed = false, norms = false;
  GemmAlgo algo = GemmAlgo::any;
  for (int i = 1; i < argc; i++) {
    if (!std::strcmp(argv[i], "check")) checks = true;
    else if (!std::strcmp(argv[i], "norm")) normed = true;
    else if (!std::strcmp(argv[i], "norms")) normed = norms = true;
    else if (!std::strcmp(argv[i], "by=stream")) algo = GemmAlgo::stream_k;
    else if (!std::strcmp(argv[i], "by=mma")) algo = GemmAlgo::mma;
    else if (!std::strncmp(argv[i], "rows=", 5)) rows_asked = argv[i] + 5;
    else if (!std::strncmp(argv[i], "forms=", 6)) forms = argv[i] + 6;
    else if (!std::strncmp(argv[i], "shapes=", 7)) asked = argv[i] + 7;
  }
  if (checks && !std::strcmp(asked, "qkv,o,gate_up,down,head")) asked = "qkv,o,gate_up,down,odd,small,uneven";
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  Queue queue{stream, 90, {}};
  queue.scratch = {memory<float>(kScratchCtas * kScratchFloats * 4), memory<int>(kScratchCtas * kScratchFlags * 4),
                   memory<float>(kScratchParts * 4), memory<int>(kScratchCounts * 4)};
  constexpr int kMaxRows = 128;
  constexpr size_t kResult = (size_t)kMaxRows * 152064 * 4;
  uint16_t* x = memory<uint16_t>(tiles_bytes(kMaxRows, 18944));
  float *unnormed = memory<float>(18944 * 4), *ones = memory<float>(18944 * 4);
  fill_floats<<<74, 256>>>(unnormed, 18944, 3.0f), fill_floats<<<74, 256>>>(ones, 18944, 2.0f);
  check(cudaDeviceSynchronize());
  float *y = memory<float>(kResult), *expected = memory<float>(kResult);
  auto* found = memory<unsigned long long>(8);
  const auto blocks = [](size_t count) { return dim3(ceil_div(count, 256)); };
  for (const std::string& form : split(forms))
    for (const std::string& name : split(asked))
      for (const auto& shape : shapes) {
        if (name != shape.name) continue;
        Quants quants;
        quants.bits = form[0] - '0', quants.group = std::atoi(form.c_str() + 2);
        if (quants.group == 0) quants.group = shape.k;
        quants.groups = (shape.k + quants.group - 1) / quants.group;
        const size_t word_bytes = quants_bytes(shape.n, shape.k, quants.bits),
                     set_bytes = scales_bytes(shape.n, quants.groups), bytes = word_bytes + set_bytes;
        const int copies = checks ? 1 : (int)((400 << 20) / bytes) + 1, launches = copies < 16 ? 16 : copies;
        std::vector<Quants> weights(copies, quants);
        for (Quants& w : weights) {
          w.words = memory<uint32_t>(word_bytes), w.scales = memory<uint32_t>(set_bytes);
          fill_words<<<blocks(word_bytes / 4), 256, 0, stream>>>(w.words, word_bytes / 4);
          fill_scales<<<blocks(set_bytes / 4), 256, 0, stream>>>(w.scales, set_bytes / 4);
        }
        fill_rows<<<blocks((size_t)kMaxRows * shape.k), 256, 0, stream>>>(x, kMaxRows, shape.k);
        GemmArgs p;
        p.w = {shape.n, shape.k, Kind::quantized, kDType16,
               nullptr, nullptr, weights[0],      quant_split_k(shape.n, shape.k)};
        p.adds = shape.adds, p.gated = shape.gated, p.x = {nullptr, x, shape.k};
        p.y = shape.gated ? Rows{nullptr, reinterpret_cast<uint16_t*>(y), shape.n / 2} : Rows{y, nullptr, shape.n};
        const Norm norm{ones, 1e-6f, false};
        const auto norm_rows = [&] {
          if (normed) AS_DTYPE16::rms_norm(unnormed, norm, 1, {nullptr, x, shape.k}, queue);
        };
        const size_t result = shape.gated ? tiles_bytes(kMaxRows, shape.n / 2) : (size_t)kMaxRows * shape.n * 4;
        uint16_t* tiles = checks ? memory<uint16_t>(tiles_bytes(shape.n, shape.k)) : nullptr;
        if (checks)
          widen<<<blocks((size_t)shape.n * shape.k), 256, 0, stream>>>(quants = weights[0], shape.n, shape.k, tiles);
        std::printf("%-5s %-8s", form.c_str(), shape.name);
        for (const std::string& text : split(rows_asked)) {
          const int rows = std::atoi(text.c_str());
          if (rows < 1 || rows > kMaxRows) continue;
          if (checks) {
            norm_rows();
            GemmArgs other = p;
            other.w.kind = Kind::dtype16, other.w.tiles = tiles, other.w.quants = {};
            check(cudaMemsetAsync(y, 0, result, stream)), check(cudaMemsetAsync(found, 0, 8, stream));
            AS_DTYPE16::gemm_dtype16(other, rows, queue, GemmAlgo::mma);
            check(cudaMemcpyAsync(expected, y, result, cudaMemcpyDeviceToDevice, stream));
            // Differences by the stream, by mma.sync, and by what is best.
            unsigned long long before = 0, count;
            std::printf("  %d:", rows);
            for (GemmAlgo algo : {GemmAlgo::stream_k, GemmAlgo::mma, GemmAlgo::any}) {
              check(cudaMemsetAsync(y, 0, result, stream));
              GemmArgs own = p;
              if (norms && algo == GemmAlgo::any) own.unnormed = unnormed, own.norm = norm;
              const GemmChoice choice = chosen(own, rows, queue, algo);
              if (choice.fused) check(cudaMemsetAsync(x, 0xff, (size_t)shape.k * 2, stream));
              else own.unnormed = nullptr;
              gemm_quantized(own, rows, queue, choice.algo);
              differ<<<blocks(result / 4), 256, 0, stream>>>((uint32_t*)y, (uint32_t*)expected, result / 4, found);
              check(cudaMemcpyAsync(&count, found, 8, cudaMemcpyDeviceToHost, stream));
              check(cudaStreamSynchronize(stream));
              std::printf(" %llu", count - before);
              before = count;
            }
            continue;
          }
          const auto run = [&] {
            for (int i = 0; i < launches; i++) {
              p.w.quants = weights[i % copies];
              if (norms) p.unnormed = unnormed, p.norm = norm;
              const GemmChoice choice = chosen(p, rows, queue, algo);
              if (!choice.fused) p.unnormed = nullptr, norm_rows();
              gemm_quantized(p, rows, queue, choice.algo);
            }
          };
          run();
          check(cudaStreamSynchronize(stream));
          const double us = 1e3 * least_ms_of_graph(stream, 5, run) / launches;
          std::printf("  %d: %.1f (%.2f)", rows, us, bytes / 4.44e6 / us);
        }
        std::printf("\n");
        std::fflush(stdout);
        for (Quants& w : weights) cudaFree(w.words), cudaFree(w.scales);
        cudaFree(tiles);
      }
}
