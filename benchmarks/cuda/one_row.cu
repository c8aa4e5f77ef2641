// GEMV kernels that norm or quantize their row themselves: their bits against those of separate kernels, at awkward
// sizes. Also GEMM of up to eight rows with the same fused quantization.
//   nvcc -std=c++17 -O3 -Inative -gencode=arch=compute_90a,code=sm_90a benchmarks/cuda/one_row.cu
//        native/cuda/kernel_choice.cpp
//        native/cuda/kernels/{gemm/{gemm_{dtype16,split_k,stream_k,prefill,mma_prefill,f32,8bit*,integer},
//        gemv},quantize/quantize_rows,norm/rows}.cu
#include <cstdio>
#include <cstdlib>
#include <tuple>
#include <vector>

#include "chosen.h"
#include "cuda/kernels/gemm/gemm_wgmma.h"
#include "cuda/kernels/quantize/quantized.cuh"

using namespace as::cuda;

namespace {

cudaStream_t stream;
Queue queue;
uint64_t seed = 1;

void check(cudaError_t result) {
  if (result != cudaSuccess) std::printf("%s\n", cudaGetErrorString(result)), std::exit(1);
}
template <typename T>
T* memory(size_t bytes, int value = 0) {
  void* data = nullptr;
  check(cudaMalloc(&data, bytes)), check(cudaMemset(data, value, bytes));
  return static_cast<T*>(data);
}
__device__ uint64_t noise(uint64_t i) {
  i = (i + 1) * 0x9E3779B97F4A7C15ull, i ^= i >> 29, i *= 0xBF58476D1CE4E5B9ull;
  return i ^ i >> 32;
}
// What is padding of columns has any code, of floats a NaN.
__global__ void fill_quants(Quants quants, int n, int k, size_t words, uint64_t seed) {
  const size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
  if (i < words) quants.words[i] = quants.floats ? noise(i + seed) & 0xbfbfbfbfu : noise(i + seed);
  const size_t rows = (size_t)blocks_of(n) * kBlock * quants.groups;
  const float scale = (quants.floats ? 1e-2f : 2e-4f) * (1 + noise(i) % 8 / 8.0f);
  if (i < rows) quants.scales[i] = quants.floats ? __float_as_uint(scale) : to_dtype16x2(scale, scale * (i % 5));
}
__global__ void fill_matrix(uint16_t* tiles, int n, int k, uint64_t seed) {
  const size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
  if (i < (size_t)n * k)
    tiles[tile_offset(i / k, i % k, blocks_of(k))] =
        to_dtype16((int)(noise(i + seed) >> 40 & 0xffff) * 0x1p-20f - 0.03f);
}
__global__ void fill_row(float* x, uint16_t* tiles, int k, uint64_t seed, float odd) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= k) return;
  const float value = i == k / 3 ? odd : (int)(noise(i + seed) >> 40 & 0xffff) * 0x1p-16f - 0.5f;
  x[i] = value, tiles[tile_offset(0, i, blocks_of(k))] = to_dtype16(value);
}

