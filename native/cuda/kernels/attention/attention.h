// Attention and the KV cache.
#pragma once
#include <algorithm>

#include "cuda/kernels/norm/norm.h"

namespace as::cuda {

// The KV cache of a layer. For each KV head a span holds the keys, then the values, each [span_size, padded_dim].
// Quantized types are those of the CPU backend (cpu/kernels/span_layout.h): a value is q * scale + minimum; uint4 packs
// two features into a byte, the even one in the low bits. Four float arrays [span_size] follow the keys and values:
// the keys' scales and minimums, then the values'. float8 is e4m3 without a scale; larger values are clipped to 448.
// The cache of latent attention holds rows [span_size, padded_dim] instead: a latent of head_dim features, then a
// rotated key of rope_dim. Its kv_heads are tiles of query heads, which all see these rows. The cache of an indexer
// holds keys alone, in rows [span_size, padded_dim]; so do those of attention over compressed positions.
enum class CacheType { f32, dtype16, int8, uint4, float8 };
struct LayerCache {
  char* data = nullptr;
  CacheType type = CacheType::f32;
  int span_size = 0, kv_heads = 0, head_dim = 0, padded_dim = 0;
  DType16 dtype = DType16::bf16;
  int rope_dim = 0;     // > 0: of latent attention
  bool rows = false;    // of an indexer, or of attention over compressed positions
  bool padded = false;  // to a size that mma kernels have, with zeros (padded_head()): for prefill tiles alone
  size_t stride = 0;    // bytes from a span to the next one; span_bytes() if the layer's spans are adjacent

  // Whether a token has one row, instead of a key and a value of each KV head.
  AS_BOTH bool has_rows() const { return rope_dim > 0 || rows; }
  AS_BOTH bool quantized() const { return type == CacheType::int8 || type == CacheType::uint4; }
  AS_BOTH int bits() const {
    return type == CacheType::f32 ? 32 : type == CacheType::dtype16 ? 16 : type == CacheType::uint4 ? 4 : 8;
  }
  AS_BOTH size_t row_bytes() const { return (size_t)padded_dim * bits() / 8; }
  AS_BOTH size_t scales_at() const { return (has_rows() ? 1 : 2) * span_size * row_bytes(); }  // offset in a head
  AS_BOTH size_t head_bytes() const { return scales_at() + (quantized() ? 4 * sizeof(float) * span_size : 0); }
  AS_BOTH size_t span_bytes() const { return head_bytes() * (has_rows() ? 1 : kv_heads); }
};

// Entries that are made of `rate` positions each (program/op_table.h, compress). A span of span_size positions has
// those whose last position it holds; the cache's own span_size is the most of them.
struct EntryCache {
  LayerCache cache;
  int rate = 0, span_size = 0;
};
// The most entries that a span holds.
inline int entries_of_span(int span_size, int rate) { return (span_size + rate - 1) / rate; }

// What a row sees in attention over compressed positions: its last `window` positions, then entries of `rate`
// positions, all of them or as many as an indexer selects.
struct ListShape {
  int window = 0, rate = 0, selected = 0;

