// The heads of groups in panels: scales and offsets of stored rows, in the order of lanes.
#pragma once
#include <cstdint>

#include "cpu/quantized.h"

namespace as {

constexpr int kMaxRows = 64;  // of a panel

// Widens `rows` scales of e8m0, `stride` bytes apart, to `bytes` bytes each: float32 or bfloat16.
void gather_powers(const char* from, int64_t stride, int rows, int bytes, char* out);

// Writes the heads (scales and offsets) of groups for rows of one panel.
class Heads {
 public:
  Heads(const Packed& w, const StoredRows& stored, int64_t column) : w_(w), stored_(stored), column_(column) {}

  // For group g of the panel: stored rows from `row` on go to its lanes from `lane` on. Returns the number of block
  // scales that are NaN or infinite.
  int place(int64_t row, int rows, int panel, int g, int lane);

 private:
  // Places scales of e8m0. They are read and transposed for eight groups at once, if so many follow.
  void place_powers(int64_t row, int rows, int64_t group, int bytes, char* out);
  // Unpacks the scales of a block of up to eight rows into lanes from `lane` on.
  void unpack_eight(int64_t row, int rows, int64_t block, int lane);

  const Packed& w_;
  const StoredRows& stored_;
  const int64_t column_;
  int64_t block_ = -1, row_ = -1;  // the unpacked block; a group's scales are adjacent
  int8_t scales_[16][kMaxRows], minimums_[8][kMaxRows];
};

}  // namespace as
