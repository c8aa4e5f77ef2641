// The memory layout of the keys and values of one span, layer and KV head.
//
//   float32, bfloat16   keys [group of 16 tokens][d][token], values [token][padded d]
//   bfloat16 in pairs   keys [group][pair of d][token][2], d padded to a multiple of 32
//                       values [pair of tokens][padded d][2]
//   int8                keys [group][pair of d][token][2], values [pair of tokens][padded d][2], scales
//   uint4               keys [group][pair of d][token], values [pair of tokens][padded d], the first of a pair in the
//                       low nibble; scales
//
// A lane is a token, so no score needs a horizontal sum. Pairs of d suit products that add neighbours. bfloat16 is
// stored in pairs for instruction sets that have such products: 16 pairs of a group of keys, or of 16 values, are the
// second operand of a tile product. Scales are four runs of span_size floats: scale and minimum of the keys, then of
// the values. A value is q * scale + minimum, with scale = (max - min) / (2^bits - 1). The minimum is stored as a
// float, so equal values are exact.
//
// A latent cache (float32, bfloat16 or int8) stores one row a token, whose first features are also its value:
//
//   float32, bfloat16   [token][d], d padded to a multiple of 32
//   int8                [token] the value's features, then the others, each part padded to a multiple of 16; scale and
//                       minimum of the first part, then of the second
//
// For the kernels, a block of its rows is packed into keys and values of the layouts of float32 and bfloat16 above
// (pack_latent). int8 becomes bfloat16 where that is stored in pairs, else float32.
#pragma once
#include <cstddef>
#include <stdexcept>
#include <string>

namespace as {

// Types of the KV cache.
enum class DType : int { f32 = 0, bf16 = 1, i8 = 2, u4 = 3 };

constexpr int kKeyGroup = 16;
constexpr int kQuantizedHeadDim = 512;  // longest head of a quantized cache

inline bool is_quantized(DType t) { return t == DType::i8 || t == DType::u4; }
inline int bits_of(DType t) { return t == DType::f32 ? 32 : t == DType::bf16 ? 16 : t == DType::i8 ? 8 : 4; }

struct SpanLayout {
  DType dtype = DType::f32;
  bool pairs = false;                                            // bfloat16 in pairs
  int span_size = 0, head_dim = 0, padded_dim = 0, key_dim = 0;  // padded_dim: of values; key_dim: of keys
  size_t group_bytes = 0, value_bytes = 0;                       // of a group of keys; of a token's value
  size_t value_offset = 0, scale_offset = 0, bytes = 0;          // bytes: the whole span
  size_t row_bytes = 0;                                          // of a token's row in a latent cache; 0: no such
  int split = 0;  // features of the first part of a quantized row of a latent cache; 0: no such
  // Of a packed block: one tile of queries takes it, and the kernels may read the rows as they are.
  bool for_one_tile = false;
  int query_dim() const { return (head_dim + 31) / 32 * 32; }  // values of a converted query, 16 bits each
  size_t float_row_bytes() const { return (size_t)query_dim() * bits_of(dtype) / 8; }
};

// bf16_pairs: see Rules (format.h). Throws std::invalid_argument if the heads are too long for a quantized cache.
inline SpanLayout span_layout(DType dtype, int span_size, int head_dim, bool bf16_pairs) {
  if (is_quantized(dtype) && head_dim > kQuantizedHeadDim)
    throw std::invalid_argument("a quantized KV cache takes heads of at most " + std::to_string(kQuantizedHeadDim) +
                                ", got " + std::to_string(head_dim));
  SpanLayout s;
  s.dtype = dtype, s.span_size = span_size, s.head_dim = head_dim;
  s.pairs = dtype == DType::bf16 && bf16_pairs;
  s.padded_dim = (head_dim + 15) / 16 * 16;
  s.key_dim = s.pairs ? s.query_dim() : is_quantized(dtype) ? (head_dim + 1) / 2 * 2 : head_dim;
  s.group_bytes = (size_t)s.key_dim * kKeyGroup * bits_of(dtype) / 8;
  s.value_bytes = (size_t)s.padded_dim * bits_of(dtype) / 8;
  s.value_offset = s.group_bytes * (span_size / kKeyGroup);
  s.scale_offset = s.value_offset + s.value_bytes * span_size;
  s.bytes = s.scale_offset + (is_quantized(dtype) ? 4 * span_size * sizeof(float) : 0);
  return s;
}

constexpr int kLatentPad = 16;                           // features that a part of a quantized row is padded to
constexpr size_t kLatentScaleBytes = 4 * sizeof(float);  // at the end of a quantized row

inline int padded_part(int features) { return (features + kLatentPad - 1) / kLatentPad * kLatentPad; }

// The layout of one span of a latent cache. Values are the first value_dim features of a row. Throws
// std::invalid_argument if the cache would have 4 bits.
inline SpanLayout latent_layout(DType dtype, int span_size, int head_dim, int value_dim, bool bf16_pairs) {
  if (dtype == DType::u4) throw std::invalid_argument("a latent KV cache must have type float32, bfloat16 or int8");
  SpanLayout s;
  s.dtype = dtype, s.span_size = span_size, s.head_dim = head_dim;
  s.pairs = dtype != DType::f32 && bf16_pairs;
  s.row_bytes = s.float_row_bytes();
  if (dtype == DType::i8) {
    s.split = value_dim;
    s.row_bytes = padded_part(value_dim) + padded_part(head_dim - value_dim) + kLatentScaleBytes;
  }
  s.bytes = s.row_bytes * span_size;
  return s;
}

// The layout of rows of `features` values, all of which are both key and value.
inline SpanLayout row_layout(DType dtype, int rows, int features, bool bf16_pairs) {
  return latent_layout(dtype, rows, features, features, bf16_pairs);
}

// The layout of `tokens` rows of a latent cache that are packed for the kernels. Values are the first value_dim
// features of the rows.
inline SpanLayout packed_layout(const SpanLayout& latent, int tokens, int value_dim) {
  const DType dtype = latent.dtype != DType::i8 ? latent.dtype : latent.pairs ? DType::bf16 : DType::f32;
  SpanLayout s = span_layout(dtype, tokens, latent.head_dim, latent.pairs);
  s.padded_dim = (value_dim + 15) / 16 * 16;
  s.value_bytes = (size_t)s.padded_dim * bits_of(s.dtype) / 8;
  s.bytes = s.scale_offset = s.value_offset + s.value_bytes * tokens;
  s.row_bytes = latent.row_bytes, s.split = latent.split;
  // Room for a group of rows as floats, and for the padding of the last one.
  if (s.split) s.bytes += kKeyGroup * s.float_row_bytes() + kLatentPad * sizeof(float);
  return s;
}

// The layout of one span of an indexer's keys: keys alone, of a float32 cache in float32, else in bfloat16.
inline SpanLayout index_layout(DType cache, int span_size, int head_dim, bool bf16_pairs) {
  SpanLayout s = span_layout(cache == DType::f32 ? DType::f32 : DType::bf16, span_size, head_dim, bf16_pairs);
  s.padded_dim = 0, s.value_bytes = 0, s.bytes = s.scale_offset = s.value_offset;
  return s;
}

// Writes a token's row [head_dim] of a latent cache. Threads may write different tokens in parallel.
void write_latent(const SpanLayout& layout, char* span, int token, const float* row);

// Writes a token's key and value, [head_dim] each (cache.cpp). value: null for a layout with keys alone. Threads may
// write different pairs of tokens in parallel.
void write_token(const SpanLayout& layout, char* span, int token, const float* key, const float* value);

}  // namespace as
