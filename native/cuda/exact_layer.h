// A layer of routed experts by the exact recipe (kernels/exact/exact.h) on one rank's slice: gate_up, activation, down
// and the sum of each row's experts.
#pragma once
#include <functional>

#include "cuda/kernels/exact/exact.h"

namespace as::cuda {

struct ExactLayer {
  ExactMatrix gate_up, down;
  const float *gate_up_bias = nullptr, *down_bias = nullptr;  // [experts, n] on the GPU, or null
  ExactGate gate = ExactGate::silu;
  float alpha = 0, limit = 0;
};
// Where experts' panels are on the GPU: [experts] each, themselves there.
struct ExactExperts {
  const char *const *gate_up = nullptr, *const *down = nullptr;
};
// Calls gemm_exact() for the products p, which is of gate_up or of down, any number of times, each time for some of the
// experts: it says where these are.
using MultiplyExperts = std::function<void(ExactGemm& p, bool down)>;
// Where sums [rows, down.n] go.
struct ExactSums {
  float* values = nullptr;
  bool adds = false;
};

// Where the products of entries with gate_up and down go: entries [rows * top, down.n]. scratch: of
// exact_layer_bytes(). The rest as of run_exact_layer().
void multiply_exact_layer(const ExactLayer& layer, const MultiplyExperts& multiply, const float* x, int rows,
                          const Routing& routing, char* scratch, float* entries, const Queue& queue);
// The part of scratch memory that may hold these entries.
float* exact_layer_entries(const ExactLayer& layer, int rows, int top, char* scratch);
// Bytes of scratch memory for so many rows with `top` experts each.
size_t exact_layer_bytes(const ExactLayer& layer, int rows, int top);
// sums = each row's experts times their weights, by ascending expert from zero, as combine_experts() has it. x: [rows,
// gate_up.inputs]. routing: with tiles of up to kExactTile entries.
void run_exact_layer(const ExactLayer& layer, const MultiplyExperts& multiply, const float* x, int rows,
                     const Routing& routing, char* scratch, const ExactSums& sums, const Queue& queue);
// The same with all experts of the routing on the GPU.
void run_exact_layer(const ExactLayer& layer, const ExactExperts& experts, const float* x, int rows,
                     const Routing& routing, char* scratch, float* sums, const Queue& queue);

}  // namespace as::cuda
