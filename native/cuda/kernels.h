// The kernels, as the host starts them. All are queued on a stream; pointers are of the device's memory. Values of a
// row depend on that row alone, whatever else is in a launch.
#pragma once
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "cuda/quantized.h"
#include "cuda/tiles.h"

namespace as {
namespace cuda {

// Floats of 16 bits: bfloat16 and IEEE 754's binary16 (float16), as PTX names them. Values too large for float16 become
// its largest, 65504. What is of 16 bits in a program is all of one type, but for the cache. Kernels of other formats
// (codes, activations of 8 bits) go with bfloat16 alone.
enum class Half : uint8_t { bf16, f16 };
constexpr float kTooLarge = 65520;  // from there on a value does not fit float16: to nearest it would be infinite

// Rows of values: float32 [rows, width], or of 16 bits in tiles (tiles.h) for the products that read them, or both.
struct Rows {
  float* values = nullptr;
  uint16_t* tiles = nullptr;
  int width = 0;
  Half half = Half::bf16;
  uint16_t* copy = nullptr;  // of the tiles, in another GPU's memory: of products of 16 bits in pieces alone
};

// A matrix [n, k]: float32 row by row, or of 16 bits in tiles, or codes.
enum class Kind { f32, half, codes, integers, float8 };  // the last two: codes for activations of 8 bits
struct Matrix {
  int n = 0, k = 0;
  Kind kind = Kind::f32;
  Half half = Half::bf16;
  const float* values = nullptr;
  const uint16_t* tiles = nullptr;
  Codes codes = {};
  int most_pieces = kMostPieces;  // of a sum along K
  int experts = 1;                // a stack of so many such matrices, one after the other

