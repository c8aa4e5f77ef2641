// Attention and its cache.
#pragma once
#include "cuda/kernels/norm/norm.h"

namespace as::cuda {

// The cache of a layer: spans, in each its KV heads, of each keys and then values [span_size, padded_dim]. Quantized as
// the CPU backend does (cpu/kernels/span_layout.h): a value is q * scale + minimum, of uint4 two features in a byte,
// the even one in the lower half; behind keys and values lie, each [span_size] floats, scales and minimums of the keys,
// then of the values. float8: e4m3 as it is, larger values cut to 448.
enum class CacheType { f32, dtype16, int8, uint4, float8 };
struct LayerCache {
  char* data = nullptr;
  CacheType type = CacheType::f32;
  int span_size = 0, kv_heads = 0, head_dim = 0, padded_dim = 0;
  DType16 dtype = DType16::bf16;

  AS_BOTH bool quantized() const { return type == CacheType::int8 || type == CacheType::uint4; }
  AS_BOTH int bits() const {
    return type == CacheType::f32 ? 32 : type == CacheType::dtype16 ? 16 : type == CacheType::uint4 ? 4 : 8;
  }
  AS_BOTH size_t row_bytes() const { return (size_t)padded_dim * bits() / 8; }
  AS_BOTH size_t scales_at() const { return 2 * span_size * row_bytes(); }  // of a head
  AS_BOTH size_t head_bytes() const { return scales_at() + (quantized() ? 4 * sizeof(float) * span_size : 0); }
  AS_BOTH size_t span_bytes() const { return head_bytes() * kv_heads; }
};

// A layer's part of spans: in the cache, and in the host's memory, where all parts of a span are adjacent. Parts are of
// whole 16 bytes.
struct SpanPart {
  char *cache, *host;
  size_t bytes, host_stride;
};
struct SpanPair {
  int span, host;
};
// saves: to the host; else from there. largest: of the parts.
void copy_spans(const SpanPart* parts, int layers, size_t largest, const SpanPair* pairs, int count, bool saves,
                const Queue& queue);

// Rows of one sequence, which attend together: of `count` adjacent rows of the step from `row` on, at positions from
// `start` on, with the spans tables[table...]. Taken as pairs (row, query head of a KV head's group), the ones from
// `first` on.
struct AttentionTile {
  int row, count, start, table, first;
};

// How attention is computed; cuda/kernel_choice.h says by which kernels. mma also serves quantized caches.
enum class AttentionAlgo { simt, mma, wgmma };
struct AttentionChoice {
  AttentionAlgo decode = AttentionAlgo::simt, prefill = AttentionAlgo::simt;
  bool stores = false;  // store_and_attend() serves
};

struct Attention {
  LayerCache cache;
  int group = 1;               // query heads of a KV head
  int first = 0, queries = 0;  // this rank's: so many, from that one of the first KV head's on
  float scale = 1, soft_cap = 0;
  int window = 0;
  const float *slopes = nullptr, *sinks = nullptr;  // of this rank's query heads, or null
  const float* qkv = nullptr;                       // [rows, width]: queries, keys, values
  int width = 0;
  Rows out;
  const int* tables = nullptr;  // of spans
  float* partials = nullptr;    // of runs of tiles that are split
  int most_splits = 0;          // of any sequence
  int* arrivals = nullptr;      // of tiles and KV heads: runs that are done; zero between launches
  Norm query_norm, key_norm;    // of store_and_attend() alone: of each head, before it is rotated; weight null: none
};
constexpr int kKvSplitTokens = 256;  // context is attended to in runs of so many tokens, and these merged in order
constexpr int kDecodePairs = 16;     // pairs of a tile whose runs are shared out
constexpr int kPrefillPairs = 128;   // pairs of other tiles
constexpr int kLargestHead = 256;
// Of one run of one tile and KV head.
inline size_t partial_floats(int head_dim) { return kDecodePairs * (2 + (size_t)head_dim); }

// How queries and keys are rotated: all heads of them.
struct Rope {
  RotaryTable table;
  bool interleaved = false;
};
// Keys and values of rows enter the cache; where: each row's span * span_size + place in it, -1 for none. rope: null,
// or what happens to keys on their way there, and, if `queries`, to queries where they are.
void store_cache(const Attention& a, const int* where, const Rope* rope, bool queries, int rows, const Queue& queue);
// tiles: of at most kDecodePairs. sharers: by how many blocks the runs of one are shared: 1 if no tile has several.
void attend_decode(const Attention& a, AttentionAlgo algo, const AttentionTile* tiles, int count, int sharers,
                   const Queue& queue);
// tiles: of at most kPrefillPairs. rope: null, or what happens to queries first, if attend_prefill_ropes().
void attend_prefill(const Attention& a, AttentionAlgo algo, const AttentionTile* tiles, int count, const Rope* rope,
                    const Queue& queue);
bool attend_prefill_ropes(const Attention& a, AttentionAlgo algo, const Rope& rope);
// Queries at positions from `beyond` on, times log(position + 1) / log(beyond).
void scale_queries(const Attention& a, const int* positions, double beyond, int rows, const Queue& queue);
// store_cache() and attend_decode() at once by mma, of a step whose tiles are all few.
void store_and_attend(const Attention& a, const Rope* rope, const AttentionTile* tiles, int count, int sharers,
                      const Queue& queue);

}  // namespace as::cuda
