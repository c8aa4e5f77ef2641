// What draft heads need of rows: hidden states are kept by place, and joined with embeddings; logits of a smaller
// vocabulary become those of the whole one.
#pragma once
#include "cuda/kernels/common/types.h"

namespace as::cuda {

// Copies each row to a row of `to` [.., width]; places: its number there, -1: it is not copied.
void keep_rows(const float* in, const int* places, int rows, int width, float* to, const Queue& queue);
// Rows of `width` columns, or none (0).
struct Columns {
  const float* values = nullptr;
  int width = 0;
};
// Each row of `out`: the columns of all, one after the other.
void concat(const Columns& first, const Columns& second, const Columns& third, int rows, float* out,
            const Queue& queue);

// out [rows, width]: column i is column columns[i] of the input [rows, in_width], -infinity if that is not one of it.
void spread_columns(const float* in, int in_width, const float* columns, int width, int rows, float* out,
                    const Queue& queue);

}  // namespace as::cuda
