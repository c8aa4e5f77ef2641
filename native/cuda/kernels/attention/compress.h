// Compressed positions of DeepSeek-V4.
#pragma once
#include "cuda/kernels/attention/attention.h"

namespace as::cuda {

// rows: what the cache keeps of each position, in float32, [values | gates] of `parts` times the entries' width; x: the
// same of a step's rows. bias: of the gates, [rate, half of a row]. Entries are normed, if the norm has a weight, and
// rotated by their first position, if the table has angles.
struct Compressor {
  LayerCache rows;
  EntryCache entries;
  const float *x = nullptr, *bias = nullptr;
  Norm norm;
  int parts = 1;  // 2: an entry also has the first half of as many positions before its own
  RotaryTable table;
  // Of each row: its position, where it is stored (span * span size + place; -1: nowhere), and where its sequence's
  // tables begin.
  const int *positions = nullptr, *where = nullptr, *row_tables = nullptr;
  const int *tables = nullptr, *entry_tables = nullptr;  // of spans
};
// Stores the rows, and the entries whose last position is among them. The cache keeps floats, so the bits of an entry
// do not depend on where a prompt is cut.
void compress(const Compressor& p, int rows, const Queue& queue);

}  // namespace as::cuda
