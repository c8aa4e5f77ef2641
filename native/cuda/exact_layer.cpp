#include "cuda/exact_layer.h"

namespace as::cuda {
namespace {

struct LayerRows {
  ExactRows x, between;
  float *h, *y;
  size_t bytes;

  LayerRows(const ExactLayer& layer, int rows, int top, char* memory) {
    const size_t entries = (size_t)rows * top;
    size_t used = 0;
    const auto take = [&](size_t size) {
      char* found = memory + used;
      used += round_up_256(size);
      return found;
    };
    x = exact_rows(take(exact_rows_bytes(layer.gate_up, rows)), layer.gate_up, rows);
    h = reinterpret_cast<float*>(take(entries * (layer.gate_up.n / 2) * sizeof(float)));
    between = exact_rows(take(exact_rows_bytes(layer.down, (int)entries)), layer.down, (int)entries);
    y = reinterpret_cast<float*>(take(entries * layer.down.n * sizeof(float)));
    bytes = used;
  }
};

}  // namespace

size_t exact_layer_bytes(const ExactLayer& layer, int rows, int top) {
  return LayerRows(layer, rows, top, nullptr).bytes;
}

float* exact_layer_entries(const ExactLayer& layer, int rows, int top, char* scratch) {
  return LayerRows(layer, rows, top, scratch).y;
}

void multiply_exact_layer(const ExactLayer& layer, const MultiplyExperts& multiply, const float* x, int rows,
                          const Routing& routing, char* scratch, float* entries, const Queue& queue) {
  const LayerRows s(layer, rows, routing.top, scratch);
  quantize_exact(layer.gate_up, x, rows, s.x, queue);
  ExactGemm p;
  p.w = layer.gate_up, p.bias = layer.gate_up_bias, p.x = s.x, p.routing = routing;
  p.gathers = true, p.rows = rows, p.gate = layer.gate, p.alpha = layer.alpha, p.limit = layer.limit, p.y = s.h;
  multiply(p, false);
  quantize_exact(layer.down, s.h, rows * routing.top, s.between, queue);
  ExactGemm second;
  second.w = layer.down, second.bias = layer.down_bias, second.x = s.between;
  second.routing = routing, second.rows = rows, second.y = entries;
  multiply(second, true);
}

void run_exact_layer(const ExactLayer& layer, const MultiplyExperts& multiply, const float* x, int rows,
                     const Routing& routing, char* scratch, const ExactSums& sums, const Queue& queue) {
  const LayerRows s(layer, rows, routing.top, scratch);
  multiply_exact_layer(layer, multiply, x, rows, routing, scratch, s.y, queue);
  Combination c;
  c.entries = {s.y, nullptr, layer.down.n}, c.routing = routing, c.y = {sums.values, nullptr, layer.down.n},
  c.adds = sums.adds;
  combine_experts(c, rows, queue);
}

void run_exact_layer(const ExactLayer& layer, const ExactExperts& experts, const float* x, int rows,
                     const Routing& routing, char* scratch, float* sums, const Queue& queue) {
  const auto multiply = [&](ExactGemm& p, bool down) {
    p.experts = down ? experts.down : experts.gate_up;
    gemm_exact(p, rows * routing.top, queue);
  };
  run_exact_layer(layer, multiply, x, rows, routing, scratch, {sums}, queue);
}

}  // namespace as::cuda
