// The keys and values of all layers, in spans (span_layout.h) of a sequence's positions.
#pragma once
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "cpu/kernels/span_layout.h"
#include "cpu/memory.h"

namespace as {

// A layer's part of the cache: of every span, the same bytes, in which its KV heads are adjacent.
struct LayerCache {
  SpanLayout layout;
  int kv_heads = 0;
  char* data = nullptr;  // the layer's part of the first span
  size_t stride = 0;     // from a span to the next

  size_t bytes() const { return layout.bytes * kv_heads; }
  char* span(int index, int kv_head) const { return data + stride * index + layout.bytes * kv_head; }
};

// Layers by cache group and number in the group.
using LayerCaches = std::map<std::pair<int, int>, LayerCache>;

// A span is one range of memory with its layers one after the other. It belongs to one cache group at a time, so the
// layers of different groups share it; it has room for those of the largest group.
class SpanCache {
 public:
  // layers: with layout and number of KV heads.
  void allocate(LayerCaches layers, int span_size, int num_spans);
  const LayerCache& layer(int group, int number) const { return layers_.at({group, number}); }
  size_t span_bytes() const { return span_bytes_; }
  char* span(int index) const { return memory_.as() + span_bytes_ * index; }
  // Copies bytes [begin, begin + bytes) of these spans, one after the other, to or from `data`.
  void copy(const std::vector<int32_t>& spans, size_t begin, char* data, size_t bytes, bool to_spans) const;
  const Buffer& memory() const { return memory_; }
  int span_size() const { return span_size_; }

 private:
  LayerCaches layers_;
  int span_size_ = 0;  // positions
  size_t span_bytes_ = 0;
  Buffer memory_;
};

}  // namespace as
