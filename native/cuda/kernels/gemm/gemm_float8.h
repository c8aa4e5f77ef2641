// Products of weights in e4m3, a scale for each row (output channel), with activations in e4m3, a scale for each row
// (token). Chips of capability 9.0 alone: sums of wgmma have bits of their own.
//
// Recipe: a piece of K (tiles.h) is one chain of wgmma's sums in ascending order, and pieces are added in float32 in
// ascending order; the sum is multiplied by the channel's scale, and then by the token's. Within a chain wgmma keeps 14
// bits or so of what it has summed: that is a thirtieth of what three bits of weights and activations cost.
#pragma once
#include "cuda/kernels/gemm/gemm.h"

namespace as::cuda {

constexpr float kLargestFloat8 = 448.0f;

// Any rows; many.
void gemm_float8_stream_k(const GemmArgs& p, int rows, const Queue& queue);
void gemm_float8_prefill(const GemmArgs& p, int rows, const Queue& queue);

}  // namespace as::cuda
