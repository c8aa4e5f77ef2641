// GEMMs of e4m3 weights with a scale for each output channel and e4m3 activations with a scale for each token.
// A checkpoint in blocks of 128 x 128 has weights with a scale for each row and 128 columns (kFloatGroup), and then
// activations have one for each token and 128 columns. Capability 9.0 only: the accumulation of wgmma cannot be
// reproduced bit for bit by other instructions.
//
// Recipe: a split-K part (tiles.h) is one chain of wgmma sums in ascending order. Parts are added in float32 in
// ascending order; the sum is multiplied by the channel's scale and then by the token's. Within a chain wgmma keeps
// about 14 bits of its sums. This error is a thirtieth of the error of 3-bit mantissas of weights and activations.
//
// Recipe with groups: each group is a chain of its own, from zero. Its sum times the rounded product of both scales is
// added to the split-K part's total by a fused multiply-add in float32, groups in ascending order. Parts are added as
// above.
#pragma once
#include "cuda/kernels/gemm/gemm.h"

namespace as::cuda {

constexpr float kLargestFloat8 = 448.0f;

// stream_k: any number of rows; prefill: many rows.
void gemm_float8_stream_k(const GemmArgs& p, int rows, const Queue& queue);
void gemm_float8_prefill(const GemmArgs& p, int rows, const Queue& queue);

}  // namespace as::cuda
