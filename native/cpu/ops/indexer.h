// indexer: scores of all positions of a sequence, and the positions with the largest ones.
#pragma once
#include <cstddef>
#include <cstdint>

#include "cpu/kernels/span_layout.h"

namespace as {

// The most rows of a sequence that a thread scores together: a block of keys is read once for them.
constexpr int kIndexRows = 8;

// Bytes of scores, converted queries and packed entries that indexers use in turn. dim: of a head. entries: the layout
// of cached entries, or null if positions are scored.
size_t indexer_bytes(int threads, int max_length, int heads, int dim, const SpanLayout* entries);

// Writes the `count` positions with the largest scores, of n, ascending. The lowest position wins ties. scratch: n
// values.
void select_largest(const float* scores, int n, int count, uint32_t* scratch, float* out);

}  // namespace as
