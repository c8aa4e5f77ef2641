// Products of experts by the exact recipe on one GPU: microseconds of each kernel, part of the rate of 8-bit products
// and of the bandwidth, and a layer whose experts are copied from the host's memory meanwhile.
//   nvcc -std=c++17 -O3 -Inative -gencode=arch=compute_90a,code=sm_90a benchmarks/cuda/exact_experts.cu
//        native/cuda/kernels/exact/*.cu -o exact_experts
//   exact_experts [seconds [formats]]
#include <chrono>
#include <cstring>
#include <iterator>
#include <utility>
#include <vector>

#include "cuda/kernels/exact/exact.h"
#include "timing.h"

using namespace as;
using namespace as::cuda;

namespace {

constexpr double kRate = 1979e12;             // 8-bit multiplications and additions/s of an H100 SXM or H200, by wgmma
constexpr int kHidden = 2880, kInner = 2880;  // of gpt-oss

struct WeightForm {
  const char* name;
  Format format;
  int group;
  ScaleLayout scaling;
};
const WeightForm kForms[] = {{"MXFP4", Format::e2m1a16, 32, {ScaleType::bfloat16, ZeroType::none}},
                             {"NVFP4", Format::e2m1a16, 16, {ScaleType::float32, ZeroType::none}},
                             {"int4:32", Format::int4, 32, {ScaleType::float16, ZeroType::none}},
                             {"int4:64", Format::int4, 64, {}},
                             {"int8", Format::int8, 64, {}},
                             {"w8a8", Format::w8a8, 0, {}},
                             {"w4a8:64", Format::w4a8, 64, {}}};

ExactMatrix matrix_of(const WeightForm& form, int n, int k) {
  return exact_matrix(layout(n, k, Rules{32, false}, form.format, form.group, form.scaling));
}

__global__ void fill(uint32_t* to, size_t words) {  // scales become finite: no exponent of all ones
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < words; i += (size_t)gridDim.x * blockDim.x)
    to[i] = (uint32_t)(i * 2654435761u ^ i >> 7) & 0x3fff3fffu;
}

// Entries of `experts` experts with `rows` each, all of the same rows.
struct Layer {
  ExactMatrix gate_up, down;
  const char **of_gate_up, **of_down;
  Routing routing;
  int rows, experts;
  float *x, *h, *y;
  ExactRows in, between;

  int entries() const { return rows * experts; }
  ExactGemm first() const {
    ExactGemm p;
    p.w = gate_up, p.experts = of_gate_up, p.x = in, p.routing = routing, p.gathers = true, p.y = h;
    p.rows = rows;
    p.gate = ExactGate::clamped_silu, p.alpha = 1.702f, p.limit = 7;
    return p;
  }
  ExactGemm second() const {
    ExactGemm p;
    p.w = down, p.experts = of_down, p.x = between, p.routing = routing, p.y = y, p.rows = rows;
    return p;
  }
  void run(const Queue& queue) const {
    gemm_exact(first(), entries(), queue);
    quantize_exact(down, h, entries(), between, queue);
    gemm_exact(second(), entries(), queue);
  }
};