void few_rows() {
  int wrong = 0, done = 0;
  for (bool floats : {true, false})
    for (const auto& [n, k, gated, adds] : std::vector<std::tuple<int, int, bool, bool>>{{4608, 3584, false, false},
                                                                                         {3584, 3584, false, true},
                                                                                         {3584, 18944, false, true},
                                                                                         {1036, 900, false, true},
                                                                                         {656, 1000, true, false},
                                                                                         {9728, 896, true, false},
                                                                                         {896, 4864, false, true},
                                                                                         {70, 300, false, false},
                                                                                         {64, 64, false, false},
                                                                                         {1, 130, false, false},
                                                                                         {5, 8192, false, true},
                                                                                         {3001, 5120, false, false}})
      for (int rows : {1, 2, 3, 5, 8}) {
        Matrix m{n, k, floats ? Kind::float8 : Kind::integers};
        const size_t words = quants_bytes(n, k, 8) / 4, all = std::max<size_t>(words, (size_t)blocks_of(n) * kBlock);
        m.quants = {8, k, 1, floats, true, false, memory<uint32_t>(words * 4), memory<uint32_t>(scales_bytes(n, 1))};
        m.max_split_k = quant_split_k(n, k, kMaxSplitK);
        fill_quants<<<ceil_div(all, 256), 256>>>(m.quants, n, k, words, seed++);
        const int width = gated ? n / 2 : n;
        float* x = memory<float>(8 * k * 4);
        uint16_t* spare = memory<uint16_t>(tiles_bytes(1, 8 * k));
        fill_row<<<ceil_div(8 * k, 256), 256>>>(x, spare, 8 * k, seed++, 3.0f);
        check(cudaDeviceSynchronize());
        GemmArgs p;
        p.w = m, p.adds = adds, p.gated = gated, p.x = {x, nullptr, k};
        char* bytes = memory<char>(byte_rows_bytes(8, k));
        p.bytes = byte_rows(bytes, 8, k);
        std::vector<uint32_t> found[2];
        for (int own = 0; own < 2; own++) {
          p.y = {memory<float>(8 * width * 4), nullptr, width};
          quantize_activations(p, rows, queue);
          for (int turn = 0; turn < 1 + adds; turn++)
            (floats ? gemm_float8 : gemm_integer)(p, rows, queue, own ? plain(p, rows, queue) : GemmAlgo::stream_k);
          found[own].resize(8 * width);
          check(cudaStreamSynchronize(stream));
          check(cudaMemcpy(found[own].data(), p.y.values, 8 * width * 4, cudaMemcpyDeviceToHost));
          check(cudaFree(p.y.values));
        }
        int differ = 0;
        for (int i = 0; i < 8 * width; i++) differ += found[0][i] != found[1][i];
        done++;
        if (differ) wrong++, std::printf("%d rows, %d x %d, floats %d: %d differ\n", rows, n, k, floats, differ);
        for (void* data : {(void*)m.quants.words, (void*)m.quants.scales, (void*)x, (void*)spare, (void*)bytes})
          check(cudaFree(data));
      }
  std::printf("few rows: %d compared, %d of them wrong\n", done, wrong);
}

}  // namespace