  bool takes_bytes() const { return kind == Kind::integers || kind == Kind::float8; }
  // Of its products' rows of activations: they must be in tiles; or they may, as they are rounded to 8 bits anyway.
  bool takes_tiles() const { return kind == Kind::half || kind == Kind::codes; }
  bool reads_tiles() const { return takes_tiles() || takes_bytes(); }
};

// Where blocks of threads of one launch leave sums for each other: kScratchFloats and kScratchFlags each; and all of
// them pieces of sums, with how many have come. Flags and counts are zero between launches.
constexpr int kScratchBlocks = 144, kScratchFlags = 4;
constexpr size_t kScratchFloats = 192 * 256;
constexpr size_t kScratchPieces = 12 << 20, kScratchCounts = kScratchPieces / 1024;
struct Scratch {
  float* sums = nullptr;
  int* flags = nullptr;
  float* pieces = nullptr;
  int* arrivals = nullptr;
};

// Where launches go: a stream of a chip of this capability (90 is 9.0).
struct Queue {
  cudaStream_t stream = nullptr;
  int capability = 0;
  Scratch scratch;
  bool apart = false;  // kernels begin when those before have ended: these make weights, which are fetched beforehand
};

// Of the GPU in use, bytes of shared memory that a block of threads may have: 227 KiB on Hopper, 163 on the A100, 99 on
// many others.
inline int most_shared() {
  int device = 0, bytes = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  // For tests: as on the chips of capability 8.6 and 8.9, where that is pretended (Device).
  static const char* const pretended = std::getenv("ALLSPARK_TEST_CAPABILITY");
  return pretended && std::atoi(pretended) % 10 ? std::min(bytes, 99 << 10) : bytes;
}

enum class Source { f32, f16, bf16 };

// Puts rows [count, matrix.k] of `source`, `stride` values apart, into rows [first, first + count) of a matrix; adds
// how many values are NaN or infinite, or too large for a matrix of float16, to *bad.
void pack_rows(const void* rows, Source source, int64_t stride, int count, const Matrix& matrix, int first,
               unsigned long long* bad, const Queue& queue);
// Quantizes rows [count, columns], groups of so many columns each, as InstantQuant does (cpu/kernels/quantize.cpp), to
// the bit: into rows from `first` on of a matrix whose columns are those from `column` on, and whose groups are parts
// of these. ranges: of each row and group two floats, to work in. Adds how many values are NaN or infinite to *bad.
void quantize_rows(const void* rows, Source source, int64_t columns, int group, int64_t column, int count,
                   const Matrix& matrix, int first, float* ranges, unsigned long long* bad, const Queue& queue);
// Places codes [count, k] a byte each, and scales and offsets [count, groups] in bfloat16, into rows from `first` on.
void place_rows(const uint8_t* codes, const uint16_t* scales, const uint16_t* offsets, int count, const Matrix& matrix,
                int first, const Queue& queue);
// out [k] float32: a row as the matrix has it.
void read_row(const Matrix& matrix, int row, float* out, const Queue& queue);

// ---- ceilings
// Reads so many bytes, a multiple of 16; sink: a place that is hardly ever written.
void read_memory(const void* data, size_t bytes, uint32_t* sink, const Queue& queue);
// Values of both signs and several sizes.
void fill_bf16(void* data, size_t bytes, const Queue& queue);
// Random ones, evenly between -size and size.
void fill_noise(void* data, size_t bytes, Half half, float size, uint64_t seed, const Queue& queue);

// ---- rows
// Of each row, of each of kBestParts parts of the vocabulary: the greatest logit, its id (of equal ones the first; -1:
// all are -infinite), and how many logits are NaN or +infinite. A part for each lane of a warp that takes the best.
constexpr int kBestParts = 32;
struct Best {
  float logit;
  int token, not_finite;
};
// Of two parts, whose ids are those of the second's or lower.
AS_BOTH inline void add_part(Best& best, const Best& later) {
  best.not_finite += later.not_finite;
  if (later.token >= 0 && (best.token < 0 || later.logit > best.logit))
    best.logit = later.logit, best.token = later.token;
}
// What a row's parts are together.
AS_BOTH inline Best together(const Best* parts) {
  Best best = parts[0];
  for (int i = 1; i < kBestParts; i++) add_part(best, parts[i]);
  return best;
}
// drawn: of the outputs of the step before, the likeliest tokens, for which tokens have drawn_after() (batch.h).
void embed(const Matrix& table, const int* tokens, const Best* drawn, int rows, int vocab_begin, float scale,
           const Rows& out, const Queue& queue);
// weight: of a norm; 1 is added to it with unit_offset.
struct Norm {
  const float* weight = nullptr;
  float eps = 0;
  bool unit_offset = false;
};
void rms_norm(const float* x, const Norm& norm, int rows, const Rows& out, const Queue& queue);
void add(float* x, const float* y, size_t count, const Queue& queue);
void scale(float* x, float factor, size_t count, const Queue& queue);
// gate * sigmoid(alpha * gate) * (up + shift), the gate at most limit, up within +-limit: as it stands, silu(gate) *
// up.
struct Gating {
  float alpha = 1, limit = HUGE_VALF, shift = 0;
};
// in [rows, 2 width]
void silu_mul(const float* in, const Gating& gating, int rows, const Rows& out, const Queue& queue);
// gelu as tanh approximates it; in [rows, 2 width]
void gelu_tanh_mul(const float* in, int rows, const Rows& out, const Queue& queue);
// cap * tanh(x / cap)
void soft_cap(float* x, float cap, size_t count, const Queue& queue);
// Of [queries | keys | values]: sums [rows, 2] of the squares of all queries, and of k_columns from k_offset on; and
// both multiplied with weights, by such sums over all ranks, as one vector of that width each.
struct QkColumns {
  int q_columns = 0, k_offset = 0, k_columns = 0;
};
void qk_square_sums(const float* x, int width, const QkColumns& columns, int rows, float* sums, const Queue& queue);
struct QkNorm {
  const float *q_weight = nullptr, *k_weight = nullptr;
  int q_columns = 0, k_columns = 0, q_width = 0, k_width = 0;
  float eps = 0;
};
void qk_norm(float* x, int width, const QkNorm& norm, const float* sums, int rows, const Queue& queue);
void select_rows(const float* in, const int* chosen, int rows, const Rows& out, const Queue& queue);
// Float rows into tiles.
void to_tiles(const float* in, int rows, const Rows& out, const Queue& queue);

// Rows of activations of 8 bits (kernels/gemm/linear_integer.h), with the sums of parts of them, and each row's scale.
struct ByteRows {
  uint8_t* values = nullptr;
  float *sums = nullptr, *scales = nullptr;
};
constexpr int kMostIntegers = 131000;  // columns: exact sums of products fit 32 bits
size_t byte_rows_bytes(int rows, int k);
ByteRows byte_rows(char* memory, int rows, int k);

// ---- products
// y = x w^T + bias, or that added to what y has. gated: silu of the first half of the sums times the second, w being
// what pair_rows() made.
struct Product {
  Matrix w;
  const float* bias = nullptr;
  bool adds = false, gated = false;
  Rows x, y;
  uint16_t* widened = nullptr;      // of codes: widened_bytes() to work in
  ByteRows bytes = {};              // of activations of 8 bits: what x has been quantized into
  const float* unnormed = nullptr;  // if any: the one row whose norm x would be, which the product norms itself
  Norm norm = {};
};
// Puts rows of gates and of what they gate side by side: in each 16 rows of `to` 8 of the first half of `from`, and the
// 8 of the second that belong to them. Both in tiles or codes; `to` has paired_rows(from.n).
constexpr int paired_rows(int n) { return (n / 2 + 7) / 8 * 16; }
void pair_rows(const Matrix& from, const Matrix& to, const Queue& queue);
void linear_f32(const Product& p, int rows, const Queue& queue);
// The bits are the same by every kernel: mma.sync, or wgmma (chips of capability 9.0 alone) with pieces side by side
// for some rows or in a stream of weights, or one after the other for many.
enum class By { any, mma, split, stream, wide };
void linear_half(const Product& p, int rows, const Queue& queue, By by = By::any);
// Whether it norms such rows itself, if asked to.
bool linear_half_norms(const Product& p, int rows, const Queue& queue);
// Of codes, with activations in bfloat16.
void linear_quantized(const Product& p, int rows, const Queue& queue, By by = By::any);
// Whether it norms such rows itself, if asked to.
bool linear_quantized_norms(const Product& p, int rows, const Queue& queue);
// What that takes for a matrix [n, k] and so many rows at most; gated: n as pair_rows() makes it.
size_t widened_bytes(int n, int k, bool gated, int rows);
// Of integers: what is multiplied is p.bytes.
void linear_integer(const Product& p, int rows, const Queue& queue, By by = By::any);
// The same of floats of 8 bits; for chips of capability 9.0.
void linear_float8(const Product& p, int rows, const Queue& queue, By by = By::any);
// Rows as such products take them: p.x becomes p.bytes.
void quantize_activations(const Product& p, int rows, const Queue& queue);
// Rows [rows, p.w.k] normed, and quantized at once, of rows so wide at most.
void rms_norm_into_bytes(const float* x, const Norm& norm, const Product& p, int rows, const Queue& queue);
bool norms_into_bytes(int width);
// Of one row, p.x or p.unnormed, which becomes 8 bits on its way; false, and nothing is done: there is no kernel that
// does so. Chips of capability 9.0.
bool linear_byte_row(const Product& p, const Queue& queue);

// ---- adapters
// Of a target, which is some of a linear's columns, an adapter's matrices. Of float32: a [rank, in features] and b
// [columns, rank] transposed, in rows of low_rank_stride() values. Of 16 bits, for mma.sync: a in such rows, and b as
// it is; both have whole blocks of ranks, filled up with zeros. rank 0: the adapter has none.
struct LowRank {
  const char *a = nullptr, *b = nullptr;
  int rank = 0;
  float scale = 0;
};
constexpr int kRankBlock = 16;
AS_BOTH constexpr int low_rank_stride(int columns) { return (columns + 7) / 8 * 8; }
AS_BOTH constexpr int whole_ranks(int rank) { return (rank + kRankBlock - 1) / kRankBlock * kRankBlock; }
// Sums over K of matrices of 16 bits are made in so many parts, by different blocks of threads.
constexpr int kMostLowRankParts = 8;
AS_BOTH constexpr int low_rank_parts(int k, bool halves) {
  const int parts = halves ? (k + 1023) / 1024 : 1;
  return parts < kMostLowRankParts ? parts : kMostLowRankParts;
}
// Columns [offset, offset + columns) of what a linear makes; target: which of the adapter's they are.
struct AdaptedColumns {
  int target = 0, offset = 0, columns = 0;
};
constexpr int kMostTargets = 4;  // of one launch
// y += scale * b (a x) for rows that have an adapter; others are not touched. With matrices of 16 bits what follows may
// be computed with it, of all rows, while y stays as it is: `gated`, if y is gates and what they gate, a multiple of
// eight of each, which are the columns of two targets in this order: silu of the gates times the others, each with
// `bias`. `added`, if all of y is one target's: that is added to what is there.
struct AdaptedSums {
  const LowRank* pairs = nullptr;  // [adapters, targets]
  int targets = 0;
  const int *adapters = nullptr, *chosen = nullptr;  // of each row of the step, -1: none; chosen: null, or y's rows
  bool halves = false;                               // matrices are of 16 bits
  Half type = Half::bf16;
  Rows x;
  float* y = nullptr;
  int width = 0, half = 0;  // of y; half: not 0 where its columns lie as pair_rows() has them, of so many gates
  float* inner = nullptr;   // [rows, count, low_rank_parts(), whole_ranks(max_rank)]: parts of a x
  int max_rank = 0, count = 0;
  AdaptedColumns columns[kMostTargets];
  int adapter_count = 0;  // that there may be
  Rows gated;
  const float* bias = nullptr;
  float* added = nullptr;
};
void add_low_rank(const AdaptedSums& a, int rows, const Queue& queue);
// silu_mul of sums whose columns lie as pair_rows() has them; bias: null, or to be added first, as it is without.
void silu_mul_pairs(const float* in, const float* bias, int rows, const Rows& out, const Queue& queue);

// ---- attention
struct RotaryTable {
  const float *inverse = nullptr, *longer = nullptr;  // [half]; longer: null, or beyond original_max
  int dim = 0;
  bool dynamic = false, powers = false;
  float attention_factor = 1;
  double base = 0, factor = 1, original_max = 0;
  float *cosine = nullptr, *sine = nullptr;  // [rows, dim / 2]
};
// prompts: of each row's sequence, its prompt's length. A table goes by that, or by the row's own if it is longer.
void rotary_table(const RotaryTable& table, const int* positions, const int* prompts, int rows, const Queue& queue);

// What is done to heads that stand side by side in columns [offset, offset + heads * head_dim).
struct Heads {
  int offset = 0, count = 0, head_dim = 0;
};
struct HeadNorm {
  Heads heads;
  Norm norm;
};
// Of some heads, and of others (none: count 0), as of queries and keys.
void head_norm(float* x, int width, const HeadNorm& first, const HeadNorm& second, int rows, const Queue& queue);
void rope(float* x, int width, const Heads& heads, const RotaryTable& table, bool interleaved, int rows,
          const Queue& queue);

// The cache of a layer: spans, in each its KV heads, of each keys and then values [span_size, padded_dim]. Quantized as
// the CPU backend does (cpu/kernels/span_layout.h): a value is q * scale + minimum, of uint4 two features in a byte,
// the even one in the lower half; behind keys and values lie, each [span_size] floats, scales and minimums of the keys,
// then of the values. float8: e4m3 as it is, larger values cut to 448.
enum class CacheType { f32, half, int8, uint4, float8 };
struct LayerCache {
  char* data = nullptr;
  CacheType type = CacheType::f32;
  int span_size = 0, kv_heads = 0, head_dim = 0, padded_dim = 0;
  Half half = Half::bf16;

