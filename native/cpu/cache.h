// The keys and values of all layers: spans (span_layout.h) of positions of a sequence.
#pragma once
#include <vector>

#include "cpu/kernels/span_layout.h"
#include "cpu/memory.h"

namespace as {

// A layer's part of the cache: its spans are adjacent, a span's KV heads within. Layers of one number in several cache
// groups share it: a span is one group's at a time.
struct LayerCache {
  SpanLayout layout;
  int kv_heads = 0;
  char* data = nullptr;

  char* span(int index, int kv_head) const { return data + layout.bytes * ((size_t)index * kv_heads + kv_head); }
};

class SpanCache {
 public:
  // layers: with layout and KV heads.
  void allocate(std::vector<LayerCache> layers, int num_spans);
  const LayerCache& layer(int index) const { return layers_.at(index); }
  int layers() const { return (int)layers_.size(); }
  const Buffer& memory() const { return memory_; }

 private:
  std::vector<LayerCache> layers_;
  Buffer memory_;
};

}  // namespace as
