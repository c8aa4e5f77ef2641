// Span attention of a step: writes the new keys and values, then attends tile by tile over blocks of context.
//
// A tile is up to kTileRows query rows (positions x query heads) of one sequence that share a KV head, so that a key is read
// once for all of them. Enough tiles: a thread walks its tiles, block after block. Few tiles (decode): threads share out the
// (tile, block) pairs and the partial results are merged afterwards, in the same order: the bits are the same either way.
#include <algorithm>
#include <limits>

#include "bf16.h"
#include "executor.h"

namespace as {

// A layer's spans are adjacent, a span's KV heads within: [layer][span][kv head]{K [head_dim][16] groups, V [tokens][padded_dim]}.
char* Executor::span_address(int layer, int span, int kv_head) const {
  return cache_.as() + head_span_bytes_ * (((size_t)layer * num_spans_ + span) * shape_.kv_heads + kv_head);
}

void Executor::make_tiles(const Plan& plan) {
  tiles_.clear(), pairs_.clear();
  int row = 0;
  for (const Work& w : plan.work) {
    for (int kv = 0; kv < shape_.kv_heads; kv++) {
      // Local query heads of this KV head: global head h uses KV head h / group.
      const int global = kv + shape_.kv_begin;
      const int head0 = std::max(0, global * shape_.group - shape_.q_head_begin);
      const int head1 = std::min(shape_.q_heads, (global + 1) * shape_.group - shape_.q_head_begin);
      for (int h = head0; h < head1; h += kTileRows) {
        const int heads = std::min(kTileRows, head1 - h), step = std::max(1, kTileRows / heads);
        for (int i = 0; i < w.count; i += step) {
          const int positions = std::min(step, w.count - i), context = w.start + i + positions;
          tiles_.push_back({w.slot, row + i, w.start + i, positions, kv, h, h + heads, (context + kBlockTokens - 1) / kBlockTokens, 0});
        }
      }
    }
    row += w.count;
  }
  split_blocks_ = pool_.size() > 1 && (int)tiles_.size() < 4 * pool_.size();
  if (split_blocks_)
    for (int t = 0; t < (int)tiles_.size(); t++) {
      tiles_[t].partial = (int)pairs_.size();
      for (int b = 0; b < tiles_[t].blocks; b++) pairs_.emplace_back(t, b);
    }
}

void Executor::write_cache(const Op& op, int thread) {
  const int dim = shape_.head_dim, padded = shape_.padded_dim, width = in(op).width;
  const size_t v_offset = (size_t)span_size_ * dim;
  auto write = [&](auto* span, int token, const float* key, const float* value) {
    using T = std::remove_pointer_t<decltype(span)>;
    auto rounded = [](float x) {
      if constexpr (sizeof(T) == 4) return x;
      else return float_to_bf16(x);
    };
    T* k = span + (size_t)(token / kKeyGroup) * kKeyGroup * dim + token % kKeyGroup;
    T* v = span + v_offset + (size_t)token * padded;
    for (int d = 0; d < dim; d++) k[(size_t)d * kKeyGroup] = rounded(key[d]), v[d] = rounded(value[d]);
    for (int d = dim; d < padded; d++) v[d] = 0;
  };
  const auto [r0, r1] = part((long)rows_.size(), thread, pool_.size());
  for (int r = r0; r < r1; r++) {
    const Row& row = rows_[r];
    const int span = slots_[row.slot].spans[row.position / span_size_], token = row.position % span_size_;
    const float* qkv = in(op).data + (size_t)r * width;
    for (int h = 0; h < shape_.kv_heads; h++) {
      const float* key = qkv + (size_t)(shape_.q_heads + h) * dim;
      const float* value = qkv + (size_t)(shape_.q_heads + shape_.kv_heads + h) * dim;
      char* address = span_address(op.layer, span, h);
      if (cache_dtype_ == DType::f32) write(reinterpret_cast<float*>(address), token, key, value);
      else write(reinterpret_cast<uint16_t*>(address), token, key, value);
    }
  }
}

void Executor::attend_block(const Op& op, const Tile& tile, int block, float* maximum, float* sum, float* out) const {
  const Slot& slot = slots_[tile.slot];
  const int heads = tile.head1 - tile.head0, begin = block * kBlockTokens;
  const void* spans[kBlockTokens / 16];
  AttentionTile a;
  a.rows = tile.positions * heads;
  a.head_dim = shape_.head_dim, a.padded_dim = shape_.padded_dim;
  for (int i = 0; i < tile.positions; i++)
    for (int h = 0; h < heads; h++) {
      a.q[i * heads + h] = in(op).data + (size_t)(tile.row + i) * in(op).width + (size_t)(tile.head0 + h) * shape_.head_dim;
      a.limit[i * heads + h] = tile.position + i + 1 - begin;
    }
  a.scale = shape_.scale;
  a.span_size = span_size_;
  a.tokens = std::min(kBlockTokens, tile.position + tile.positions - begin);
  for (int t = 0; t < a.tokens; t += span_size_) spans[t / span_size_] = span_address(op.layer, slot.spans[(begin + t) / span_size_], tile.kv_head);
  a.spans = spans;
  a.v_offset = (size_t)span_size_ * shape_.head_dim;
  a.dtype = cache_dtype_;
  a.maximum = maximum, a.sum = sum, a.out = out;
  k_.attend(a);
}

void Executor::finish_tile(const Op& op, const Tile& tile, const float* sum, const float* result) const {
  const int heads = tile.head1 - tile.head0;
  for (int i = 0; i < tile.positions; i++)
    for (int h = 0; h < heads; h++) {
      const int r = i * heads + h;
      float* y = out(op).data + (size_t)(tile.row + i) * out(op).width + (size_t)(tile.head0 + h) * shape_.head_dim;
      const float inverse = 1.0f / sum[r];
      for (int d = 0; d < shape_.head_dim; d++) y[d] = result[(size_t)r * shape_.padded_dim + d] * inverse;
    }
}

void Executor::span_attention(const Op& op, int thread) {
  pool_.guard([&] { write_cache(op, thread); });
  if (!pool_.barrier()) return;
  const int padded = shape_.padded_dim, threads = pool_.size();
  const size_t partial = (size_t)kTileRows * (padded + 2);  // floats: maxima, sums, vectors
  if (split_blocks_) {
    const auto [p0, p1] = part((long)pairs_.size(), thread, threads);
    for (int p = p0; p < p1; p++) {
      float* at = partials_.as<float>() + p * partial;
      attend_block(op, tiles_[pairs_[p].first], pairs_[p].second, at, at + kTileRows, at + 2 * kTileRows);
    }
    if (!pool_.barrier()) return;
  }
  std::vector<float> scratch(2 * partial);
  float *maximum = scratch.data(), *sum = maximum + kTileRows, *result = sum + kTileRows;
  float *block_maximum = maximum + partial, *block_sum = block_maximum + kTileRows, *block_result = block_sum + kTileRows;
  for (int t = thread; t < (int)tiles_.size(); t += threads) {
    const Tile& tile = tiles_[t];
    const int heads = tile.head1 - tile.head0, rows = tile.positions * heads;
    for (int r = 0; r < rows; r++) maximum[r] = -std::numeric_limits<float>::infinity(), sum[r] = 0;
    std::fill_n(result, (size_t)rows * padded, 0.0f);
    for (int b = 0; b < tile.blocks; b++) {
      float *m = block_maximum, *s = block_sum, *o = block_result;
      if (split_blocks_) m = partials_.as<float>() + (tile.partial + b) * partial, s = m + kTileRows, o = s + kTileRows;
      else attend_block(op, tile, b, m, s, o);
      for (int r = 0; r < rows; r++)
        if (tile.position + r / heads >= b * kBlockTokens)  // the row sees something of this block
          k_.merge(maximum + r, sum + r, result + (size_t)r * padded, m[r], s[r], o + (size_t)r * padded, padded);
    }
    finish_tile(op, tile, sum, result);
  }
}

}  // namespace as
