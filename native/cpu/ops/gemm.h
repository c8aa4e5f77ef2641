// A matrix times rows of activations: how threads share it out, and the rows prepared as the kernels take them.
#pragma once
#include "cpu/core.h"

namespace as {

// Fewer rows are bound by reading weights: their panels are read as one stream.
constexpr int kManyRows = 33;

// Panels of gate that experts' few rows are multiplied with in one stream, before those of up: they stay in the cache.
constexpr int kGatedPanels = 8;

// Part of a product that one thread computes: panels and rows.
struct WorkUnit {
  int p0, p1, r0, r1;
  bool empty() const { return r0 >= r1 || p0 >= p1; }
};

// Few rows: panels are shared out. Many: rows too, so that threads get parts as equal as can be.
WorkUnit work_unit_of(int thread, int threads, int panels, int rows);

// Bytes of scratch memory for `rows` prepared rows of a product, or for one row in a copy for each thread.
size_t prepared_bytes(const Core& core, const Packed& m, int rows);

// Rows of `x` as the kernels take them: those of a prepared tensor as they are; else prepared into `scratch`: threads
// share them out, but one row each thread prepares for itself, which takes less than waiting for each other. False:
// another thread has failed.
bool activations(const Core& core, int thread, const Packed& m, const Tensor& x, int rows, const Buffer& scratch,
                 Activations& a);

}  // namespace as