template <typename T>
T* copied(const std::vector<T>& values) {
  T* to = memory<T>(values.size() * sizeof(T));
  check(cudaMemcpy(to, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return to;
}

Layer layer_of(const WeightForm& form, int experts, int rows, const char* weights) {
  Layer l;
  l.gate_up = matrix_of(form, 2 * kInner, kHidden), l.down = matrix_of(form, kHidden, kInner);
  l.rows = rows, l.experts = experts;
  std::vector<const char*> first, second;
  for (int e = 0; e < experts; e++)
    first.push_back(weights + e * (l.gate_up.bytes + l.down.bytes)), second.push_back(first.back() + l.gate_up.bytes);
  l.of_gate_up = copied(first), l.of_down = copied(second);
  std::vector<ExpertTile> tiles;
  std::vector<int> row_of;
  for (int e = 0; e < experts; e++)
    for (int i = 0; i < rows; i++) {
      if (i % kExactTile == 0) tiles.push_back({e, e * rows + i, std::min(kExactTile, rows - i)});
      row_of.push_back(i);
    }
  l.routing.end = experts, l.routing.top = experts;
  l.routing.tiles = copied(tiles), l.routing.row_of = copied(row_of);
  l.routing.tile_count = copied(std::vector<int>{(int)tiles.size()});
  std::vector<float> x((size_t)rows * kHidden);
  for (float& v : x) v = rand() / (float)RAND_MAX - 0.5f;
  l.x = copied(x), l.h = memory<float>((size_t)l.entries() * kInner * 4);
  l.y = memory<float>((size_t)l.entries() * kHidden * 4);
  l.in = exact_rows(memory<char>(exact_rows_bytes(l.gate_up, rows)), l.gate_up, rows);
  l.between = exact_rows(memory<char>(exact_rows_bytes(l.down, l.entries())), l.down, l.entries());
  return l;
}

void free_layer(const Layer& l) {
  for (void* p :
       {(void*)l.of_gate_up, (void*)l.of_down, (void*)l.routing.tiles, (void*)l.routing.row_of,
        (void*)l.routing.tile_count, (void*)l.x, (void*)l.h, (void*)l.y, (void*)l.in.values, (void*)l.between.values})
    cudaFree(p);
}

}  // namespace

int main(int count, char** arguments) {
  setvbuf(stdout, nullptr, _IONBF, 0);
  const double limit = count > 1 ? std::atof(arguments[1]) : 1e9;
  const auto began = std::chrono::steady_clock::now();
  const auto late = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count() > limit;
  };
  cudaStream_t stream, copies;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  check(cudaStreamCreateWithFlags(&copies, cudaStreamNonBlocking));
  const Queue queue{stream, 90, {}};
  constexpr int kMostExperts = 32;
  const size_t all = (size_t)kMostExperts * 30 << 20;
  char* weights = memory<char>(all);
  fill<<<1024, 256>>>((uint32_t*)weights, all / 4);
  check(cudaDeviceSynchronize());

  const WeightForm* const last = kForms + (count > 2 ? std::atoi(arguments[2]) : std::size(kForms));
  std::printf("us of gate_up, quantization, down; TOPS of 8-bit products, of %0.f; GB/s of weights\n", kRate / 1e12);
  for (const WeightForm& form : kForms)
    for (const auto& size : {std::pair(4, 1),
                             {4, 8},
                             {32, 1},
                             {32, 8},
                             {32, 16},
                             {32, 32},
                             {32, 33},
                             {1, 256},
                             {4, 64},
                             {4, 256},
                             {32, 256}}) {
      const int experts = size.first, rows = size.second;
      if (late()) return 0;
      if (&form >= last) break;
      if (&form != kForms && (rows == 1 || experts == 1)) continue;
      const Layer l = layer_of(form, experts, rows, weights);
      const double planes = exact_planes(l.down.format), work = 2.0 * kHidden * kInner * l.entries() * planes;
      for (const int at_most : {rows, kExactFew + 1}) {  // with few rows, both kernels
        if (at_most == kExactFew + 1 && rows > kExactFew) continue;
        ExactGemm gate_up = l.first(), down = l.second();
        gate_up.rows = down.rows = at_most;
        const float quantizing = least_ms(stream, 5, [&] { quantize_exact(l.gate_up, l.x, rows, l.in, queue); }),
                    first = least_ms(stream, 9, [&] { gemm_exact(gate_up, l.entries(), queue); }),
                    between = least_ms(stream, 5, [&] { quantize_exact(l.down, l.h, l.entries(), l.between, queue); }),
                    second = least_ms(stream, 9, [&] { gemm_exact(down, l.entries(), queue); });
        check(cudaDeviceSynchronize());
        std::printf(
            "%-8s %2d experts of %3d rows%s: x %5.1f  gate_up %7.1f us %5.0f TOPS %5.0f GB/s  h %6.1f  down "
            "%7.1f us %5.0f TOPS %5.0f GB/s\n",
            form.name, experts, rows, at_most <= kExactFew ? ", few" : "", quantizing * 1e3, first * 1e3,
            2 * work / first / 1e9, experts * l.gate_up.bytes / first / 1e6, between * 1e3, second * 1e3,
            work / second / 1e9, experts * l.down.bytes / second / 1e6);
      }
      free_layer(l);
    }

  // A layer whose experts come over PCIe, a few at a time, while those before are computed.
  for (const int rows : {64, 256, 512})
    for (const int each : {1, 4}) {
      if (late()) return 0;
      const WeightForm& form = kForms[0];
      const Layer l = layer_of(form, each, rows, weights), other = layer_of(form, each, rows, weights + all / 2);
      const size_t bytes = each * (l.gate_up.bytes + l.down.bytes);
      constexpr int kTurns = 32;
      char* host = nullptr;
      check(cudaMallocHost(&host, 2 * bytes));
      std::memset(host, 17, 2 * bytes);
      cudaEvent_t copied[2], used[2];
      for (int i : {0, 1})
        check(cudaEventCreateWithFlags(&copied[i], cudaEventDisableTiming)),
            check(cudaEventCreateWithFlags(&used[i], cudaEventDisableTiming)), check(cudaEventRecord(used[i], stream));
      const auto turns = [&](bool copies_too, bool computes) {
        check(cudaDeviceSynchronize());
        const auto start = std::chrono::steady_clock::now();
        for (int i = 0; i < kTurns; i++) {
          const int half = i % 2;
          check(cudaStreamWaitEvent(copies, used[half]));
          if (copies_too)
            check(
                cudaMemcpyAsync(weights + half * all / 2, host + half * bytes, bytes, cudaMemcpyHostToDevice, copies));
          check(cudaEventRecord(copied[half], copies));
          check(cudaStreamWaitEvent(stream, copied[half]));
          if (computes) (half ? other : l).run(queue);
          check(cudaEventRecord(used[half], stream));
        }
        check(cudaDeviceSynchronize());
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / kTurns * 1e6;
      };
      double copying = 1e9, computing = 1e9, both = 1e9;
      for (int i = 0; i < 3; i++)
        copying = std::min(copying, turns(true, false)), computing = std::min(computing, turns(false, true)),
        both = std::min(both, turns(true, true));
      std::printf(
          "%s, %d experts at a time of %d rows: %.0f us to copy (%.1f GB/s), %.0f to compute, %.0f both: %.2f of "
          "PCIe\n",
          form.name, each, rows, copying, bytes / copying / 1e3, computing, both, copying / both);
      cudaFreeHost(host), free_layer(l), free_layer(other);
    }
  return 0;
}
