// The indexer of sparse attention (DeepSeek-V3.2): scores of all positions that a row sees, and the positions with the
// largest ones. Of DeepSeek-V4: of entries in place of positions.
#pragma once
#include "cuda/kernels/attention/attention.h"

namespace as::cuda {

// keys: a layer of the cache. queries: [rows, heads * dim]; weights: [rows, heads], one for each head. tables: of
// spans; row_tables: where the table of each row's sequence begins. selected: [rows, width], what is computed. scores:
// those of up to most_rows rows, `stride` apart. entries: if they have a rate, `keys` is their cache.
struct Indexer {
  LayerCache keys;
  EntryCache entries;
  const float *queries = nullptr, *weights = nullptr;
  int heads = 0;
  const int *positions = nullptr, *tables = nullptr, *row_tables = nullptr;
  float* selected = nullptr;
  int width = 0;
  float* scores = nullptr;
  int stride = 0, most_rows = 0;
};

constexpr int kIndexTokens = 256;  // positions that a CTA scores together
// The sizes of the scores that indexers keep in turn, for sequences of at most so many positions. most_bytes: unless 16
// rows take more.
constexpr size_t kIndexBytes = 64 << 20;
inline int index_stride(int max_length) { return (max_length + kIndexTokens - 1) / kIndexTokens * kIndexTokens; }
inline int index_rows(int max_rows, int max_length, size_t most_bytes = kIndexBytes) {
  const size_t row = index_stride(max_length) * sizeof(float);
  return (int)std::min<size_t>(max_rows, std::max<size_t>(std::min(most_bytes, kIndexBytes) / row, 16));
}
inline size_t indexer_bytes(int max_rows, int max_length, size_t most_bytes = kIndexBytes) {
  return (size_t)index_rows(max_rows, max_length, most_bytes) * index_stride(max_length) * sizeof(float);
}

// Scores the positions of `rows` rows from `first` on, at most most_rows: the sum over heads of weight *
// max(0, query key). Rows that see no more positions than they select have no scores. prompts: many rows belong to one
// sequence; the bits are the same.
void score_positions(const Indexer& p, int first, int rows, bool prompts, const Queue& queue);
// Writes the positions with the largest scores, ascending; the lowest one wins ties. Then -1.
void select_positions(const Indexer& p, int first, int rows, const Queue& queue);

}  // namespace as::cuda
