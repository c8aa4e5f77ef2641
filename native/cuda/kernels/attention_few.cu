// Attention over bfloat16 caches for few rows of a sequence, as when it decodes: up to 16 pairs of a row and a query
// head, for which a block of four warps reads 64 positions at a time. The warps share out the positions for the scores,
// and the features for the values; each computes all weights by itself. Bits are attend_mma_kernel's: every score and
// every sum is the same chain.
#include "cuda/kernels/attention.cuh"
#include "cuda/kernels/attention_mma.h"

namespace as {
namespace cuda {
namespace {

constexpr int kTokens = 64, kWarps = 4, kThreads = 32 * kWarps;
constexpr int kPad = 8;                    // values behind each row in shared memory: rows lie in different banks
constexpr int kScoreStride = kTokens + 8;  // likewise
constexpr int kScoreBytes = kFewPairs * kScoreStride * 4;

template <int kDim>
constexpr int kTensor = kTokens * (kDim + kPad) * 2;  // bytes of keys, or of values
template <int kDim, int kStages>
constexpr int kShared = kStages * 2 * kTensor<kDim> + kScoreBytes;

// A head of a row, rotated if it is to be; put(feature, value). A warp's lanes share it.
template <int kDim, typename Put>
__device__ void turn_head(const float* head, int row, const Turn& turn, bool rotates, Put put) {
  const RotaryTable& t = turn.table;
  const int lane = threadIdx.x % 32, half = rotates ? t.dim / 2 : 0;
#pragma unroll
  for (int i = lane; i < (kDim + 63) / 64 * 32; i += 32) {
    if (i >= half) continue;
    const int first = turn.interleaved ? 2 * i : i, second = turn.interleaved ? 2 * i + 1 : i + half;
    const float x = head[first], y = head[second];
    const float c = t.cosine[(size_t)row * half + i], s = t.sine[(size_t)row * half + i];
    put(first, __fmul_rn(x, c) - __fmul_rn(y, s)), put(second, __fmul_rn(y, c) + __fmul_rn(x, s));
  }
#pragma unroll
  for (int i = lane; i < kDim; i += 32)
    if (i >= 2 * half) put(i, head[i]);
}

// own: tiles' rows enter the cache here, too (rotated, if rotates), as store_cache() has it. kStages: blocks of 64
// positions that are in shared memory, or on their way there.
template <int kDim, int kStages>
__global__ void __launch_bounds__(kThreads)
    attend_few_kernel(Attention a, const AttentionTile* tiles, bool own, bool rotates, Turn turn) {
  constexpr int kStride = kDim + kPad, kSteps = kDim / 16, kPieces = kDim / 8;
  // Pairs of eight features: each warp has those that are its number and every fourth from there.
  constexpr int kDuos = kDim / 16, kOwn = (kDuos + kWarps - 1) / kWarps;
  extern __shared__ __align__(128) char shared[];
  let_next_begin();
  const int kv_head = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // What a step is has been there since before its first kernel, and so have positions before its rows' in the cache.
  const TileRows rows(a, tiles[blockIdx.x], kFewPairs);
  const int first_run = rows.first_run + blockIdx.z, run_step = gridDim.z;
  if (rows.count == 0 || first_run > rows.last_run) return;
  const int* table = a.tables + rows.tile.table;
  const float factor = score_factor(a);
  const int start = rows.tile.start, last = rows.position(rows.count - 1);

  const uint32_t base = shared_address(shared);
  float* scores = reinterpret_cast<float*>(shared + kStages * 2 * kTensor<kDim>);
  const int shift = 31 - __clz(a.cache.span_size), within = a.cache.span_size - 1;
  char* cache = const_cast<char*>(a.cache.data) + kv_head * a.cache.head_bytes();
  const size_t span_bytes = a.cache.span_bytes();
  const int values_behind = a.cache.span_size * kDim * 2;
  // Spans of a block of positions, at most four, each with a lane of every warp.
  const auto spans_at = [&](int begin) {
    const int at = (begin >> shift) + lane % 4;
    return at << shift <= last ? table[at] : 0;
  };
  const auto fetch = [&](int begin, int spans, int stage) {
#pragma unroll
    for (int j = 0; j < kTokens * kPieces / kThreads; j++) {
      const int i = j * kThreads + threadIdx.x, token = i / kPieces, piece = i % kPieces, at = begin + token;
      const int span = __shfl_sync(0xffffffffu, spans, (at >> shift) - (begin >> shift));
      const bool there = at <= last;
      const char* from = cache;
      if (there) from += span * span_bytes + ((at & within) * kDim + piece * 8) * 2;
      const uint32_t to = base + stage * 2 * kTensor<kDim> + (token * kStride + piece * 8) * 2;
      copy_16(to, from, there);
      copy_16(to + kTensor<kDim>, there ? from + values_behind : from, there);
    }
    commit_copies();
  };
  // Positions of the blocks, run by run.
  const auto after = [&](int begin) {
    const int next = begin + kTokens;
    return next % kRunTokens ? next : next + (run_step - 1) * kRunTokens;
  };
  int begin = first_run * kRunTokens, stage = 0, before = kStages - 1, further = begin;
  // Blocks of positions that were there before are asked for before the kernel before this one has made the rows.
  int first_blocks[kStages], first_spans[kStages], early = 0;
#pragma unroll
  for (int i = 0; i < kStages; i++, further = after(further))
    first_blocks[i] = further, first_spans[i] = spans_at(further);
#pragma unroll
  for (int i = 0; i < kStages; i++)
    if (early == i && first_blocks[i] + kTokens <= start) fetch(first_blocks[i], first_spans[i], i), early++;
  int spans = spans_at(further);
  // Queries, rotated, in shared memory where scores will be: a warp has every fourth pair.
  uint16_t* queries = reinterpret_cast<uint16_t*>(scores);
  constexpr int kEach = kFewPairs / kWarps;
  const float* heads[kEach];
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    const int pair = i * kWarps + warp;
    heads[i] = a.qkv + (size_t)rows.row(pair) * a.width + (size_t)rows.head(pair, kv_head) * kDim;
    if (pair >= rows.count || !rows.has(pair, kv_head))
      for (int j = lane; j < kDim; j += 32) queries[pair * kStride + j] = 0;
  }
  await_previous();
#pragma unroll
  for (int i = 0; i < kEach; i++)
    if (const int pair = i * kWarps + warp; pair < rows.count && rows.has(pair, kv_head))
      turn_head<kDim>(heads[i], rows.row(pair), turn, rotates,
                      [&](int feature, float x) { queries[pair * kStride + feature] = to_bf16(x); });
  if (own) {
    const int key = a.width / kDim - 2 * a.cache.kv_heads + kv_head;
    for (int i = warp; i < rows.tile.count; i += kWarps) {
      const int at = start + i, row = rows.tile.row + i, run = at / kRunTokens;
      if (run < first_run || (run - first_run) % run_step) continue;  // another block's
      const float* from = a.qkv + (size_t)row * a.width + (size_t)key * kDim;
      uint16_t* to = reinterpret_cast<uint16_t*>(cache + table[at >> shift] * span_bytes + (at & within) * kDim * 2);
      turn_head<kDim>(from, row, turn, rotates, [&](int feature, float x) { to[feature] = to_bf16(x); });
#pragma unroll
      for (int j = lane; j < kDim; j += 32) to[values_behind / 2 + j] = to_bf16(from[a.cache.kv_heads * kDim + j]);
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kStages; i++)
    if (i >= early) {
      if (first_blocks[i] <= last) fetch(first_blocks[i], first_spans[i], i);
      else commit_copies();
    }

  // This thread's two pairs: lane / 4, and 8 further.
  int positions[2], least[2];
  uint32_t query[kSteps][4];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int pair = lane / 4 + 8 * h;
    positions[h] = pair < rows.count ? rows.position(pair) : -1;
    least[h] = a.window ? positions[h] - a.window + 1 : 0;
  }
#pragma unroll
  for (int s = 0; s < kSteps; s++)
    load_cores(query[s], shared_address(queries + (lane % 16) * kStride + s * 16 + lane / 16 * 8));

