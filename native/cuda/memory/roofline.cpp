#include "cuda/memory/roofline.h"

#include "cuda/kernel_choice.h"
#include "cuda/kernels/common/roofline.h"
#include "cuda/kernels/gemm/gemm.h"
#include "cuda/memory/device.h"
#include "cuda/memory/timing.h"

namespace as::cuda {
namespace {

constexpr size_t kReadBytes = 512 << 20;  // many times the L2 cache
constexpr int kRows = 8192, kColumns = 8192, kDepth = 4096, kTimes = 5;

}  // namespace

Roofline measure_roofline(int index) {
  const Device device(index);
  const Queue queue = device.queue();
  Roofline found;
  {
    const Memory data(kReadBytes, "measuring"), sink(sizeof(uint32_t), "measuring");
    const auto read = [&] { read_memory(data.as(), kReadBytes, sink.as<uint32_t>(), queue); };
    found.read = kReadBytes / seconds_of(device, kTimes, read).least;
  }
  const Memory weights(tiles_bytes(kColumns, kDepth), "measuring"), rows(tiles_bytes(kRows, kDepth), "measuring"),
      sums((size_t)kRows * kColumns * sizeof(float), "measuring");
  fill_bf16(weights.as(), weights.size(), queue), fill_bf16(rows.as(), rows.size(), queue);
  GemmArgs p;
  p.w.kind = Kind::dtype16, p.w.n = kColumns, p.w.k = kDepth, p.w.tiles = weights.as<uint16_t>();
  p.x = {nullptr, rows.as<uint16_t>(), kDepth}, p.y = {sums.as<float>(), nullptr, kColumns};
  const GemmAlgo algo = choose_gemm(device.chip(DType16::bf16), gemm_of(p), kRows).algo;
  const auto multiply = [&] { gemm_dtype16(p, kRows, queue, algo); };
  found.bf16 = 2.0 * kRows * kColumns * kDepth / seconds_of(device, kTimes, multiply).least;
  return found;
}

}  // namespace as::cuda
