// The most likely token of each row.
#pragma once
#include "cuda/kernels/common/types.h"

namespace as::cuda {

// For each row and each of kArgmaxParts parts of the vocabulary: the greatest logit, its id (the first of equal ones;
// -1: all are -infinity), and the number of logits that are NaN or +infinity. Each lane of a warp can take one.
constexpr int kArgmaxParts = 32;
struct Argmax {
  float logit;
  int token, not_finite;
};
// Merges a part with one of higher ids.
AS_BOTH inline void add_part(Argmax& best, const Argmax& later) {
  best.not_finite += later.not_finite;
  if (later.token >= 0 && (best.token < 0 || later.logit > best.logit))
    best.logit = later.logit, best.token = later.token;
}
// Merges the parts of a row.
AS_BOTH inline Argmax merged(const Argmax* parts) {
  Argmax best = parts[0];
  for (int i = 1; i < kArgmaxParts; i++) add_part(best, parts[i]);
  return best;
}

// best [rows, kArgmaxParts] of unprocessed logits [rows, width].
void argmax(const float* logits, int width, int rows, Argmax* best, const Queue& queue);

}  // namespace as::cuda