  for (int run = first_run; run <= rows.last_run; run += run_step) {
    float out[kOwn][2][4] = {}, most[2] = {-INFINITY, -INFINITY}, sum[2] = {};
    for (const int end = min((run + 1) * kRunTokens, last + 1); begin < end; begin = after(begin)) {
      const bool first = begin == first_run * kRunTokens;
      if (first) wait_copies<kStages - 1>();
      else wait_copies<kStages - 2>();
      __syncthreads();  // nobody reads the stage before, and the scores, any more
      if (!first) {
        if (further <= last) fetch(further, spans, before);
        else commit_copies();
        further = after(further), spans = spans_at(further);
      }
      const uint32_t keys = base + stage * 2 * kTensor<kDim>, values = keys + kTensor<kDim>;
      float own[2][4] = {};
#pragma unroll
      for (int s = 0; s < kSteps; s++) {
        uint32_t k[4];
        load_cores(k, keys + ((warp * 16 + lane / 16 * 8 + lane % 8) * kStride + s * 16 + lane / 8 % 2 * 8) * 2);
        multiply_add(own[0], query[s], k[0], k[1]);
        multiply_add(own[1], query[s], k[2], k[3]);
      }
#pragma unroll
      for (int t = 0; t < 2; t++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int token = (warp * 2 + t) * 8 + lane % 4 * 2;
          const auto seen = [&](int i) {
            const int at = begin + token + i;
            return at <= positions[h] && at >= least[h] ? capped(a, own[t][2 * h + i]) : -INFINITY;
          };
          *reinterpret_cast<float2*>(scores + (lane / 4 + 8 * h) * kScoreStride + token) =
              make_float2(seen(0), seen(1));
        }
      __syncthreads();
      float s[kTokens / 8][4], now[2] = {-INFINITY, -INFINITY};
#pragma unroll
      for (int t = 0; t < kTokens / 8; t++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const float2 two =
              *reinterpret_cast<const float2*>(scores + (lane / 4 + 8 * h) * kScoreStride + t * 8 + lane % 4 * 2);
          s[t][2 * h] = two.x, s[t][2 * h + 1] = two.y;
          now[h] = fmaxf(now[h], fmaxf(two.x, two.y));
        }
#pragma unroll
      for (int h = 0; h < 2; h++) {
        now[h] = fmaxf(now[h], __shfl_xor_sync(0xffffffffu, now[h], 1));
        now[h] = fmaxf(now[h], __shfl_xor_sync(0xffffffffu, now[h], 2));
        now[h] = fmaxf(most[h], now[h] * factor);
        const float by = shrunk(most[h], now[h]);
        most[h] = now[h], sum[h] = __fmul_rn(sum[h], by);
#pragma unroll
        for (int v = 0; v < kOwn; v++)
#pragma unroll
          for (int i = 0; i < 2; i++) out[v][i][2 * h] *= by, out[v][i][2 * h + 1] *= by;
      }
#pragma unroll
      for (int t = 0; t < kTokens / 8; t++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int h = i / 2;
          s[t][i] = weight_of(s[t][i], factor, most[h]);
          sum[h] += s[t][i];
        }
#pragma unroll
      for (int t = 0; t < kTokens / 16; t++) {
        const uint32_t weights[4] = {two_bf16(s[2 * t][0], s[2 * t][1]), two_bf16(s[2 * t][2], s[2 * t][3]),
                                     two_bf16(s[2 * t + 1][0], s[2 * t + 1][1]),
                                     two_bf16(s[2 * t + 1][2], s[2 * t + 1][3])};
#pragma unroll
        for (int v = 0; v < kOwn; v++) {
          const int duo = v * kWarps + warp;
          if (kDuos % kWarps && duo >= kDuos) continue;
          uint32_t x[4];
          load_cores_transposed(
              x, values + ((t * 16 + lane / 8 % 2 * 8 + lane % 8) * kStride + (duo * 2 + lane / 16) * 8) * 2);
          multiply_add(out[v][0], weights, x[0], x[1]);
          multiply_add(out[v][1], weights, x[2], x[3]);
        }
      }
      before = stage, stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    // Of a run: what it leaves for the merge, or the result if there is no other run.
#pragma unroll
    for (int h = 0; h < 2; h++) {
      sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 1);
      sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 2);
      const int pair = lane / 4 + 8 * h;
      if (pair >= rows.count || !rows.has(pair, kv_head)) continue;
      const bool alone = rows.first_run == rows.last_run;
      float* to = alone ? nullptr : partial_of(a, blockIdx.x, kv_head, run);
      if (!alone && warp == 0 && lane % 4 == 0) to[pair] = most[h], to[kFewPairs + pair] = sum[h];
#pragma unroll
      for (int v = 0; v < kOwn; v++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int duo = v * kWarps + warp, feature = (duo * 2 + i) * 8 + lane % 4 * 2;
          if (kDuos % kWarps && duo >= kDuos) continue;
          const float first = out[v][i][2 * h], second = out[v][i][2 * h + 1];
          if (alone) {
            const int row = rows.row(pair), column = rows.head(pair, kv_head) * kDim + feature;
            put(a.out, row, column, share(first, sum[h])), put(a.out, row, column + 1, share(second, sum[h]));
          } else {
            *reinterpret_cast<float2*>(to + 2 * kFewPairs + pair * kDim + feature) = make_float2(first, second);
          }
        }
    }
  }
}

template <int kDim, int kStages>
void start_stages(const Attention& a, const AttentionTile* tiles, int count, int splits, bool own, const Turn* turn,
                  const Queue& queue) {
  constexpr int kBytes = kShared<kDim, kStages>;
  allow_shared(attend_few_kernel<kDim, kStages>, kBytes);
  start(queue, attend_few_kernel<kDim, kStages>, dim3(count, a.cache.kv_heads, splits), kThreads, kBytes, a, tiles, own,
        turn != nullptr, turn ? *turn : Turn());
}
// Of long contexts more is copied ahead. Of short ones that helps nothing, and a block of threads that takes less
// memory begins beside those of the kernel before it.
template <int kDim, typename... Arguments>
void start_few(const Attention& a, const AttentionTile* tiles, int count, int splits, Arguments... arguments) {
  constexpr int kAtOnce = 2;  // on a processor, with three stages
  if (splits > 1 && count * a.cache.kv_heads * splits <= kAtOnce * processors() && kShared<kDim, 3> <= most_shared())
    start_stages<kDim, 3>(a, tiles, count, splits, arguments...);
  else start_stages<kDim, 2>(a, tiles, count, splits, arguments...);
}

}  // namespace

void attend_few_mma(const Attention& a, const AttentionTile* tiles, int count, int splits, bool own, const Turn* turn,
                    const Queue& queue) {
  if (a.cache.head_dim == 64) start_few<64>(a, tiles, count, splits, own, turn, queue);
  else if (a.cache.head_dim == 96) start_few<96>(a, tiles, count, splits, own, turn, queue);
  else start_few<128>(a, tiles, count, splits, own, turn, queue);
}

}  // namespace cuda
}  // namespace as
