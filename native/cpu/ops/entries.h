// Entries of a cache: what compress keeps of each `rate` positions of a sequence. A span has those whose last position
// it holds, so an entry is complete as soon as its span is written.
#pragma once
#include "batch/batch.h"
#include "cpu/cache.h"

namespace as {

// The most entries that a span holds.
inline int entries_of_span(int span_size, int rate) { return (span_size + rate - 1) / rate; }

// How many entries a row sees that is the last of so many positions. rate: 0 if there are none.
inline int entries_seen(int positions, int rate) { return rate ? positions / rate : 0; }

// The layout of so many entries beside a cache of some type.
inline SpanLayout entry_layout(DType cache, int entries, int features, bool bf16_pairs) {
  return row_layout(cache == DType::f32 ? DType::f32 : DType::bf16, entries, features, bf16_pairs);
}

struct EntryCache {
  LayerCache cache;
  int group = 0, rate = 0, span_size = 0;

  char* row(const Slot& slot, int entry) const {
    const int index = ((entry + 1) * rate - 1) / span_size, before = index * span_size / rate;
    return cache.span(slot.spans[group][index], 0) + (entry - before) * cache.layout.row_bytes;
  }
};

}  // namespace as
