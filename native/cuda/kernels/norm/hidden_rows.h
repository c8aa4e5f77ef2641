// What draft heads need of rows: hidden states are kept by place, and joined with embeddings; logits of a smaller
// vocabulary become those of the whole one.
#pragma once
#include "cuda/kernels/common/types.h"

namespace as::cuda {

// Copies each row to a row of `to` [.., width]; places: its number there, -1: it is not copied.
void keep_rows(const float* in, const int* places, int rows, int width, float* to, const Queue& queue);
// out [rows, first width + second width]: the columns of both, one after the other.
void concat(const float* first, int first_width, const float* second, int second_width, int rows, float* out,
            const Queue& queue);

// out [rows, width]: column i is column columns[i] of the input [rows, in_width], -infinity if that is not one of it.
void spread_columns(const float* in, int in_width, const float* columns, int width, int rows, float* out,
                    const Queue& queue);

}  // namespace as::cuda
