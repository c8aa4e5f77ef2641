// Products of weights in e4m3, a scale for each row (output channel), with activations in e4m3, a scale for each row
// (token). Chips of capability 9.0 alone: sums of wgmma have bits of their own.
//
// Recipe: wgmma's sums of 128 columns, or what a piece of K has of them, are added to the piece's total in float32, and
// pieces in ascending order; the sum is multiplied by the channel's scale, and then by the token's.
#pragma once
#include "cuda/kernels.h"

namespace as {
namespace cuda {

constexpr int kFloat8Blocks = 2;  // of 64 columns, that wgmma sums
constexpr float kLargestFloat8 = 448.0f;

// Any rows; many.
void linear_float8_stream(const Product& p, int rows, const Queue& queue);
void linear_float8_wide(const Product& p, int rows, const Queue& queue);

}  // namespace cuda
}  // namespace as
