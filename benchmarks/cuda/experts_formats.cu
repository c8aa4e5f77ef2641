// The expert GEMMs of a layer of gpt-oss-20b or Qwen3-30B-A3B in several formats: microseconds, and fractions of the
// time that the weights' bytes or the operations take.
//   nvcc -std=c++17 -O3 -Inative -gencode=arch=compute_90a,code=sm_90a benchmarks/cuda/experts_formats.cu
//        native/cuda/kernel_choice.cpp
//        native/cuda/kernels/{moe/*,gemm/gemm_small_n,quantize/pack,quantize/quantize_rows}.cu -o experts_formats
//   experts_formats 20b|30b rows,rows... [mxfp4,bf16,float8,float8:128,w8a8]
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "chosen.h"
#include "cuda/kernels/common/dtype16.h"
#include "timing.h"

using namespace as::cuda;

constexpr int kCopies = 3;
constexpr double kBandwidth = 4.44e6, kRate = 792e6;  // bytes, operations in a microsecond
static int kHidden = 2880, kInner = 2880, kExperts = 32, kTop = 4;

enum class Format { mxfp4, bf16, float8, float8_128, w8a8, count };
constexpr const char* kNames[] = {"mxfp4", "bf16", "float8", "float8:128", "w8a8"};

static size_t bytes_of(const Matrix& m) {
  return m.quants.bits ? quantized_bytes(m.quants, m.n, m.k) : tiles_bytes(m.n, m.k);
}

// Random matrices. Any values will do, but scales of MXFP4 must be small.
static Matrix matrix(int n, int k, Format format, uint64_t seed, const Queue& queue) {
  Matrix m{n, k, Kind::dtype16, kDType16};
  m.experts = kExperts, m.max_split_k = 1;
  const bool mx = format == Format::mxfp4;
  if (mx) {
    m.kind = Kind::mxfp4;
    m.quants.bits = 4, m.quants.mx = true, m.quants.group = kMxGroup, m.quants.groups = k / kMxGroup;
  } else if (format != Format::bf16) {
    m.kind = format == Format::w8a8 ? Kind::integers : Kind::float8;
    m.quants.bits = 8, m.quants.floats = format != Format::w8a8, m.quants.in_rows = true;
    m.quants.group = format == Format::float8_128 ? kFloatGroup : k, m.quants.groups = k / m.quants.group;
  }
  const size_t bytes = kExperts * bytes_of(m);
  uint16_t* data = memory<uint16_t>(bytes);
  AS_DTYPE16::fill_noise(data, bytes, kDType16, 0.035f, seed, queue);
  if (mx) {
    m.quants.words = reinterpret_cast<uint32_t*>(data);
    check(cudaDeviceSynchronize());
    check(cudaMemset2D(reinterpret_cast<char*>(data) + kTileRows * kBlock / 2, kMxTileBytes, 120 + kMxBias - 1,
                       2 * kTileRows, bytes / kMxTileBytes));
  } else if (format != Format::bf16) {
    m.quants.words = reinterpret_cast<uint32_t*>(data);
    m.quants.scales = m.quants.words + quants_bytes(n, k, 8) / 4;
  } else {
    m.tiles = data;
  }
  return m;
}

