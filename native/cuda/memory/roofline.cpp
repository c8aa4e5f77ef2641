#include "cuda/memory/roofline.h"

#include <algorithm>
#include <functional>

#include "cuda/kernel_choice.h"
#include "cuda/kernels/common/roofline.h"
#include "cuda/kernels/gemm/gemm.h"
#include "cuda/memory/device.h"

namespace as::cuda {
namespace {

constexpr size_t kReadBytes = 512 << 20;  // many times the L2 cache
constexpr int kRows = 8192, kColumns = 8192, kDepth = 4096, kTimes = 5;

// Seconds of the queued work: the minimum of several runs, after a warm-up.
double least_seconds(const Device& device, const std::function<void()>& queue_work) {
  cudaEvent_t begin = nullptr, end = nullptr;
  check(cudaEventCreate(&begin), "making an event"), check(cudaEventCreate(&end), "making an event");
  double least = 1e9;
  for (int i = 0; i <= kTimes; i++) {
    check(cudaEventRecord(begin, device.stream()), "timing");
    queue_work();
    check(cudaEventRecord(end, device.stream()), "timing");
    device.wait();
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin, end), "timing");
    if (i) least = std::min(least, 1e-3 * milliseconds);
  }
  cudaEventDestroy(begin), cudaEventDestroy(end);
  return least;
}

}  // namespace

Roofline measure_roofline(int index) {
  const Device device(index);
  const Queue queue = device.queue();
  Roofline found;
  {
    const Memory data(kReadBytes, "measuring"), sink(sizeof(uint32_t), "measuring");
    found.read =
        kReadBytes / least_seconds(device, [&] { read_memory(data.as(), kReadBytes, sink.as<uint32_t>(), queue); });
  }
  const Memory weights(tiles_bytes(kColumns, kDepth), "measuring"), rows(tiles_bytes(kRows, kDepth), "measuring"),
      sums((size_t)kRows * kColumns * sizeof(float), "measuring");
  fill_bf16(weights.as(), weights.size(), queue), fill_bf16(rows.as(), rows.size(), queue);
  GemmArgs p;
  p.w.kind = Kind::dtype16, p.w.n = kColumns, p.w.k = kDepth, p.w.tiles = weights.as<uint16_t>();
  p.x = {nullptr, rows.as<uint16_t>(), kDepth}, p.y = {sums.as<float>(), nullptr, kColumns};
  const GemmAlgo algo = choose_gemm(device.chip(DType16::bf16), gemm_of(p), kRows).algo;
  found.bf16 = 2.0 * kRows * kColumns * kDepth / least_seconds(device, [&] { gemm_dtype16(p, kRows, queue, algo); });
  return found;
}

}  // namespace as::cuda