  AS_BOTH bool quantized() const { return type == CacheType::int8 || type == CacheType::uint4; }
  AS_BOTH int bits() const {
    return type == CacheType::f32 ? 32 : type == CacheType::half ? 16 : type == CacheType::uint4 ? 4 : 8;
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
  int most_runs = 0;            // of any sequence
  int* arrivals = nullptr;      // of tiles and KV heads: runs that are done; zero between launches
  Norm query_norm, key_norm;    // of store_and_attend() alone: of each head, before it is rotated; weight null: none
};
constexpr int kRunTokens = 256;  // context is attended to in runs of so many tokens, and these merged in order
constexpr int kFewPairs = 16;    // pairs of a tile whose runs are shared out
constexpr int kManyPairs = 128;  // pairs of other tiles
constexpr int kLargestHead = 256;
// Of one run of one tile and KV head.
inline size_t partial_floats(int head_dim) { return kFewPairs * (2 + (size_t)head_dim); }

// How queries and keys are rotated: all heads of them.
struct Turn {
  RotaryTable table;
  bool interleaved = false;
};
// Keys and values of rows enter the cache; where: each row's span * span_size + place in it, -1 for none. turn: null,
// or what happens to keys on their way there, and, if `queries`, to queries where they are.
void store_cache(const Attention& a, const int* where, const Turn* turn, bool queries, int rows, const Queue& queue);
// tiles: of at most kFewPairs. splits: by how many blocks the runs of one are shared: 1 if no tile has several.
void attend_few(const Attention& a, const AttentionTile* tiles, int count, int splits, const Queue& queue);
// tiles: of at most kManyPairs. turn: null, or what happens to queries first, if attend_turns().
void attend_many(const Attention& a, const AttentionTile* tiles, int count, const Turn* turn, const Queue& queue);
bool attend_turns(const Attention& a, const Turn& turn, const Queue& queue);
// Queries at positions from `beyond` on, times log(position + 1) / log(beyond).
void scale_queries(const Attention& a, const int* positions, double beyond, int rows, const Queue& queue);
// store_cache() and attend_few() at once, of a step whose tiles are all few. False, and nothing is done, where there is
// no kernel for this cache.
bool store_and_attend(const Attention& a, const Turn* turn, const AttentionTile* tiles, int count, int splits,
                      const Queue& queue);

// ---- ranks of several GPUs
constexpr int kMostRanks = 8;
// Partial sums in tiles of so many rows at most are pushed into the other ranks' memory; of more the others read
// them. What has not come yet has all bits set, in each value's place: no product or sum rounds to that.
constexpr int kPushedRows = 256;
constexpr int kNotYet = 0xffff;
// What kernels have of a group's ranks: memory of each one's GPU, which all read and write (exchange.h).
struct Peers {
  int rank = 0, world = 1;
  size_t half = 0;                   // bytes: of either buffer of partial sums
  const char* partials[kMostRanks];  // of each rank, two buffers: those of a step's even calls, and of its odd ones
  uint32_t* flags[kMostRanks];       // on each rank, of each rank: the last call that it has come to; then whether
                                     // one has not come within the limit
  char* pushed[kMostRanks];          // on each rank, of even and of odd calls, of each rank: what it has pushed
  size_t pushed_bytes = 0;           // of one rank and call, or 0: nothing is
  const int* step = nullptr;         // how many steps came before; the same on all ranks
  int* failed = nullptr;             // of the host: 0, or 1 + the rank that has not come within the limit
  uint64_t limit = 0;                // ns

  // On rank `on`, of rank `of`.
  AS_BOTH char* place(int on, int of, int call) const { return pushed[on] + (call % 2 * world + of) * pushed_bytes; }
};
// y [rows, y.width] = the sum of the ranks' partial sums, in rank order: ((0 + 1) + 2) + ..., or that added to what y
// has; and if there is a norm with a weight, rows of y normed, too. One of the `calls` that every step makes on all
// ranks in the same order, an even number. halves: partial sums are in tiles, else float32 rows.
struct RankSum {
  Peers peers;
  int call = 0, calls = 0;
  bool halves = false, adds = false;
  Half half = Half::bf16;   // of partial sums in tiles, and of what is normed
  bool on_its_way = false;  // what made the partial sums of few rows has pushed them
  Rows y;
  Norm norm;
  Rows normed;
};
void sum_ranks(const RankSum& sum, int rows, const Queue& queue);
// Whether partial sums in tiles of so many rows are pushed.
inline bool pushes(const Peers& peers, int rows) { return peers.pushed_bytes && rows > 0 && rows <= kPushedRows; }

// ---- sampling
// Of the model's own logits.
void best_tokens(const float* logits, int width, int rows, Best* best, const Queue& queue);

}  // namespace cuda
}  // namespace as
