// Attention without tensor cores (AttentionAlgo::simt): float32 and quantized caches, and head dimensions that the mma
// kernels do not support. A warp computes one (row, query head) pair; its lanes share the head's features.
#include "cuda/kernels/attention/attention.cuh"
#include "cuda/kernels/attention/attention_mma.h"
#include "cuda/kernels/attention/attention_prefill_wgmma.h"
#include "cuda/kernels/attention/entries.cuh"
#include "cuda/kernels/attention/latent_mma.h"
#include "cuda/kernels/quantize/quantized.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace {

constexpr int kWarps = 4;
// Most features of a lane: of heads of at most 256 features, of larger ones, and of latents.
constexpr int kFeatures = 256 / 32, kManyFeatures = kLargestHead / 32, kLatentFeatures = kLargestRow / 32;

// A key or a value in the cache.
template <CacheType kType>
struct Cached {
  const char* row;
  float scale, minimum;  // of quantized types

  __device__ explicit Cached(const char* row) : row(row), scale(0), minimum(0) {}

  __device__ Cached(const LayerCache& cache, const char* head, bool value, int place)
      : row(head + ((value ? cache.span_size : 0) + place) * cache.row_bytes()), scale(0), minimum(0) {
    if constexpr (kType == CacheType::int8 || kType == CacheType::uint4) {
      const float* scales = reinterpret_cast<const float*>(head + cache.scales_at()) + place;
      scale = scales[value ? 2 * cache.span_size : 0], minimum = scales[value ? 3 * cache.span_size : cache.span_size];
    }
  }
  __device__ float operator[](int feature) const {
    if constexpr (kType == CacheType::f32) return reinterpret_cast<const float*>(row)[feature];
    else if constexpr (kType == CacheType::dtype16)
      return from_dtype16(reinterpret_cast<const uint16_t*>(row)[feature]);
    else if constexpr (kType == CacheType::float8) return from_e4m3((uint8_t)row[feature]);
    else if constexpr (kType == CacheType::int8) return fmaf((uint8_t)row[feature], scale, minimum);
    else return fmaf((uint8_t)row[feature / 2] >> feature % 2 * 4 & 15, scale, minimum);
  }
};

// For each row, the first `rotated` threads each rotate one pair of query features in place. Each other thread stores
// one value in the cache. rotates: keys are rotated before they are stored, as rope() does.
template <CacheType kType>
__global__ void store_kernel(Attention a, const int* where, bool rotates, RotaryTable t, bool interleaved,
                             int rotated) {
  after_previous();
  const int row = blockIdx.x, at = where[row], dim = a.cache.head_dim, padded = a.cache.padded_dim, half = t.dim / 2;
  const int queries = a.width / dim - 2 * a.cache.kv_heads;
  float* in = const_cast<float*>(a.qkv) + (size_t)row * a.width;
  const auto rotate = [&](const float* head, int pair, float& first, float& second) {
    const float x = head[interleaved ? 2 * pair : pair], y = head[interleaved ? 2 * pair + 1 : pair + half];
    const float c = t.cosine[(size_t)row * half + pair], s = t.sine[(size_t)row * half + pair];
    first = __fmul_rn(x, c) - __fmul_rn(y, s), second = __fmul_rn(y, c) + __fmul_rn(x, s);
  };
  const int i = blockIdx.y * blockDim.x + threadIdx.x - rotated;
  if (i < 0) {
    const int pair = (i + rotated) % half;
    float* head = in + (i + rotated) / half * dim;
    float first, second;
    rotate(head, pair, first, second);
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
    rotate(from, interleaved ? feature / 2 : feature % half, first, second);
    x = (interleaved ? feature % 2 : feature >= half) ? second : first;
  }
  char* to =
      const_cast<char*>(head_of(a.cache, span, head)) + (value * a.cache.span_size + place) * a.cache.row_bytes();
  if constexpr (kType == CacheType::f32) reinterpret_cast<float*>(to)[feature] = x;
  else if constexpr (kType == CacheType::dtype16) reinterpret_cast<uint16_t*>(to)[feature] = to_dtype16(x);
  else to[feature] = (char)to_e4m3(x);
}

