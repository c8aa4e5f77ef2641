// Writes keys and values into the cache. This happens once per token, so plain code serves every instruction set.
#include "cpu/cache.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "common/bf16.h"

namespace as {
namespace {

template <typename T>
void write_floats(const SpanLayout& s, char* span, int token, const float* key, const float* value) {
  auto rounded = [](float x) {
    if constexpr (sizeof(T) == 4) return x;
    else return float_to_bf16(x);
  };
  T* k = reinterpret_cast<T*>(span + token / kKeyGroup * s.group_bytes) + token % kKeyGroup;
  T* v = reinterpret_cast<T*>(span + s.value_offset + token * s.value_bytes);
  for (int d = 0; d < s.head_dim; d++) k[(size_t)d * kKeyGroup] = rounded(key[d]);
  if (!value) return;
  for (int d = 0; d < s.head_dim; d++) v[d] = rounded(value[d]);
  for (int d = s.head_dim; d < s.padded_dim; d++) v[d] = 0;
}

// Writes a token's key, and its value into one half of each pair: the earlier token of a pair has the lower half. The
// other half does not change.
void write_pairs(const SpanLayout& s, char* span, int token, const float* key, const float* value) {
  uint16_t* k = reinterpret_cast<uint16_t*>(span + token / kKeyGroup * s.group_bytes) + token % kKeyGroup * 2;
  uint16_t* v = reinterpret_cast<uint16_t*>(span + s.value_offset + token / 2 * 2 * s.value_bytes) + token % 2;
  auto at = [&](int d) -> uint16_t& { return k[(size_t)(d / 2) * 2 * kKeyGroup + d % 2]; };
  for (int d = 0; d < s.head_dim; d++) at(d) = float_to_bf16(key[d]);
  for (int d = s.head_dim; d < s.key_dim; d++) at(d) = 0;
  if (!value) return;
  for (int d = 0; d < s.head_dim; d++) v[2 * d] = float_to_bf16(value[d]);
  for (int d = s.head_dim; d < s.padded_dim; d++) v[2 * d] = 0;
}

// Quantizes x[0 .. n) into q[0 .. padded), with 0 past n. A NaN or an infinity makes the scale NaN, and so everything
// computed from the row.
void quantize(const float* x, int n, int padded, int levels, uint8_t* q, float* scale, float* minimum) {
  float low = x[0], high = x[0], poison = 0;
  for (int i = 0; i < n; i++) {
    low = x[i] < low ? x[i] : low;
    high = x[i] > high ? x[i] : high;
    poison += x[i] * 0.0f;
  }
  std::fill_n(q, padded, (uint8_t)0);
  *scale = 0, *minimum = low;
  if (poison != 0) {
    *scale = *minimum = std::numeric_limits<float>::quiet_NaN();
    return;
  }
  const float step =
      (float)(((double)high - low) / levels);  // in double, because the range may exceed the largest float
  if (step < 1e-37f) return;                   // (nearly) equal values: the inverse would overflow
  const float inverse = 2 / step;
  for (int i = 0; i < n; i++) q[i] = (uint8_t)std::min((long)levels, std::lrintf((0.5f * x[i] - 0.5f * low) * inverse));
  *scale = step;
}

void write_quantized(const SpanLayout& s, char* span, int token, const float* key, const float* value) {
  alignas(16) uint8_t k[kQuantizedHeadDim], v[kQuantizedHeadDim];
  float* scales = reinterpret_cast<float*>(span + s.scale_offset) + token;
  const int levels = (1 << bits_of(s.dtype)) - 1, pairs = (s.head_dim + 1) / 2;
  quantize(key, s.head_dim, s.padded_dim, levels, k, scales, scales + s.span_size);
  quantize(value, s.head_dim, s.padded_dim, levels, v, scales + 2 * s.span_size, scales + 3 * s.span_size);
  char* keys = span + token / kKeyGroup * s.group_bytes;
  char* values = span + s.value_offset + token / 2 * 2 * s.value_bytes;
  const int lane = token % kKeyGroup, half = token % 2;
  if (s.dtype == DType::i8) {
    for (int p = 0; p < pairs; p++)
      for (int i = 0; i < 2; i++) keys[(p * kKeyGroup + lane) * 2 + i] = (char)k[2 * p + i];
    for (int d = 0; d < s.padded_dim; d++) values[2 * d + half] = (char)v[d];
    return;
  }
  for (int p = 0; p < pairs; p++) keys[p * kKeyGroup + lane] = (char)(k[2 * p] | k[2 * p + 1] << 4);
  for (int d = 0; d < s.padded_dim; d++) values[d] = (char)((values[d] & (half ? 0x0f : 0xf0)) | v[d] << 4 * half);
}

}  // namespace

void write_token(const SpanLayout& layout, char* span, int token, const float* key, const float* value) {
  switch (layout.dtype) {
    case DType::f32:
      return write_floats<float>(layout, span, token, key, value);
    case DType::bf16:
      return layout.pairs ? write_pairs(layout, span, token, key, value)
                          : write_floats<uint16_t>(layout, span, token, key, value);
    case DType::i8:
    case DType::u4:
      return write_quantized(layout, span, token, key, value);
  }
}

void write_latent(const SpanLayout& s, char* span, int token, const float* row) {
  char* to = span + token * s.row_bytes;
  if (s.split) {
    uint8_t* quants = reinterpret_cast<uint8_t*>(to);
    float* scales = reinterpret_cast<float*>(to + s.row_bytes - kLatentScaleBytes);
    const int first = padded_part(s.split), rest = s.head_dim - s.split;
    quantize(row, s.split, first, 255, quants, scales, scales + 1);
    if (rest) quantize(row + s.split, rest, padded_part(rest), 255, quants + first, scales + 2, scales + 3);
    return;
  }
  std::memset(to, 0, s.row_bytes);
  if (s.dtype == DType::f32) std::memcpy(to, row, s.head_dim * sizeof(float));
  else
    for (int d = 0; d < s.head_dim; d++) reinterpret_cast<uint16_t*>(to)[d] = float_to_bf16(row[d]);
}

void SpanCache::allocate(LayerCaches layers, int span_size, int num_spans) {
  layers_ = std::move(layers), span_size_ = span_size;
  std::map<int, size_t> used;  // bytes of a span, by cache group
  for (auto& [place, layer] : layers_) span_bytes_ = std::max(span_bytes_, used[place.first] += layer.bytes());
  memory_ = Buffer(span_bytes_ * num_spans, "the KV cache");
  used.clear();
  for (auto& [place, layer] : layers_) {
    layer.data = memory_.as() + used[place.first], layer.stride = span_bytes_;
    used[place.first] += layer.bytes();
  }
}

void SpanCache::copy(const std::vector<int32_t>& spans, size_t begin, char* data, size_t bytes, bool to_spans) const {
  for (const size_t end = begin + bytes; begin < end;) {
    const size_t within = begin % span_bytes_, count = std::min(span_bytes_ - within, end - begin);
    char* place = span(spans.at(begin / span_bytes_)) + within;
    std::memcpy(to_spans ? place : data, to_spans ? data : place, count);
    begin += count, data += count;
  }
}

}  // namespace as
