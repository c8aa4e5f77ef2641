// Shared parts of the attention kernels: the visible positions of rows, and the merging of KV splits.
//
// A row (a query head at a position) is computed as follows. The context is divided into splits of kKvSplitTokens
// positions, from the split of the first visible position on. A split yields the greatest score, the sum of weights
// relative to it, and the weighted sum of values. Splits are merged in ascending order, each into the previous result.
// Invisible positions have weight zero and change nothing. The bits of a row therefore do not depend on which rows
// share a tile, and splits may be computed in parallel.
#pragma once
#include "cuda/kernels/attention/attention.h"
#include "cuda/kernels/common/device.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {

constexpr float kLog2E = 1.44269504088896341f;

// The positions that a row of the step sees. The first one may be negative.
__device__ inline int last_seen(const Attention& a, int row, int position) { return a.to ? a.to[row] : position; }
__device__ inline int first_seen(const Attention& a, int row, int position) {
  return a.window ? position - a.window + 1 : a.from ? a.from[row] : 0;
}

// The rows and heads of a tile. kDecode: the tile has few pairs, so a loop finds the row of a pair faster than a
// division. Elsewhere a pair is divided by the group as a product with its inverse.
template <bool kDecode>
struct RowsOfTile {
  AttentionTile tile;
  int group, count;             // query heads per KV head; pairs in the tile
  uint32_t inverse;             // 2^32 / group, rounded up: right for pairs below 2^32 / group; 0 for groups of one
  int least, last;              // positions visible to any pair
  int first_split, last_split;  // KV splits of these
  int first_head, heads;        // first KV head's query heads on earlier ranks; this rank's query heads

  RowsOfTile() = default;
  __device__ RowsOfTile(const Attention& a, const AttentionTile& t, int most)
      : tile(t),
        group(a.group),
        inverse(kDecode ? 0 : 0xffffffffu / a.group + 1),
        first_head(a.first),
        heads(a.queries) {
    count = max(0, min(most, t.count * a.group - first()));
    const int above = rows_before(first()), below = rows_before(first() + max(count, 1) - 1);
    least = a.window ? max(0, t.start + above - a.window + 1) : 0, last = t.start + below;
    if (!kDecode && count > 0) {
      least = max(0, first_seen(a, t.row + above, t.start + above));
      last = last_seen(a, t.row + below, last);
    }
    first_split = least / kKvSplitTokens, last_split = last / kKvSplitTokens;
  }
  __device__ int rows_before(int pair) const {
    if (!kDecode) return inverse ? (int)__umulhi(pair, inverse) : pair;
    int rows = 0;
    for (; pair >= group; pair -= group) rows++;
    return rows;
  }
  // The first position of a KV split's first block that a pair sees. block: positions of a block. Blocks before it
  // would change nothing.
  __device__ int begin_of(int split, int block) const { return max(split * kKvSplitTokens, least / block * block); }
  __device__ int first() const { return kDecode ? 0 : tile.first; }  // pair
  __device__ int row(int pair) const { return tile.row + rows_before(first() + pair); }
  // Number among this rank's query heads; out of range if the pair belongs to another rank.
  __device__ int head(int pair, int kv_head) const {
    pair += first();
    return kv_head * group + pair - rows_before(pair) * group - first_head;
  }
  __device__ bool has(int pair, int kv_head) const { return (unsigned)head(pair, kv_head) < (unsigned)heads; }
  __device__ int position(int pair) const { return tile.start + rows_before(first() + pair); }
};
using TileRows = RowsOfTile<false>;
using DecodeRows = RowsOfTile<true>;

// The positions, or entries, that an indexer selects for the row of a tile; null: it sees all.
__device__ inline const float* selected_by(const Attention& a, const AttentionTile& tile) {
  return tile.before == kSelected && a.selected ? a.selected + (size_t)tile.row * a.selected_width : nullptr;
}

__device__ inline const char* head_of(const LayerCache& cache, int span, int kv_head) {
  return cache.data + span * cache.stride + kv_head * cache.head_bytes();
}

// A score is a product, soft-capped if there is a cap. Times score_factor() it is the exponent of a power of two.
__device__ inline float capped(const Attention& a, float product) {
  return a.soft_cap > 0 ? tanhf(product * a.scale / a.soft_cap) : product;
}
__device__ inline float score_factor(const Attention& a) { return (a.soft_cap > 0 ? a.soft_cap : a.scale) * kLog2E; }
__device__ inline float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Adds the head's ALiBi bias to a score. distance: the key's position minus the query's.
__device__ inline float sloped(const Attention& a, int head, float score, int distance) {
  return __fmaf_rn(a.slopes[head] / (a.soft_cap > 0 ? a.soft_cap : a.scale), (float)distance, score);
}
// The weight of a score (before the factor) relative to the greatest score `most` (after the factor). Invisible
// positions have the score -infinity and the weight zero.
__device__ inline float weight_of(float score, float factor, float most) {
  return power_of_two(__fmaf_rn(score, factor, most == -INFINITY ? 0.0f : -most));
}

// The factor that rescales sums when their maximum changes from `old` to `now`.
__device__ inline float shrunk(float old, float now) { return now == -INFINITY ? 0.0f : power_of_two(old - now); }
// Adds 64 positions to the sum of a KV split's weights: each half is summed separately, then both are added. Each of
// four threads has some of the weights; their sums are added at the end of the KV split.
__device__ inline float summed(float sum, float by, const float (&halves)[2]) {
  return __fmaf_rn(sum, by, __fadd_rn(halves[0], halves[1]));
}
__device__ inline float merged(float total, float by, float split, float split_by) {
  return __fmaf_rn(split, split_by, __fmul_rn(total, by));
}
// The sum of all weights and of the head's sink, which is a score without a value.
__device__ inline float with_sink(const Attention& a, int head, float sum, float most) {
  return a.sinks ? __fadd_rn(sum, power_of_two(__fmaf_rn(a.sinks[head], kLog2E, -most))) : sum;
}
// Values are multiplied by the inverse sum: dividing each would take ten times as long. A NaN sum stays NaN.
__device__ inline float inverse_of(float sum) { return sum == 0 ? 0.0f : __frcp_rn(sum); }
__device__ inline float share(float value, float sum) { return __fmul_rn(value, inverse_of(sum)); }

// A KV split's partial result for a KV head: maxima and sums of its pairs, then values [pair][head_dim]. before: KV
// splits of the tiles before this one.
__device__ inline float* partial_of(const Attention& a, int before, int kv_head, int split) {
  const size_t size = kDecodePairs * (2 + (size_t)a.cache.head_dim);
  return a.partials + ((size_t)(before + split) * a.cache.kv_heads + kv_head) * size;
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