// The same for 16-bit caches, if RoPE is absent or pairs the two halves of whole heads. A thread has eight features of
// a head and the eight features half a head further. first: first head in `qkv`; count: heads of a row.
__global__ void __launch_bounds__(256) store_chunks_kernel(Attention a, const int* where, bool rotates, RotaryTable t,
                                                           unsigned rows, unsigned first, unsigned count) {
  after_previous();
  const unsigned dim = a.cache.head_dim, half = dim / 2, chunks = half / 8, kv_heads = a.cache.kv_heads;
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x, of_row = i / chunks, column = i % chunks * 8;
  const unsigned row = of_row / count, head = first + of_row % count, queries = a.width / dim - 2 * kv_heads;
  if (row >= rows) return;
  float* in = const_cast<float*>(a.qkv) + (size_t)row * a.width + head * dim;
  float x[8], y[8];
  read_eight(in, column, dim, x), read_eight(in, half + column, dim, y);
  const int at = where[row];
  if (rotates && head < queries + kv_heads) {
    float cosine[8], sine[8];
    read_eight(t.cosine + (size_t)row * half, column, half, cosine);
    read_eight(t.sine + (size_t)row * half, column, half, sine);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const float was = x[j];
      x[j] = __fmul_rn(was, cosine[j]) - __fmul_rn(y[j], sine[j]);
      y[j] = __fmul_rn(y[j], cosine[j]) + __fmul_rn(was, sine[j]);
    }
  }
  const auto put_floats = [&](float* to, const float(&values)[8]) {
    reinterpret_cast<float4*>(to)[0] = make_float4(values[0], values[1], values[2], values[3]);
    reinterpret_cast<float4*>(to)[1] = make_float4(values[4], values[5], values[6], values[7]);
  };
  const auto put_chunk = [](char* to, const float(&values)[8]) {
    *reinterpret_cast<uint4*>(to) = make_uint4(to_dtype16x2(values[0], values[1]), to_dtype16x2(values[2], values[3]),
                                               to_dtype16x2(values[4], values[5]), to_dtype16x2(values[6], values[7]));
  };
  if (head < queries) {
    put_floats(in + column, x), put_floats(in + half + column, y);
  } else if (at >= 0) {
    const bool value = head >= queries + kv_heads;
    const int size = a.cache.span_size, shift = __ffs(size) - 1;
    char* to = const_cast<char*>(head_of(a.cache, at >> shift, head - queries - value * kv_heads)) +
               (value * size + (at & (size - 1))) * a.cache.row_bytes();
    put_chunk(to + column * 2, x), put_chunk(to + (half + column) * 2, y);
  }
}

// A thread for each value of a row of latent attention.
template <CacheType kType>
__global__ void store_latent_kernel(Attention a, const int* where, int rows) {
  after_previous();
  const int i = blockIdx.x * blockDim.x + threadIdx.x, padded = a.cache.padded_dim, row = i / padded, f = i % padded;
  const int width = a.cache.head_dim + a.cache.rope_dim, size = a.cache.span_size;
  const int at = row < rows ? where[row] : -1;
  if (at < 0) return;
  const float x = f < width ? a.kept[(size_t)row * width + f] : 0.0f;
  char* to = const_cast<char*>(head_of(a.cache, at / size, 0)) + at % size * a.cache.row_bytes();
  if constexpr (kType == CacheType::f32) reinterpret_cast<float*>(to)[f] = x;
  else reinterpret_cast<uint16_t*>(to)[f] = to_dtype16(x);
}

