// Residual streams (mHC): rows hold `streams` of them, one after the other. Their weights [pre | post | mix] are
// products of the normed streams. float32 throughout.
#pragma once
#include "cuda/kernels/norm/norm.h"

namespace as::cuda {

// How products become weights; see the op in program/op_table.h. factors: of pre, post and mix; base: [width].
struct StreamWeights {
  const float *factors = nullptr, *base = nullptr;
  int streams = 0, width = 0, iterations = 1;  // width: `streams` if there is only pre
  float eps = 0;
};

// x [rows, width], in place.
void stream_weights(float* x, const StreamWeights& by, int rows, const Queue& queue);
// stream_weights() of `weights`, merge_streams() of x and rms_norm() of the sums. The weights' first part stays as it
// is.
constexpr int kMostMerged = 8192, kMostMergedStreams = 16;  // columns of a stream
void merge_and_norm(const float* x, const StreamWeights& by, float* weights, const Norm& norm, int rows,
                    const Rows& out, const Queue& queue);
// y [rows, width]: the sum of the streams of x times the first weights of [rows, weights_width], or, if these are null,
// their mean.
void merge_streams(const float* x, int streams, const float* weights, int weights_width, int rows, const Rows& y,
                   const Queue& queue);
// Stream k of x becomes post[k] * y + the sum over j of mix[j][k] * stream j. y [rows, width]
void mix_streams(float* x, int streams, const float* y, int width, const float* weights, int rows, const Queue& queue);

}  // namespace as::cuda