int main() {
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  queue = {stream, 90, {}};
  queue.scratch = {memory<float>(kScratchCtas * kScratchFloats * 4), memory<int>(kScratchCtas * kScratchFlags * 4),
                   memory<float>(kScratchParts * 4), memory<int>(kScratchCounts * 4)};
  const struct {
    int n, k;
    bool gated, adds, bias;
  } shapes[] = {
      {4608, 3584, false, false, true},  {3584, 3584, false, true, false}, {3584, 18944, false, true, false},
      {37888, 3584, true, false, false}, {1036, 900, false, true, true},   {656, 1000, true, false, true},
      {9728, 896, true, false, false},   {896, 4864, false, true, false},  {70, 300, false, false, true},
      {64, 64, false, false, false},     {1, 130, false, false, true},     {5, 8192, false, true, false},
      {3001, 5120, false, false, true},  {20000, 8000, false, true, true}, {152064, 3584, false, false, false},
      {8192, 29568, false, true, false}};
  int wrong = 0, none = 0, done = 0;
  for (const char* form : {"bf16", "float8", "w8a8", "w8a8:128", "w4a8:64"})
    for (const auto& s : shapes)
      for (int from = 0; from < 3; from++)  // norm, tiles, values
        for (float odd : {0.25f, 1e30f, INFINITY}) {
          const bool floats = form[0] == 'f', bf16 = form[0] == 'b';
          const int bits = bf16 ? 16 : form[1] == '4' ? 4 : 8, n = s.gated ? paired_rows(s.n) : s.n;
          const int group = form[4] == ':' ? std::atoi(form + 5) : 0;
          if (bf16 && from == 2) continue;
          if ((from == 0 && s.k > 8192) || (odd != 0.25f && (s.n > 9000 || from > 1))) continue;
          Matrix m{n, s.k, bf16 ? Kind::dtype16 : floats ? Kind::float8 : Kind::integers};
          const int groups = group && group < s.k ? ceil_div(s.k, group) : 1;
          m.quants = {bits, groups > 1 ? group : s.k, groups, floats, bits == 8, false, nullptr, nullptr};
          m.quants.words = memory<uint32_t>(quants_bytes(n, s.k, bits));
          m.quants.scales = memory<uint32_t>(scales_bytes(n, groups));
          m.max_split_k = quant_split_k(n, s.k, bits == 8 ? kMaxSplitK : kMaxQuantSplitK);
          const size_t words = quants_bytes(n, s.k, bits) / 4,
                       all = std::max<size_t>(words, (size_t)blocks_of(n) * kBlock * groups);
          fill_quants<<<ceil_div(all, 256), 256>>>(m.quants, n, s.k, words, seed++);
          if (bf16) {
            uint16_t* values = memory<uint16_t>(tiles_bytes(n, s.k));
            fill_matrix<<<ceil_div((size_t)n * s.k, 256), 256>>>(values, n, s.k, seed++);
            m.tiles = values, m.quants.bits = 0, m.max_split_k = max_split_k(n);
          }
          GemmArgs p;
          float *x = memory<float>(s.k * 4), *weight = memory<float>(s.k * 4), *bias = memory<float>(s.n * 4);
          uint16_t *tiles = memory<uint16_t>(tiles_bytes(1, s.k)), *spare = memory<uint16_t>(tiles_bytes(1, s.k));
          fill_row<<<ceil_div(s.k, 256), 256>>>(weight, spare, s.k, seed++, 1.0f);
          fill_row<<<ceil_div(s.k, 256), 256>>>(x, tiles, s.k, seed++, odd);
          const int width = s.gated ? s.n / 2 : s.n;
          uint16_t* spare2 = memory<uint16_t>(tiles_bytes(1, s.n));
          fill_row<<<ceil_div(s.n, 256), 256>>>(bias, spare2, s.n, seed++, 1.0f);
          check(cudaDeviceSynchronize());
          p.w = m, p.bias = s.bias ? bias : nullptr, p.adds = s.adds, p.gated = s.gated;
          p.x = from == 1 ? Rows{nullptr, tiles, s.k} : Rows{x, nullptr, s.k};
          p.bytes = byte_rows(memory<char>(byte_rows_bytes(1, s.k)), 1, s.k);
          const Norm norm{weight, 1e-6f, s.k % 3 == 0};
          std::vector<uint32_t> found[2];
          bool there = false;
          float* y[2];
          for (int own = 0; own < 2; own++) {
            y[own] = memory<float>(width * 4);
            p.y = {y[own], nullptr, width};
            if (from == 0) p.unnormed = x, p.norm = norm;
            for (int turn = 0; turn < (s.adds ? 2 : 1); turn++) {
              if (own && bf16) {
                there = (from ? plain(p, 1, queue) : chosen(p, 1, queue).algo) == GemmAlgo::gemv;
                if (there) gemv(p, queue);
              } else if (bf16) {
                GemmArgs other = p;
                other.unnormed = nullptr, other.x = {nullptr, tiles, s.k};
                if (from == 0) AS_DTYPE16::rms_norm(x, norm, 1, other.x, queue);
                AS_DTYPE16::gemm_dtype16(other, 1, queue, plain(other, 1, queue, GemmAlgo::split_k));
              } else if (own) {
                const GemmChoice choice = chosen(p, 1, queue);
                if ((there = choice.fused)) gemv_8bit(p, queue, choice.algo);
              } else {
                from == 0 ? rms_norm_into_bytes(x, norm, p, 1, queue) : quantize_activations(p, 1, queue);
                floats ? gemm_float8(p, 1, queue, GemmAlgo::stream_k) : gemm_integer(p, 1, queue, GemmAlgo::stream_k);
              }
            }
            found[own].resize(width);
            check(cudaStreamSynchronize(stream));
            check(cudaMemcpy(found[own].data(), y[own], width * 4, cudaMemcpyDeviceToHost));
          }
          int differ = 0, first = -1;
          const auto is_nan = [](uint32_t x) { return (x & 0x7fffffff) > 0x7f800000; };
          for (int i = 0; i < width; i++)
            if (found[0][i] != found[1][i] && !(is_nan(found[0][i]) && is_nan(found[1][i])))
              if (!differ++) first = i;
          if (!there) none++;
          else done++;
          if (there && differ)
            wrong++, std::printf("%s %d x %d gated %d from %d odd %g: %d of %d differ, first %d: %08x %08x\n", form,
                                 s.n, s.k, s.gated, from, odd, differ, width, first, found[0][first], found[1][first]);
          for (void* data :
               {(void*)m.quants.words, (void*)m.quants.scales, (void*)x, (void*)weight, (void*)bias, (void*)tiles,
                (void*)spare, (void*)spare2, (void*)p.bytes.values, (void*)y[0], (void*)y[1], (void*)m.tiles})
            check(cudaFree(data));
        }
  std::printf("%d compared, %d of them wrong, %d without a kernel\n", done, wrong, none);
  few_rows();
}