int main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IONBF, 0);
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const Queue queue{stream, 90, {}};
  if (argc > 1 && std::strcmp(argv[1], "30b") == 0) kHidden = 2048, kInner = 768, kExperts = 128, kTop = 8;
  std::vector<int> all;
  for (char* at = std::strtok(argc > 2 ? argv[2] : strdup("32"), ","); at; at = std::strtok(nullptr, ","))
    all.push_back(std::atoi(at));
  const std::string wanted = std::string(",") + (argc > 3 ? argv[3] : "mxfp4,bf16") + ",";
  int most = 1;
  for (int rows : all) most = rows > most ? rows : most;
  const size_t entries = (size_t)most * kTop;
  const Rows x{nullptr, memory<uint16_t>(tiles_bytes(most, kHidden)), kHidden},
      gated{nullptr, memory<uint16_t>(tiles_bytes((int)entries, kInner)), kInner},
      made{memory<float>(entries * kHidden * 4), nullptr, kHidden},
      sum{memory<float>((size_t)most * kHidden * 4), nullptr, kHidden};
  AS_DTYPE16::fill_noise(x.tiles, tiles_bytes(most, kHidden), kDType16, 1, 77, queue);
  float* logits = memory<float>((size_t)most * kExperts * 4);
  std::vector<float> scores((size_t)most * kExperts);
  for (float& v : scores) v = rand() / (float)RAND_MAX;
  check(cudaMemcpy(logits, scores.data(), scores.size() * 4, cudaMemcpyHostToDevice));
  Routing routing;
  routing.top = kTop, routing.end = kExperts;
  place_routing(memory<char>(routing_bytes(most, kTop, kExperts)), most, kExperts, routing);
  Router router;
  router.experts = kExperts, router.normalized = true;
  const auto time_of = [&](const std::function<void(int)>& launch) {
    constexpr int kLaunches = 12;
    const float ms = least_ms_of_graph(stream, 5, [&] {
      for (int i = 0; i < kLaunches; i++) launch(i % kCopies);
    });
    return 1e3 * ms / kLaunches;
  };
  char* const rows_of_bytes = memory<char>(byte_rows_bytes((int)entries, kHidden > kInner ? kHidden : kInner));
  for (int number = 0; number < (int)Format::count; number++) {
    const Format format = (Format)number;
    const char* format_name = kNames[number];
    if (wanted.find(std::string(",") + format_name + ",") == std::string::npos) continue;
    const bool eight = format > Format::bf16;
    std::vector<Matrix> up, down;
    for (int i = 0; i < kCopies; i++)
      up.push_back(matrix(2 * kInner, kHidden, format, 2 * i, queue)),
          down.push_back(matrix(kHidden, kInner, format, 2 * i + 1, queue));
    const auto args = [&](const Matrix& w, bool is_up, int rows) {
      ExpertGemmArgs e;
      e.x_rows = is_up ? rows : rows * kTop;
      if (eight) e.gemm.bytes = byte_rows(rows_of_bytes, e.x_rows, w.k);
      e.gemm.w = w, e.gemm.x = is_up ? x : gated, e.gemm.y = is_up ? gated : made, e.gemm.gated = is_up;
      e.routing = routing, e.gathers = is_up, e.follows = !is_up, e.gating = {1.702f, 7, 1};
      return e;
    };
    const auto launch = [&](const Matrix& w, bool is_up, int rows, int height, GemmAlgo algo) {
      const ExpertGemmArgs e = args(w, is_up, rows);
      if (eight) quantize_activations(e.gemm, e.x_rows, queue);
      AS_DTYPE16::gemm_experts(e, rows * kTop, height, queue, algo);
    };
    const ChosenRow row{router, logits, nullptr};
    const Combination c{{false, sum, {}, {}}, made.values, routing};
    const double up_bytes = (double)bytes_of(up[0]);
    for (int rows : all) {
      route(logits, router, routing, nullptr, rows, 8, queue);
      int tiles = 0;
      check(cudaStreamSynchronize(stream));
      check(cudaMemcpy(&tiles, routing.tile_count, 4, cudaMemcpyDeviceToHost));
      std::vector<ExpertTile> list(tiles);
      check(cudaMemcpy(list.data(), routing.tiles, tiles * sizeof(ExpertTile), cudaMemcpyDeviceToHost));
      int touched = 0;
      for (int i = 0; i < tiles; i++) touched += i == 0 || list[i].expert != list[i - 1].expert;
      // Of the sums of entries, which do not depend on how entries are grouped.
      const auto bits_of_sum = [&](int rows) {
        AS_DTYPE16::combine_experts(c, rows, queue);
        std::vector<uint32_t> values((size_t)rows * kHidden);
        check(cudaStreamSynchronize(stream));
        check(cudaMemcpy(values.data(), sum.values, values.size() * 4, cudaMemcpyDeviceToHost));
        uint32_t bits = 0;
        for (uint32_t value : values) bits = (bits ^ value) * 16777619u;
        return bits;
      };
      const auto show = [&](const char* name, int height, double first, double both, uint32_t bits) {
        const double bytes = up_bytes * touched / kBandwidth, work = 4.0 * rows * kTop * kInner * kHidden / kRate;
        std::printf(
            "%s %d rows, %d experts, %s %d: gate_up %.1f us (%.2f of bytes, %.2f of products), with down %.1f; %08x\n",
            format_name, rows, touched, name, height, first, bytes / first, work / first, both, bits);
      };
      if (rows ==
          1) {  // and choosing the experts and adding their results, with the kernels for one row and for several
        const ExpertChoice choice = choose_expert_gemm(chip_of(queue), up[0].kind, kTop, kExperts);
        if (!eight) {
          const bool mx = format == Format::mxfp4;
          const auto gates = [&](int i) {
            if (mx) AS_DTYPE16::gemm_chosen_experts(args(up[i], true, 1), row, queue);
            else AS_DTYPE16::gate_row(args(up[i], true, 1), row, queue);
          };
          std::printf("%s a layer's experts by the kernels for one row: %.1f us, gate_up alone %.1f\n", format_name,
                      time_of([&](int i) {
                        gates(i);
                        if (!mx) return AS_DTYPE16::combine_row(args(down[i], false, 1), row, c, queue);
                        launch(down[i], false, 1, 8, choice.algo);
                        AS_DTYPE16::combine_experts(c, 1, queue);
                      }),
                      time_of(gates));
        }
        std::printf("%s a layer's experts by the kernels for several: %.1f us\n", format_name, time_of([&](int i) {
                      route(logits, router, routing, nullptr, 1, 8, queue);
                      launch(up[i], true, 1, 8, choice.algo);
                      launch(down[i], false, 1, 8, choice.algo);
                      AS_DTYPE16::combine_experts(c, 1, queue);
                    }));
      }
      const ExpertChoice usual = choose_expert_gemm(chip_of(queue), up[0].kind, rows * kTop, kExperts);
      for (const int height : {8, 16, 32, 48, 64, 128})
        for (const GemmAlgo algo : {GemmAlgo::any, GemmAlgo::mma}) {
          const ExpertChoice choice =
              choose_expert_gemm(chip_of(queue), up[0].kind, rows * kTop, kExperts, algo, height);
          if (height > 2 * usual.tile_rows || 2 * height < usual.tile_rows ||
              (algo == GemmAlgo::mma && (eight || height == 48 || height == 128)) ||
              (algo == GemmAlgo::any && choice.algo == GemmAlgo::mma))
            continue;
          route(logits, router, routing, nullptr, rows, height, queue);
          check(cudaStreamSynchronize(stream));
          const double first = time_of([&](int i) { launch(up[i], true, rows, height, choice.algo); });
          const double both = time_of([&](int i) {
            launch(up[i], true, rows, height, choice.algo);
            launch(down[i], false, rows, height, choice.algo);
          });
          show(name_of(choice.algo), height, first, both, bits_of_sum(rows));
        }
    }
    for (const Matrix& m : up) cudaFree(m.quants.bits ? (void*)m.quants.words : (void*)m.tiles);
    for (const Matrix& m : down) cudaFree(m.quants.bits ? (void*)m.quants.words : (void*)m.tiles);
  }
}
