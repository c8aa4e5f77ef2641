// Residual streams (mHC): rows hold `streams` of them, one after the other. Their weights [pre | post | mix] are
// products of the normed streams. float32 throughout.
#pragma once
#include "cuda/kernels/common/types.h"

namespace as::cuda {

// How products become weights; see the op in program/op_table.h. factors: of pre, post and mix; base: [width].
struct StreamWeights {
  const float *factors = nullptr, *base = nullptr;
  int streams = 0, width = 0, iterations = 1;  // width: `streams` if there is only pre
  float eps = 0;
};

// x [rows, width], in place.
void stream_weights(float* x, const StreamWeights& by, int rows, const Queue& queue);
// y [rows, width]: the sum of the streams of x times the first weights of [rows, weights_width].
void merge_streams(const float* x, int streams, const float* weights, int weights_width, int rows, const Rows& y,
                   const Queue& queue);
// Stream k of x becomes post[k] * y + the sum over j of mix[j][k] * stream j. y [rows, width]
void mix_streams(float* x, int streams, const float* y, int width, const float* weights, int rows, const Queue& queue);

}  // namespace as::cuda
