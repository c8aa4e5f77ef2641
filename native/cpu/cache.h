// The keys and values of all layers: spans (span_layout.h) of positions of a sequence.
#pragma once
#include <vector>

#include "cpu/kernels/span_layout.h"
#include "cpu/memory.h"

namespace as {

// A layer's part of the cache: its spans are adjacent, a span's KV heads within.
struct LayerCache {
  SpanLayout layout;
  int group = 0;  // cache group: which of a slot's span tables counts
  int kv_heads = 0;
  char* data = nullptr;

  char* span(int index, int kv_head) const { return data + layout.bytes * ((size_t)index * kv_heads + kv_head); }
};

class SpanCache {
 public:
  // layers: with layout, group and KV heads; num_spans: of each group.
  void allocate(std::vector<LayerCache> layers, const std::vector<int>& num_spans);
  const LayerCache& layer(int index) const { return layers_.at(index); }
  int layers() const { return (int)layers_.size(); }
  const Buffer& memory() const { return memory_; }

 private:
  std::vector<LayerCache> layers_;
  Buffer memory_;
};

}  // namespace as
