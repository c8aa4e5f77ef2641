// Products in bfloat16 by wgmma.
#pragma once
#include "cuda/kernels.h"

namespace as {
namespace cuda {

void linear_stream(const Product& p, int rows, const Queue& queue);
void linear_split(const Product& p, int rows, const Queue& queue);
void linear_wide(const Product& p, int rows, const Queue& queue);
// Whether linear_wide() is the fastest for a number of rows that the others are for.
bool wide_is_best(const Product& p, int rows);

}  // namespace cuda
}  // namespace as