// One warp for each key and value. RoPE has already been applied in `qkv`. Quantizes as the CPU backend does
// (cpu/cache.cpp).
template <int kBits>
__global__ void __launch_bounds__(32) store_quantized_kernel(Attention a, const int* where) {
  after_previous();
  constexpr int kPairs = kLargestHead / 64;  // feature pairs of a lane
  const LayerCache& cache = a.cache;
  const int row = blockIdx.x, at = where[row], lane = threadIdx.x, dim = cache.head_dim, size = cache.span_size;
  const int head = blockIdx.y % cache.kv_heads, value = blockIdx.y / cache.kv_heads;
  if (at < 0) return;
  const int queries = a.width / dim - 2 * cache.kv_heads;
  const float* from = a.qkv + (size_t)row * a.width + (size_t)(queries + value * cache.kv_heads + head) * dim;
  float x[kPairs][2] = {}, low = INFINITY, high = -INFINITY;
  bool bad = false;
#pragma unroll
  for (int i = 0; i < kPairs; i++)
#pragma unroll
    for (int j = 0; j < 2; j++)
      if (const int feature = (i * 32 + lane) * 2 + j; feature < dim) {
        x[i][j] = from[feature];
        low = fminf(low, x[i][j]), high = fmaxf(high, x[i][j]), bad |= !isfinite(x[i][j]);
      }
  low = -warp_max(-low), high = warp_max(high), bad = __any_sync(0xffffffffu, bad);
  const Levels<kBits> levels(low, high, bad);
  char* to = const_cast<char*>(head_of(cache, at / size, head));
  uint8_t* quants = reinterpret_cast<uint8_t*>(to + (value * size + at % size) * cache.row_bytes());
#pragma unroll
  for (int i = 0; i < kPairs; i++) {
    const int pair = i * 32 + lane;
    if (2 * pair >= cache.padded_dim) continue;
    int q[2];
#pragma unroll
    for (int j = 0; j < 2; j++) q[j] = 2 * pair + j < dim ? levels.quant(x[i][j]) : 0;
    if (kBits == 4) quants[pair] = (uint8_t)(q[0] | q[1] << 4);
    else quants[2 * pair] = (uint8_t)q[0], quants[2 * pair + 1] = (uint8_t)q[1];
  }
  if (lane) return;
  float* scales = reinterpret_cast<float*>(to + cache.scales_at()) + 2 * value * size + at % size;
  scales[0] = levels.scale(), scales[size] = levels.minimum();
}

// A pair's result over some positions: the greatest score, the sum of weights, and a lane's features of the values.
template <int kEach>
struct Seen {
  float most = -INFINITY, sum = 0, values[kEach] = {};

  __device__ void merge(const Seen& split) {
    const float now = fmaxf(most, split.most), by = shrunk(most, now), split_by = shrunk(split.most, now);
    most = now, sum = merged(sum, by, split.sum, split_by);
#pragma unroll
    for (int i = 0; i < kEach; i++) values[i] = merged(values[i], by, split.values[i], split_by);
  }
};

// Computes one KV split, 32 positions at a time. Each lane keeps the score and weight of one position. table: where the
// tile's begins. selected: null, or the positions in the cache, or entries of the row's list.
template <CacheType kType, bool kLatent, int kEach>
__device__ Seen<kEach> see_split(const Attention& a, int table, const float* selected, int kv_head, int row,
                                 int position, int split, int head, const float (&query)[kEach]) {
  const int lane = threadIdx.x % 32, dim = a.cache.head_dim, size = a.cache.span_size;
  const int key_dim = kLatent ? dim + a.cache.rope_dim : dim, kept = kLatent ? 0 : kv_head;
  const int least = max(0, first_seen(a, row, position)), last = last_seen(a, row, position);
  const float factor = score_factor(a);
  const auto cached_at = [&](int at, bool value) {
    if (kLatent && a.listed) return Cached<kType>(listed_row(a, table, listed(a, a.positions[row], selected, at)));
    const int place = kLatent && selected ? (int)selected[at] : at;
    return Cached<kType>(a.cache, head_of(a.cache, a.tables[table + place / size], kept), value, place % size);
  };
  Seen<kEach> seen;
  const int end = min((split + 1) * kKvSplitTokens, last + 1);
  for (int begin = max(split * kKvSplitTokens, least / 32 * 32); begin < end; begin += 32) {
    float score = -INFINITY;
    for (int j = 0; j < 32 && begin + j < end; j++) {
      const int at = begin + j;
      const Cached<kType> key = cached_at(at, false);
      float product = 0;
#pragma unroll
      for (int i = 0; i < kEach; i++)
        if (i * 32 + lane < key_dim) product = fmaf(query[i], key[i * 32 + lane], product);
      product = warp_sum(product);
      if (j == lane && at >= least) score = capped(a, product);
      if (j == lane && at >= least && a.slopes) score = sloped(a, head, score, at - position);
    }
    const float now = fmaxf(seen.most, warp_max(score) * factor);
    const float by = shrunk(seen.most, now), weight = weight_of(score, factor, now);
    seen.most = now, seen.sum = merged(seen.sum, by, warp_sum(weight), 1.0f);
#pragma unroll
    for (int i = 0; i < kEach; i++) seen.values[i] *= by;
    for (int j = 0; j < 32 && begin + j < end; j++) {
      const Cached<kType> value = cached_at(begin + j, !kLatent);
      const float its = __shfl_sync(0xffffffffu, weight, j);
#pragma unroll
      for (int i = 0; i < kEach; i++)
        if (i * 32 + lane < dim) seen.values[i] = fmaf(its, value[i * 32 + lane], seen.values[i]);
    }
  }
  return seen;
}

