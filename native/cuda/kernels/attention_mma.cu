// Attention over bfloat16 caches by mma.sync (after Dao, "FlashAttention-2", 2023): a warp has 16 pairs of a row and a
// query head, four of them the same keys and values in shared memory. 64 positions at a time are copied ahead while the
// ones before are computed with. Few pairs: attention_few.cu.
#include "cuda/kernels/attention.cuh"
#include "cuda/kernels/attention_mma.h"

namespace as {
namespace cuda {
namespace {

constexpr int kTokens = 64, kPairs = 16, kWarps = 4;    // positions at a time; pairs of a warp
constexpr int kParts = kManyPairs / (kWarps * kPairs);  // blocks of threads of a tile
constexpr int kPad = 8;  // values behind each row in shared memory: rows lie in different banks

template <int kDim>
constexpr int kShared = 2 * 2 * kTokens * (kDim + kPad) * 2;  // bytes: two stages of keys and values

// A pair's features that a thread has: values[v][2 h] and the next, of features 8 v + 2 (lane % 4) and the next.
template <int kDim>
__device__ void write_row(const Attention& a, const TileRows& rows, int pair, int kv_head,
                          const float (&values)[kDim / 8][4], int h, float sum) {
  if (!rows.has(pair, kv_head)) return;
  const int row = rows.row(pair), column = rows.head(pair, kv_head) * kDim + threadIdx.x % 4 * 2;
#pragma unroll
  for (int v = 0; v < kDim / 8; v++)
#pragma unroll
    for (int i = 0; i < 2; i++) put(a.out, row, column + v * 8 + i, share(values[v][2 * h + i], sum));
}

template <int kDim>
__global__ void __launch_bounds__(32 * kWarps) attend_mma_kernel(Attention a, const AttentionTile* tiles) {
  after_previous();
  constexpr int kStride = kDim + kPad, kTensor = kTokens * kStride * 2;  // bytes of keys, or of values
  constexpr int kSteps = kDim / 16, kValues = kDim / 8;
  extern __shared__ __align__(128) char shared[];
  const int kv_head = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  AttentionTile tile = tiles[blockIdx.x];
  tile.first += blockIdx.z * kWarps * kPairs;
  const TileRows rows(a, tile, kWarps * kPairs);
  if (rows.count == 0) return;
  const int* table = a.tables + rows.tile.table;
  const int last = rows.position(rows.count - 1);
  const float factor = score_factor(a);

  // This thread's two pairs: lane / 4 of the warp's, and 8 further.
  int positions[2], least[2];
  uint32_t query[kSteps][4];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int pair = warp * kPairs + lane / 4 + 8 * h;
    const bool there = pair < rows.count && rows.has(pair, kv_head);
    positions[h] = there ? rows.position(pair) : -1;
    least[h] = a.window ? positions[h] - a.window + 1 : 0;
    const float* from =
        a.qkv + (there ? (size_t)rows.row(pair) * a.width + (size_t)rows.head(pair, kv_head) * kDim : 0);
#pragma unroll
    for (int s = 0; s < kSteps; s++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int at = s * 16 + half * 8 + lane % 4 * 2;
        query[s][h + 2 * half] = there ? two_bf16(from[at], from[at + 1]) : 0;
      }
  }

  const uint32_t base = shared_address(shared);
  const int size = a.cache.span_size;
  const auto fetch = [&](int begin, int stage) {
    // Which spans the block has, at most four: one read by as many lanes, not one for each token.
    constexpr int kSpans = kTokens / 16, kPieces = kDim / 8;
    const int first = begin / size, own = first + min(lane, kSpans - 1);
    const int spans = own * size <= last ? table[own] : 0;
#pragma unroll 8
    for (int i = threadIdx.x; i < kTokens * kPieces; i += 32 * kWarps) {
      const int token = i / kPieces, at = begin + token, piece = i % kPieces;
      const bool there = at <= last;
      const int span = __shfl_sync(0xffffffffu, spans, at / size - first);
      const char* from = a.cache.data;
      if (there) from = head_of(a.cache, span, kv_head) + ((size_t)(at % size) * kDim + piece * 8) * 2;
      const uint32_t to = base + stage * 2 * kTensor + (token * kStride + piece * 8) * 2;
      copy_16(to, from, there);
      copy_16(to + kTensor, there ? from + (size_t)size * kDim * 2 : from, there);
    }
    commit_copies();
  };

  float total[kValues][4], total_most[2] = {-INFINITY, -INFINITY}, total_sum[2] = {};
#pragma unroll
  for (int v = 0; v < kValues; v++)
#pragma unroll
    for (int i = 0; i < 4; i++) total[v][i] = 0;

