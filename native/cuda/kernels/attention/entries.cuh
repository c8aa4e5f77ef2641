// Where compressed positions lie in the cache, and rows of the lists that attention over them sees.
#pragma once
#include "cuda/kernels/attention/attention.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {

// A span has the entries whose last position it holds. table: of a sequence's spans.
__device__ inline const char* entry_row(const EntryCache& entries, const int* table, int entry) {
  const int span = ((entry + 1) * entries.rate - 1) / entries.span_size,
            before = span * entries.span_size / entries.rate;
  return head_of(entries.cache, table[span], 0) + (entry - before) * entries.cache.row_bytes();
}

// A place in the list of a row at `position`: ~p for position p, or an entry. selected: null, or the entries of the
// list.
__device__ inline int listed(const Attention& a, int position, const float* selected, int index) {
  const int positions = min(position + 1, a.listed);
  if (index < positions) return ~(position + 1 - positions + index);
  return selected ? (int)selected[index - positions] : index - positions;
}
// Where the cache has it. table: of a tile.
__device__ inline const char* listed_row(const Attention& a, int table, int place) {
  if (place >= 0) return entry_row(a.entries, a.entry_tables + table, place);
  const int position = ~place, size = a.cache.span_size;
  return head_of(a.cache, a.tables[table + position / size], 0) + position % size * a.cache.row_bytes();
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