  // Of the row that is the last of so many positions.
  int length(int positions) const {
    const int entries = rate ? positions / rate : 0;
    return std::min(positions, window) + (selected ? std::min(entries, selected) : entries);
  }
  bool operator==(const ListShape& other) const {
    return window == other.window && rate == other.rate && selected == other.selected;
  }
};

// Adjacent spans of the cache: of one layer or, if layers have several sizes, of all layers together.
struct SpanRange {
  char* data;
  size_t bytes;  // of a span
};
// Such a range, and its part of the spans in host memory. There all parts of a span are adjacent. Part sizes are
// multiples of 16 bytes.
struct SpanPart {
  char *cache, *host;
  size_t bytes, host_stride;
};
struct SpanPair {
  int span, host;
};
// Copies spans to the host (saves) or back. largest: bytes of the largest part.
void copy_spans(const SpanPart* parts, int ranges, size_t largest, const SpanPair* pairs, int count, bool saves,
                const Queue& queue);

// Rows of one sequence that attend together: `count` adjacent rows of the step from `row` on, at positions from `start`
// on, with the spans tables[table...]. A prefill tile covers the (row, query head of a KV head's group) pairs from
// number `first` on. A decode tile covers all pairs; its `first` is the number of KV splits of the decode tiles before
// it, and `before` the number of the sequence's rows of the step that are in the tiles before it; kSelected: the tile's
// one row attends to the positions that an indexer selects for it, or to its list (ListShape), as if these were
// positions 0 to `start`.
struct AttentionTile {
  int row, count, start, table, first, before;
};
constexpr int kSelected = -1;

// How attention is computed; cuda/kernel_choice.h chooses. mma also supports quantized caches.
enum class AttentionAlgo { simt, mma, wgmma };
struct AttentionChoice {
  AttentionAlgo decode = AttentionAlgo::simt, prefill = AttentionAlgo::simt;
  bool stores = false;  // whether store_and_attend() can be used
};

// Which tiles compute chunks of a few dozen rows, and rows with drafts: those that are faster, or, for tests, one kind
// wherever it can. The bits are the same.
enum class ShortChunks { fastest, decode, prefill };

struct Attention {
  LayerCache cache;
  int group = 1;  // query heads per KV head
  int first = 0,
      queries = 0;  // this rank's query heads: place of the first one in the first KV head's group, and their count
  float scale = 1, soft_cap = 0;
  int window = 0;
  // Of rows that see later positions, which only prefill tiles compute: the last position that each row of the step
  // sees (null: its own), and the first one (null: 0, or where a window begins). Both ascend with the rows of a
  // sequence.
  const int *from = nullptr, *to = nullptr;
  const float *slopes = nullptr, *sinks = nullptr;  // [this rank's query heads], or null
  const float* qkv = nullptr;                       // [rows, width]: queries, keys, values; or queries alone
  int width = 0;
  Rows out;
  const int* tables = nullptr;  // of spans
  float* partials = nullptr;    // results of KV splits of decode tiles, tile by tile
  int max_splits = 0;           // KV splits of the longest sequence
  int* arrivals = nullptr;      // finished warps of each tile and KV head; zero between launches
  int* given_up = nullptr;      // in host memory: for waits that fail (errors.h)
  Norm query_norm, key_norm;    // only store_and_attend(): norms of heads before RoPE; weight null: none
  // Only latent attention, whose `qkv` has queries alone: their rotated parts, in the first columns of rows of
  // rotated_width, and the rows that the cache keeps.
  const float *rotated = nullptr, *kept = nullptr;
  int rotated_width = 0;
  const float* selected = nullptr;  // [rows, selected_width]: the positions that an indexer selects, or null
  int selected_width = 0;
  // Only attention over compressed positions, which otherwise has the fields of latent attention, and for which
  // `selected` has entries: the window of ListShape, the position of each row, and the entries.
  int listed = 0;
  const int* positions = nullptr;
  EntryCache entries;
  const int* entry_tables = nullptr;
};
constexpr int kKvSplitTokens = 256;  // tokens of a KV split; splits are merged in ascending order
constexpr int kDecodePairs = 16;     // pairs of a decode tile, whose KV splits are distributed over CTAs
constexpr int kPrefillPairs = 128;   // pairs of a prefill tile
constexpr int kOwnRows = 16;         // most rows of a sequence that decode kernels store in the cache themselves
constexpr int kFullTables = 8;       // decode tiles of a step that may have the longest context, if memory allows
constexpr int kLargestHead = 512, kLargestPadded = 256;
// The features of a head in a 16-bit cache of rows that only prefill tiles compute: a size that mma kernels have, if
// that is less than twice as large.
AS_BOTH constexpr int padded_head(int dim) {
  return dim <= 32 || dim > kLargestPadded ? (dim + 7) / 8 * 8
         : dim <= 64                       ? 64
         : dim <= 80                       ? 80
         : dim <= 96                       ? 96
         : dim <= 128                      ? 128
                                           : 256;
}
constexpr int kLatentDim = 512, kLatentRope = 64;  // of the known models; the mma kernels of latent attention need them
constexpr int kLargestRow = kLatentDim + kLatentRope;
// Floats of the partial result of one KV split, tile and KV head.
inline size_t partial_floats(int head_dim) { return kDecodePairs * (2 + (size_t)head_dim); }
// The most KV splits that decode tiles of a step have together. A step whose sequences have more, in which many share a
// long prefix, computes some of them by prefill tiles. split_bytes: of a KV split's partial results, of all KV heads;
// most_bytes: of all; at least each sequence may have one KV split, and one tile all.
constexpr size_t kPartialBytes = 1 << 30;
inline int most_kv_splits(int sequences, int max_length, size_t split_bytes, size_t most_bytes = kPartialBytes) {
  const size_t longest = ((size_t)max_length + kKvSplitTokens - 1) / kKvSplitTokens;
  return (int)std::min(std::max(sequences, kFullTables) * longest,
                       std::max(most_bytes / std::max<size_t>(split_bytes, 1), sequences + longest));
}

// RoPE of all query and key heads.
struct Rope {
  RotaryTable table;
  bool interleaved = false;
};
// Writes keys and values of rows to the cache. where: span * span_size + place in the span of each row; -1: not stored.
// rope: null, or applied to the stored keys and, if `queries`, to the queries in place.
void store_cache(const Attention& a, const int* where, const Rope* rope, bool queries, int rows, const Queue& queue);
// tiles: at most kDecodePairs pairs each; a sequence may have several. sharers: CTAs that share the KV splits of a
// tile; 1 if no tile has several.
void attend_decode(const Attention& a, AttentionAlgo algo, const AttentionTile* tiles, int count, int sharers,
                   const Queue& queue);
// tiles: at most kPrefillPairs pairs each. rope: null, or applied to the queries first (needs attend_prefill_ropes()).
void attend_prefill(const Attention& a, AttentionAlgo algo, const AttentionTile* tiles, int count, const Rope* rope,
                    const Queue& queue);
bool attend_prefill_ropes(const Attention& a, AttentionAlgo algo, const Rope& rope);
// Multiplies queries at positions from `beyond` on by log(position + 1) / log(beyond).
void scale_queries(const Attention& a, const int* positions, double beyond, int rows, const Queue& queue);
// store_cache() and attend_decode() in one mma kernel, for steps without prefill tiles and with at most kOwnRows rows
// of a sequence.
void store_and_attend(const Attention& a, const Rope* rope, const AttentionTile* tiles, int count, int sharers,
                      const Queue& queue);

// Latent attention. Query heads form tiles of at most kDecodePairs, as if they were the groups of so many KV heads.
struct LatentHeads {
  int tiles, group;

  explicit LatentHeads(int heads)
      : tiles((heads + kDecodePairs - 1) / kDecodePairs), group((heads + tiles - 1) / tiles) {}
};
void store_latent(const Attention& a, const int* where, int rows, const Queue& queue);
// As attend_decode() and attend_prefill(). algo: simt or mma.
void attend_latent_decode(const Attention& a, AttentionAlgo algo, const AttentionTile* tiles, int count, int sharers,
                          const Queue& queue);
void attend_latent_prefill(const Attention& a, AttentionAlgo algo, const AttentionTile* tiles, int count,
                           const Queue& queue);
// Of tiles whose rows see the positions that an indexer selects, without KV splits in parallel.
void attend_latent_selected(const Attention& a, AttentionAlgo algo, const AttentionTile* tiles, int count,
                            const Queue& queue);

}  // namespace as::cuda