// decode: gridDim.z CTAs share the KV splits and write partial results, unless there is only one split.
template <CacheType kType, bool kLatent, int kEach>
__global__ void __launch_bounds__(32 * kWarps) attend_kernel(Attention a, const AttentionTile* tiles, bool decode) {
  after_previous();
  const int kv_head = blockIdx.y, lane = threadIdx.x % 32, dim = a.cache.head_dim, rope_dim = a.cache.rope_dim;
  AttentionTile tile = tiles[blockIdx.x];
  const int before = tile.first;  // of a decode tile
  if (decode) tile.first = 0;
  const TileRows rows(a, tile, decode ? kDecodePairs : kPrefillPairs);
  const int table = rows.tile.table;
  const float* selected = kLatent ? selected_by(a, tile) : nullptr;
  for (int pair = threadIdx.x / 32; pair < rows.count; pair += kWarps) {
    if (!rows.has(pair, kv_head)) continue;
    const int row = rows.row(pair), head = rows.head(pair, kv_head), position = rows.position(pair);
    float query[kEach];
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      const int f = i * 32 + lane;
      query[i] = f < dim ? a.qkv[(size_t)row * a.width + (size_t)head * dim + f] : 0.0f;
      if (kLatent && f >= dim && f < dim + rope_dim)
        query[i] = a.rotated[(size_t)row * a.rotated_width + (size_t)head * rope_dim + f - dim];
    }
    if (decode && rows.first_split < rows.last_split) {
      for (int split = rows.first_split + blockIdx.z; split <= rows.last_split; split += gridDim.z) {
        const auto seen =
            see_split<kType, kLatent, kEach>(a, table, selected, kv_head, row, position, split, head, query);
        float* to = partial_of(a, before, kv_head, split);
        if (lane == 0) to[pair] = seen.most, to[kDecodePairs + pair] = seen.sum;
#pragma unroll
        for (int i = 0; i < kEach; i++)
          if (i * 32 + lane < dim) to[2 * kDecodePairs + pair * dim + i * 32 + lane] = seen.values[i];
      }
      continue;
    }
    if (blockIdx.z) continue;
    Seen<kEach> total;
    for (int split = rows.first_split; split <= rows.last_split; split++)
      total.merge(see_split<kType, kLatent, kEach>(a, table, selected, kv_head, row, position, split, head, query));
    const float sum = with_sink(a, head, total.sum, total.most);
#pragma unroll
    for (int i = 0; i < kEach; i++)
      if (i * 32 + lane < dim) put(a.out, row, head * dim + i * 32 + lane, share(total.values[i], sum));
  }
}

// Merges partial results into rows: one thread for each feature of a pair.
__global__ void merge_kernel(Attention a, const AttentionTile* tiles) {
  after_previous();
  AttentionTile tile = tiles[blockIdx.x];
  const int before = tile.first;
  tile.first = 0;
  const TileRows rows(a, tile, kDecodePairs);
  if (rows.first_split == rows.last_split) return;  // attend_kernel() wrote the result
  const int kv_head = blockIdx.y, dim = a.cache.head_dim, i = blockIdx.z * blockDim.x + threadIdx.x, pair = i / dim;
  if (pair >= rows.count || !rows.has(pair, kv_head)) return;
  float most = -INFINITY, sum = 0, value = 0;
  constexpr int kAtOnce = 8;
  for (int first = rows.first_split; first <= rows.last_split; first += kAtOnce) {
    float its_most[kAtOnce], its_sum[kAtOnce], its_value[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; j++) {
      const float* from = partial_of(a, before, kv_head, min(first + j, rows.last_split));
      its_most[j] = from[pair], its_sum[j] = from[kDecodePairs + pair], its_value[j] = from[2 * kDecodePairs + i];
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; j++) {
      if (first + j > rows.last_split) break;
      const float now = fmaxf(most, its_most[j]), by = shrunk(most, now), split_by = shrunk(its_most[j], now);
      most = now, sum = merged(sum, by, its_sum[j], split_by), value = merged(value, by, its_value[j], split_by);
    }
  }
  const int head = rows.head(pair, kv_head);
  put(a.out, rows.row(pair), head * dim + i % dim, share(value, with_sink(a, head, sum, most)));
}

}  // namespace

