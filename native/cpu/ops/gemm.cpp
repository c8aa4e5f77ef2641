#include "cpu/ops/gemm.h"

#include <algorithm>

namespace as {
namespace {

constexpr int kRowsTogether = 32;

}  // namespace

WorkUnit work_unit_of(int thread, int threads, int panels, int rows) {
  const int row_tiles = (rows + kRowsTogether - 1) / kRowsTogether;
  int row_parts = 1;
  long least = 0;
  for (int parts = 1; parts <= std::min(threads, row_tiles / 4 + 1); parts++) {
    if (threads % parts) continue;
    const long panel_parts = threads / parts;
    const long most = (panels + panel_parts - 1) / panel_parts * ((row_tiles + parts - 1) / parts);
    if (parts == 1 || most < least) least = most, row_parts = parts;
  }
  const auto [p0, p1] = part(panels, thread / row_parts, threads / row_parts);
  const auto [t0, t1] = part(row_tiles, thread % row_parts, row_parts);
  return {p0, p1, t0 * kRowsTogether, std::min(rows, t1 * kRowsTogether)};
}

WorkUnits::WorkUnits(int threads, int panels, int rows) : panels_(panels), rows_(rows) {
  constexpr int kMostRows = 256, kMost = 12, kFewest = 4;  // kMost, kFewest: units for each thread
  const auto over = [](int n, int by) { return (n + by - 1) / by; };
  row_parts_ = over(rows, kMostRows);
  panel_parts_ = std::clamp(over(kMost * threads, row_parts_), 1, std::max(1, panels / kFewestPanels));
  // A small matrix: fewer rows, then fewer panels.
  row_parts_ = std::clamp(over(kFewest * threads, panel_parts_), row_parts_, over(rows, kRowsTogether));
  panel_parts_ = std::clamp(over(kFewest * threads, row_parts_), panel_parts_, panels);
}

WorkUnit WorkUnits::operator[](int i) const {
  const auto [p0, p1] = part(panels_, i / row_parts_, panel_parts_);
  const auto [t0, t1] = part((rows_ + kRowsTogether - 1) / kRowsTogether, i % row_parts_, row_parts_);
  return {p0, p1, t0 * kRowsTogether, std::min(rows_, t1 * kRowsTogether)};
}

size_t converted_bytes(const Core& core, const Packed& m, int rows) {
  return core.k.converted_layout(m).bytes * std::max(rows, core.pool.size());
}

bool activations(const Core& core, int thread, const Packed& m, const Tensor& x, int rows, const RowRange& range,
                 const Buffer& scratch, Activations& a) {
  a = {x.row(range.begin), m.inputs, scratch.as(), core.k.converted_layout(m).bytes};
  if (x.is_converted(rows)) {
    a.converted = x.bytes(range.begin);
    return true;
  }
  if (!a.stride) return true;
  if (range.size() == 1) {
    char* own = scratch.as() + thread * a.stride;
    core.k.convert_row(m, a.x, own);
    a.converted = own;
    return true;
  }
  const auto [r0, r1] = part(range.size(), thread, core.pool.size());
  for (int r = r0; r < r1; r++) core.k.convert_row(m, x.row(range.begin + r), scratch.as() + r * a.stride);
  return core.pool.barrier();
}

}  // namespace as
