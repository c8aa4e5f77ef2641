// Attention by ordinary arithmetic: over float32 caches, and for heads that attention_mma.cu does not have. A warp has
// a pair of a row and a query head; its lanes share the head's features.
#include "cuda/kernels/attention.cuh"
#include "cuda/kernels/attention_mma.h"

namespace as {
namespace cuda {
namespace {

constexpr int kWarps = 4, kFeatures = kLargestHead / 32;  // of a lane, at most

template <typename T>
__device__ float read(const T* p) {
  if constexpr (sizeof(T) == 4) return *p;
  else return from_bf16(*p);
}

// A thread for each pair of features of the queries, and each value of the cache. rotates: queries, in place, and keys
// as they enter the cache, as rope() does.
template <typename T>
__global__ void store_kernel(Attention a, const int* where, bool rotates, RotaryTable t, bool interleaved) {
  after_previous();
  const int row = blockIdx.x, at = where[row], dim = a.cache.head_dim, padded = a.cache.padded_dim, half = t.dim / 2;
  const int queries = a.width / dim - 2 * a.cache.kv_heads;
  float* in = const_cast<float*>(a.qkv) + (size_t)row * a.width;
  const auto turn = [&](const float* head, int pair, float& first, float& second) {
    const float x = head[interleaved ? 2 * pair : pair], y = head[interleaved ? 2 * pair + 1 : pair + half];
    const float c = t.cosine[(size_t)row * half + pair], s = t.sine[(size_t)row * half + pair];
    first = __fmul_rn(x, c) - __fmul_rn(y, s), second = __fmul_rn(y, c) + __fmul_rn(x, s);
  };
  const int turned = rotates ? queries * half : 0, i = blockIdx.y * blockDim.x + threadIdx.x - turned;
  if (i < 0) {
    const int pair = (i + turned) % half;
    float* head = in + (i + turned) / half * dim;
    float first, second;
    turn(head, pair, first, second);
    head[interleaved ? 2 * pair : pair] = first, head[interleaved ? 2 * pair + 1 : pair + half] = second;
    return;
  }
  if (at < 0 || i >= 2 * a.cache.kv_heads * padded) return;
  const int span = at / a.cache.span_size, place = at % a.cache.span_size;
  const int feature = i % padded, head = i / padded % a.cache.kv_heads, value = i / padded / a.cache.kv_heads;
  const float* from = in + (queries + value * a.cache.kv_heads + head) * dim;
  float x = feature < dim ? from[feature] : 0.0f;
  if (rotates && !value && feature < t.dim) {
    float first, second;
    turn(from, interleaved ? feature / 2 : feature % half, first, second);
    x = (interleaved ? feature % 2 : feature >= half) ? second : first;
  }
  T* to = reinterpret_cast<T*>(const_cast<char*>(head_of(a.cache, span, head))) +
          ((size_t)value * a.cache.span_size + place) * padded + feature;
  if constexpr (sizeof(T) == 4) *to = x;
  else *to = to_bf16(x);
}

// What a pair has of some positions: the greatest score, the sum of weights, and a lane's features of the values.
struct Seen {
  float most = -INFINITY, sum = 0, values[kFeatures] = {};