// Whether RoPE pairs the two halves of whole heads, and its tables can be read eight values at a time.
static bool ropes_chunks(const Attention& a, const Rope& rope) {
  const auto aligned = [](const float* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  const RotaryTable& t = rope.table;
  return !rope.interleaved && t.dim == a.cache.head_dim && aligned(t.cosine) && aligned(t.sine);
}

template <bool kAll = kAllFormats>
static auto store_kernel_of(CacheType type) {
  if constexpr (kAll) {
    if (type == CacheType::f32) return store_kernel<CacheType::f32>;
    if (type == CacheType::float8) return store_kernel<CacheType::float8>;
  }
  return store_kernel<CacheType::dtype16>;
}

void store_cache(const Attention& a, const int* where, const Rope* rope, bool queries, int rows, const Queue& queue) {
  const RotaryTable table = rope ? rope->table : RotaryTable();
  const bool interleaved = rope && rope->interleaved;
  const int heads = a.width / a.cache.head_dim - 2 * a.cache.kv_heads;
  if (a.cache.quantized()) {
    if (rope)
      cuda::rope(const_cast<float*>(a.qkv), a.width, {0, heads + a.cache.kv_heads, a.cache.head_dim}, table,
                 interleaved, false, rows, queue);
    const auto kernel = a.cache.type == CacheType::int8 ? store_quantized_kernel<8> : store_quantized_kernel<4>;
    start(queue, kernel, dim3(rows, 2 * a.cache.kv_heads), 32, 0, a, where);
    return;
  }
  if (a.cache.type == CacheType::dtype16 && a.cache.head_dim % 16 == 0 && a.cache.padded_dim == a.cache.head_dim &&
      (!rope || ropes_chunks(a, *rope))) {
    const int first = rope && queries ? 0 : heads, count = heads + 2 * a.cache.kv_heads - first;
    const size_t chunks = (size_t)rows * count * (a.cache.head_dim / 16);
    start(queue, store_chunks_kernel, ceil_div(chunks, 256), 256, 0, a, where, rope != nullptr, table, rows, first,
          count);
    return;
  }
  const auto kernel = store_kernel_of(a.cache.type);
  const int rotated = rope && queries ? heads * (table.dim / 2) : 0;
  const int items = rotated + 2 * a.cache.kv_heads * a.cache.padded_dim;
  start(queue, kernel, dim3(rows, ceil_div(items, 256)), 256, 0, a, where, rope != nullptr, table, interleaved,
        rotated);
}

template <bool kAll = kAllFormats>
static auto store_latent_kernel_of(CacheType type) {
  if constexpr (kAll)
    if (type == CacheType::f32) return store_latent_kernel<CacheType::f32>;
  return store_latent_kernel<CacheType::dtype16>;
}

void store_latent(const Attention& a, const int* where, int rows, const Queue& queue) {
  start(queue, store_latent_kernel_of(a.cache.type), ceil_div((size_t)rows * a.cache.padded_dim, 256), 256, 0, a, where,
        rows);
}

namespace {

void merge(const Attention& a, const AttentionTile* tiles, int count, const Queue& queue) {
  start(queue, merge_kernel, dim3(count, a.cache.kv_heads, ceil_div(kDecodePairs * a.cache.head_dim, 256)), 256, 0, a,
        tiles);
}

template <int kEach, bool kAll = kAllFormats>
auto attend_kernel_of_type(CacheType type) {
  if constexpr (kAll) {
    if (type == CacheType::f32) return attend_kernel<CacheType::f32, false, kEach>;
    if (type == CacheType::float8) return attend_kernel<CacheType::float8, false, kEach>;
    if (type == CacheType::int8) return attend_kernel<CacheType::int8, false, kEach>;
    if (type == CacheType::uint4) return attend_kernel<CacheType::uint4, false, kEach>;
  }
  return attend_kernel<CacheType::dtype16, false, kEach>;
}
auto attend_kernel_of(const LayerCache& cache) {
  return cache.head_dim <= 32 * kFeatures ? attend_kernel_of_type<kFeatures>(cache.type)
                                          : attend_kernel_of_type<kManyFeatures>(cache.type);
}

template <bool kAll = kAllFormats>
auto attend_latent_kernel_of(CacheType type) {
  if constexpr (kAll)
    if (type == CacheType::f32) return attend_kernel<CacheType::f32, true, kLatentFeatures>;
  return attend_kernel<CacheType::dtype16, true, kLatentFeatures>;
}

// Prefill tiles, and those of selected positions.
void attend_latent_tiles(const Attention& a, const AttentionTile* tiles, int count, const Queue& queue) {
  start(queue, attend_latent_kernel_of(a.cache.type), dim3(count, a.cache.kv_heads), 32 * kWarps, 0, a, tiles, false);
}

void attend_decode_mma(const Attention& a, const AttentionTile* tiles, int count, int sharers, bool own,
                       const Rope* rope, const Queue& queue) {
  (a.cache.bits() <= 8 ? attend_decode_quantized : attend_decode_dtype16)(a, tiles, count, sharers > 1, own, rope,
                                                                          queue);
}

}  // namespace

void attend_decode(const Attention& a, AttentionAlgo algo, const AttentionTile* tiles, int count, int sharers,
                   const Queue& queue) {
  if (count == 0) return;
  const bool large = algo == AttentionAlgo::mma && a.cache.head_dim == kLargestHead;
  if (algo == AttentionAlgo::mma && !large) return attend_decode_mma(a, tiles, count, sharers, false, nullptr, queue);
  if (large) attend_large(a, tiles, count, sharers, true, queue);
  else start(queue, attend_kernel_of(a.cache), dim3(count, a.cache.kv_heads, sharers), 32 * kWarps, 0, a, tiles, true);
  if (sharers > 1) merge(a, tiles, count, queue);  // a single KV split needs no merge
}

void attend_latent_decode(const Attention& a, AttentionAlgo algo, const AttentionTile* tiles, int count, int sharers,
                          const Queue& queue) {
  if (count == 0) return;
  if (algo == AttentionAlgo::mma) return attend_latent_decode_mma(a, tiles, count, sharers > 1, queue);
  start(queue, attend_latent_kernel_of(a.cache.type), dim3(count, a.cache.kv_heads, sharers), 32 * kWarps, 0, a, tiles,
        true);
  if (sharers > 1) merge(a, tiles, count, queue);
}

void attend_latent_prefill(const Attention& a, AttentionAlgo algo, const AttentionTile* tiles, int count,
                           const Queue& queue) {
  if (count == 0) return;
  if (algo == AttentionAlgo::mma) return attend_latent_prefill_mma(a, tiles, count, queue);
  attend_latent_tiles(a, tiles, count, queue);
}

void attend_latent_selected(const Attention& a, AttentionAlgo algo, const AttentionTile* tiles, int count,
                            const Queue& queue) {
  if (count == 0) return;
  if (algo == AttentionAlgo::mma) return attend_latent_selected_mma(a, tiles, count, queue);
  attend_latent_tiles(a, tiles, count, queue);
}

void attend_prefill(const Attention& a, AttentionAlgo algo, const AttentionTile* tiles, int count, const Rope* rope,
                    const Queue& queue) {
  if (count == 0) return;
  const dim3 grid(count, a.cache.kv_heads);
  if (algo == AttentionAlgo::wgmma) attend_prefill_wgmma(a, tiles, count, rope, queue);
  else if (algo == AttentionAlgo::simt) start(queue, attend_kernel_of(a.cache), grid, 32 * kWarps, 0, a, tiles, false);
  else if (a.cache.head_dim == kLargestHead) attend_large(a, tiles, count, 1, false, queue);
  else attend_prefill_mma(a, tiles, count, queue);
}

bool attend_prefill_ropes(const Attention& a, AttentionAlgo algo, const Rope& rope) {
  return algo == AttentionAlgo::wgmma && a.cache.head_dim <= 128 && ropes_chunks(a, rope);
}

void store_and_attend(const Attention& a, const Rope* rope, const AttentionTile* tiles, int count, int sharers,
                      const Queue& queue) {
  attend_decode_mma(a, tiles, count, sharers, true, rope, queue);
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
