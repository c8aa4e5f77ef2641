// The likeliest token of each row.
#pragma once
#include "cuda/kernels/common/types.h"

namespace as::cuda {

// Of each row, of each of kBestParts parts of the vocabulary: the greatest logit, its id (of equal ones the first; -1:
// all are -infinite), and how many logits are NaN or +infinite. A part for each lane of a warp that takes the best.
constexpr int kArgmaxParts = 32;
struct Argmax {
  float logit;
  int token, not_finite;
};
// Of two parts, whose ids are those of the second's or lower.
AS_BOTH inline void add_part(Argmax& best, const Argmax& later) {
  best.not_finite += later.not_finite;
  if (later.token >= 0 && (best.token < 0 || later.logit > best.logit))
    best.logit = later.logit, best.token = later.token;
}
// What a row's parts are together.
AS_BOTH inline Argmax merged(const Argmax* parts) {
  Argmax best = parts[0];
  for (int i = 1; i < kArgmaxParts; i++) add_part(best, parts[i]);
  return best;
}

// Of the model's own logits.
void argmax(const float* logits, int width, int rows, Argmax* best, const Queue& queue);

}  // namespace as::cuda