  __device__ void merge(const Seen& run) {
    const float now = fmaxf(most, run.most), by = shrunk(most, now), run_by = shrunk(run.most, now);
    most = now, sum = merged(sum, by, run.sum, run_by);
#pragma unroll
    for (int i = 0; i < kFeatures; i++) values[i] = merged(values[i], by, run.values[i], run_by);
  }
};

// One run: 32 positions at a time, one a lane as far as scores and weights go.
template <typename T>
__device__ Seen see_run(const Attention& a, const int* table, int kv_head, int position, int run,
                        const float (&query)[kFeatures]) {
  const int lane = threadIdx.x % 32, dim = a.cache.head_dim, padded = a.cache.padded_dim, size = a.cache.span_size;
  const int least = a.window ? max(0, position - a.window + 1) : 0;
  Seen seen;
  for (int begin = run * kRunTokens; begin < (run + 1) * kRunTokens && begin <= position; begin += 32) {
    float score = -INFINITY;
    for (int j = 0; j < 32 && begin + j <= position; j++) {
      const int at = begin + j;
      const T* key = reinterpret_cast<const T*>(head_of(a.cache, table[at / size], kv_head)) + (at % size) * padded;
      float product = 0;
#pragma unroll
      for (int i = 0; i < kFeatures; i++)
        if (i * 32 + lane < dim) product = fmaf(query[i], read(key + i * 32 + lane), product);
      product = warp_sum(product);
      if (j == lane && at >= least) score = finished_score(a, product);
    }
    const float now = fmaxf(seen.most, warp_max(score));
    const float by = shrunk(seen.most, now), weight = now == -INFINITY ? 0.0f : exp2f(score - now);
    seen.most = now, seen.sum = merged(seen.sum, by, warp_sum(weight), 1.0f);
#pragma unroll
    for (int i = 0; i < kFeatures; i++) seen.values[i] *= by;
    for (int j = 0; j < 32 && begin + j <= position; j++) {
      const int at = begin + j;
      const T* value =
          reinterpret_cast<const T*>(head_of(a.cache, table[at / size], kv_head)) + (size + at % size) * padded;
      const float its = __shfl_sync(0xffffffffu, weight, j);
#pragma unroll
      for (int i = 0; i < kFeatures; i++)
        if (i * 32 + lane < dim) seen.values[i] = fmaf(its, read(value + i * 32 + lane), seen.values[i]);
    }
  }
  return seen;
}

// few: runs are shared by gridDim.z blocks, and left as partial results, unless there is but one.
template <typename T>
__global__ void __launch_bounds__(32 * kWarps) attend_kernel(Attention a, const AttentionTile* tiles, bool few) {
  after_previous();
  const int kv_head = blockIdx.y, lane = threadIdx.x % 32, dim = a.cache.head_dim;
  const TileRows rows(a, tiles[blockIdx.x], few ? kFewPairs : kManyPairs);
  const int* table = a.tables + rows.tile.table;
  for (int pair = threadIdx.x / 32; pair < rows.count; pair += kWarps) {
    const int row = rows.row(pair), head = rows.head(pair, kv_head), position = rows.position(pair);
    float query[kFeatures];
#pragma unroll
    for (int i = 0; i < kFeatures; i++)
      query[i] = i * 32 + lane < dim ? a.qkv[(size_t)row * a.width + (size_t)head * dim + i * 32 + lane] : 0.0f;
    if (few && rows.first_run < rows.last_run) {
      for (int run = rows.first_run + blockIdx.z; run <= rows.last_run; run += gridDim.z) {
        const Seen seen = see_run<T>(a, table, kv_head, position, run, query);
        float* to = partial_of(a, blockIdx.x, kv_head, run);
        if (lane == 0) to[pair] = seen.most, to[kFewPairs + pair] = seen.sum;
#pragma unroll
        for (int i = 0; i < kFeatures; i++)
          if (i * 32 + lane < dim) to[2 * kFewPairs + pair * dim + i * 32 + lane] = seen.values[i];
      }
      continue;
    }
    if (blockIdx.z) continue;
    Seen total;
    for (int run = rows.first_run; run <= rows.last_run; run++)
      total.merge(see_run<T>(a, table, kv_head, position, run, query));
#pragma unroll
    for (int i = 0; i < kFeatures; i++)
      if (i * 32 + lane < dim) put(a.out, row, head * dim + i * 32 + lane, share(total.values[i], total.sum));
  }
}

// Of partial results the rows: a thread for each feature of a pair.
__global__ void merge_kernel(Attention a, const AttentionTile* tiles) {
  after_previous();
  const TileRows rows(a, tiles[blockIdx.x], kFewPairs);
  if (rows.first_run == rows.last_run) return;  // it is there already
  const int kv_head = blockIdx.y, dim = a.cache.head_dim, i = blockIdx.z * blockDim.x + threadIdx.x, pair = i / dim;
  if (pair >= rows.count) return;
  float most = -INFINITY, sum = 0, value = 0;
  constexpr int kAtOnce = 8;
  for (int first = rows.first_run; first <= rows.last_run; first += kAtOnce) {
    float its_most[kAtOnce], its_sum[kAtOnce], its_value[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; j++) {
      const float* from = partial_of(a, blockIdx.x, kv_head, min(first + j, rows.last_run));
      its_most[j] = from[pair], its_sum[j] = from[kFewPairs + pair], its_value[j] = from[2 * kFewPairs + i];
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; j++) {
      if (first + j > rows.last_run) break;
      const float now = fmaxf(most, its_most[j]), by = shrunk(most, now), run_by = shrunk(its_most[j], now);
      most = now, sum = merged(sum, by, its_sum[j], run_by), value = merged(value, by, its_value[j], run_by);
    }
  }
  put(a.out, rows.row(pair), rows.head(pair, kv_head) * dim + i % dim, share(value, sum));
}

}  // namespace

size_t partial_floats(int head_dim) { return kFewPairs * (2 + (size_t)head_dim); }

void store_cache(const Attention& a, const int* where, const Turn* turn, int rows, const Queue& queue) {
  const RotaryTable table = turn ? turn->table : RotaryTable();
  const bool interleaved = turn && turn->interleaved;
  const auto kernel = a.cache.bf16 ? store_kernel<uint16_t> : store_kernel<float>;
  const int queries = a.width / a.cache.head_dim - 2 * a.cache.kv_heads;
  const int items = (turn ? queries * (table.dim / 2) : 0) + 2 * a.cache.kv_heads * a.cache.padded_dim;
  start(queue, kernel, dim3(rows, ceil_div(items, 256)), 256, 0, a, where, turn != nullptr, table, interleaved);
  launched("store_cache");
}

namespace {

void merge(const Attention& a, const AttentionTile* tiles, int count, const Queue& queue) {
  start(queue, merge_kernel, dim3(count, a.cache.kv_heads, ceil_div(kFewPairs * a.cache.head_dim, 256)), 256, 0, a,
        tiles);
  launched("attention's merge");
}

}  // namespace

void attend(const Attention& a, const AttentionTile* tiles, int count, bool few, int splits, const Queue& queue) {
  if (count == 0) return;
  const dim3 grid(count, a.cache.kv_heads, few ? splits : 1);
  if (has_attend_mma(a) && few) attend_few_mma(a, tiles, count, splits, false, nullptr, {}, queue);
  else if (has_attend_mma(a)) attend_many_mma(a, tiles, count, queue);
  else if (a.cache.bf16) start(queue, attend_kernel<uint16_t>, grid, 32 * kWarps, 0, a, tiles, few);
  else start(queue, attend_kernel<float>, grid, 32 * kWarps, 0, a, tiles, few);
  launched("attention");
  if (few && splits > 1) merge(a, tiles, count, queue);  // of a single run there is nothing to merge
}

bool store_and_attend(const Attention& a, const Turn* turn, const AttentionTile* tiles, int count, int splits,
                      const Ahead& ahead, const Queue& queue) {
  if (!has_attend_mma(a)) return false;
  attend_few_mma(a, tiles, count, splits, true, turn, ahead, queue);
  launched("attention");
  if (splits > 1) merge(a, tiles, count, queue);
  return true;
}

}  // namespace cuda
}  // namespace as
