// Products of quantized weights with activations in bfloat16.
#pragma once
#include "cuda/kernels.h"

namespace as {
namespace cuda {

// By mma.sync: any chip. By wgmma: chips of capability 9.0.
void linear_quantized_mma(const Product& p, int rows, const Queue& queue);
void linear_quantized_stream(const Product& p, int rows, const Queue& queue);
// Few rows, and a sum in pieces, by mma.sync in clusters of blocks of threads: of chips of capability 9.0, too.
bool can_split_quantized(const Product& p, int rows);
void linear_quantized_split(const Product& p, int rows, const Queue& queue);

}  // namespace cuda
}  // namespace as