  int begin = rows.first_run * kRunTokens, stage = 0;
  fetch(begin, 0);
  for (int run = rows.first_run; run <= rows.last_run; run++) {
    float out[kValues][4], most[2] = {-INFINITY, -INFINITY}, sum[2] = {};
#pragma unroll
    for (int v = 0; v < kValues; v++)
#pragma unroll
      for (int i = 0; i < 4; i++) out[v][i] = 0;
    for (const int end = min((run + 1) * kRunTokens, last + 1); begin < end; begin += kTokens, stage ^= 1) {
      wait_copies<0>();
      __syncthreads();
      if (begin + kTokens <= last) fetch(begin + kTokens, stage ^ 1);
      const uint32_t keys = base + stage * 2 * kTensor, values = keys + kTensor;
      float scores[kTokens / 8][4];
#pragma unroll
      for (int t = 0; t < kTokens / 8; t += 2) {
#pragma unroll
        for (int i = 0; i < 4; i++) scores[t][i] = scores[t + 1][i] = 0;
#pragma unroll
        for (int s = 0; s < kSteps; s++) {
          uint32_t k[4];
          load_cores(k, keys + (((t + lane / 16) * 8 + lane % 8) * kStride + s * 16 + lane / 8 % 2 * 8) * 2);
          multiply_add(scores[t], query[s], k[0], k[1]);
          multiply_add(scores[t + 1], query[s], k[2], k[3]);
        }
      }
      if (a.soft_cap > 0) {
#pragma unroll
        for (int t = 0; t < kTokens / 8; t++)
#pragma unroll
          for (int i = 0; i < 4; i++) scores[t][i] = capped(a, scores[t][i]);
      }
      float now[2] = {-INFINITY, -INFINITY};
#pragma unroll
      for (int t = 0; t < kTokens / 8; t++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int at = begin + t * 8 + lane % 4 * 2 + i % 2, h = i / 2;
          scores[t][i] = at <= positions[h] && at >= least[h] ? scores[t][i] : -INFINITY;
          now[h] = fmaxf(now[h], scores[t][i]);
        }
#pragma unroll
      for (int h = 0; h < 2; h++) {
        now[h] = fmaxf(now[h], __shfl_xor_sync(0xffffffffu, now[h], 1));
        now[h] = fmaxf(now[h], __shfl_xor_sync(0xffffffffu, now[h], 2));
        now[h] = fmaxf(most[h], now[h] * factor);
        const float by = shrunk(most[h], now[h]);
        most[h] = now[h], sum[h] = __fmul_rn(sum[h], by);
#pragma unroll
        for (int v = 0; v < kValues; v++) out[v][2 * h] *= by, out[v][2 * h + 1] *= by;
      }
#pragma unroll
      for (int t = 0; t < kTokens / 8; t++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int h = i / 2;
          scores[t][i] = weight_of(scores[t][i], factor, most[h]);
          sum[h] += scores[t][i];
        }
#pragma unroll
      for (int s = 0; s < kTokens / 16; s++) {
        const uint32_t weights[4] = {
            two_bf16(scores[2 * s][0], scores[2 * s][1]), two_bf16(scores[2 * s][2], scores[2 * s][3]),
            two_bf16(scores[2 * s + 1][0], scores[2 * s + 1][1]), two_bf16(scores[2 * s + 1][2], scores[2 * s + 1][3])};
#pragma unroll
        for (int v = 0; v < kValues; v += 2) {
          uint32_t x[4];
          load_cores_transposed(x,
                                values + ((s * 16 + lane / 8 % 2 * 8 + lane % 8) * kStride + (v + lane / 16) * 8) * 2);
          multiply_add(out[v], weights, x[0], x[1]);
          multiply_add(out[v + 1], weights, x[2], x[3]);
        }
      }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 1);
      sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 2);
    }
    // Of a row's run: a part of the total.
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float now = fmaxf(total_most[h], most[h]), by = shrunk(total_most[h], now), run_by = shrunk(most[h], now);
      total_most[h] = now, total_sum[h] = merged(total_sum[h], by, sum[h], run_by);
#pragma unroll
      for (int v = 0; v < kValues; v++)
#pragma unroll
        for (int i = 2 * h; i < 2 * h + 2; i++) total[v][i] = merged(total[v][i], by, out[v][i], run_by);
    }
  }
#pragma unroll
  for (int h = 0; h < 2; h++)
    if (const int pair = warp * kPairs + lane / 4 + 8 * h; pair < rows.count)
      write_row<kDim>(a, rows, pair, kv_head, total, h, total_sum[h]);
}

template <int kDim>
void start_dim(const Attention& a, const AttentionTile* tiles, int count, const Queue& queue) {
  allow_shared(attend_mma_kernel<kDim>, kShared<kDim>);
  start(queue, attend_mma_kernel<kDim>, dim3(count, a.cache.kv_heads, kParts), 32 * kWarps, kShared<kDim>, a, tiles);
}

}  // namespace

bool has_attend_mma(const Attention& a) {
  const int dim = a.cache.head_dim;
  return a.cache.type == CacheType::bf16 && (dim == 64 || dim == 96 || dim == 128);
}

void attend_many_mma(const Attention& a, const AttentionTile* tiles, int count, const Queue& queue) {
  if (a.cache.head_dim == 64) start_dim<64>(a, tiles, count, queue);
  else if (a.cache.head_dim == 96) start_dim<96>(a, tiles, count, queue);
  else start_dim<128>(a, tiles, count, queue);
}

}  // namespace cuda
}  // namespace as
