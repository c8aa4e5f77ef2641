// The keys and values of all layers, in spans (span_layout.h) of a sequence's positions.
#pragma once
#include <cstdint>
#include <vector>

#include "cpu/kernels/span_layout.h"
#include "cpu/memory.h"

namespace as {

// A layer's part of the cache: its spans are adjacent, and so are the KV heads of a span. Layers with the same number
// in different cache groups share it, because a span belongs to one group at a time.
struct LayerCache {
  SpanLayout layout;
  int kv_heads = 0;
  char* data = nullptr;

  char* span(int index, int kv_head) const { return data + layout.bytes * ((size_t)index * kv_heads + kv_head); }
};

class SpanCache {
 public:
  // layers: with layout and number of KV heads.
  void allocate(std::vector<LayerCache> layers, int num_spans);
  const LayerCache& layer(int index) const { return layers_.at(index); }
  int layers() const { return (int)layers_.size(); }
  size_t span_bytes() const;
  // Copies bytes [begin, begin + bytes) of these spans, one after the other with all their layers, to or from `data`.
  void copy(const std::vector<int32_t>& spans, size_t begin, char* data, size_t bytes, bool to_spans) const;
  const Buffer& memory() const { return memory_; }

 private:
  std::vector<LayerCache> layers_;
  Buffer memory_;
};

}  // namespace as
