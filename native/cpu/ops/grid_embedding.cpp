// grid_embedding: adds rows of a square table of positions, interpolated bilinearly for the size of the image:
// Qwen3-VL's fast_pos_embed_interpolate. A table as large as the image is added as it is. axes: two rows, of tables of
// columns and rows of patches (Gemma 4).
#include <algorithm>

#include "cpu/ops/ops.h"

namespace as {
namespace {

class GridEmbedding : public RowOp {
 public:
  explicit GridEmbedding(const Binding& b)
      : core_(b.core),
        table_(b.parts[0].vector()),
        side_(b.parts[0].op.integer("side")),
        axes_(b.parts[0].op.flag("axes")),
        x_(b.parts[0].in()) {}

  void begin(const Batch& batch) override {
    sizes_.clear();
    if (axes_) return;
    for (const Item& item : batch.items) {
      Size size{1, 1};
      for (int p = item.start; p < item.start + item.count; p++) {
        const Slot& slot = batch.slot(item.slot);
        size.height = std::max(size.height, slot.rotary_position(p, 1) + 1);
        size.width = std::max(size.width, slot.rotary_position(p, 2) + 1);
      }
      sizes_.insert(sizes_.end(), item.count, size);
    }
  }

  int rows(const Batch& batch) const override { return x_.rows(batch); }

  void run_rows(const Batch& batch, const RowRange& range, int thread) override {
    const auto [r0, r1] = range.of(thread, core_.pool.size());
    for (int r = r0; r < r1; r++) {
      const Row& row = batch.rows[r];
      const Slot& slot = batch.slot(row.slot);
      if (axes_) {
        const float* a = at(0, std::min(slot.rotary_position(row.position, 2), side_ - 1));
        const float* b = at(1, std::min(slot.rotary_position(row.position, 1), side_ - 1));
        for (int i = 0; i < x_.width; i++) x_.row(r)[i] += a[i] + b[i];
        continue;
      }
      const Place y = place(slot.rotary_position(row.position, 1), sizes_[r].height),
                  x = place(slot.rotary_position(row.position, 2), sizes_[r].width);
      const float *a = at(y.low, x.low), *b = at(y.low, x.high), *c = at(y.high, x.low), *d = at(y.high, x.high);
      const float wa = (1 - y.part) * (1 - x.part), wb = (1 - y.part) * x.part, wc = y.part * (1 - x.part),
                  wd = y.part * x.part;
      float* to = x_.row(r);
      for (int i = 0; i < x_.width; i++) to[i] += ((a[i] * wa + b[i] * wb) + c[i] * wc) + d[i] * wd;
    }
  }

 private:
  struct Size {
    int height, width;
  };
  // Between two rows or columns of the table: how far beyond the lower one.
  struct Place {
    int low, high;
    float part;
  };

  // As torch.linspace(0, side - 1, count)[i] in single precision, which counts from the nearer end.
  Place place(int i, int count) const {
    const float last = (float)(side_ - 1), step = count > 1 ? last / (float)(count - 1) : 0;
    const float at = i < count / 2 || count == 1 ? step * (float)i : last - step * (float)(count - 1 - i);
    const int low = std::clamp((int)at, 0, side_ - 1);
    return {low, std::min(low + 1, side_ - 1), at - (float)low};
  }
  const float* at(int y, int x) const { return table_ + ((size_t)y * side_ + x) * x_.width; }

  const Core& core_;
  const float* const table_;  // [side, side, width], or [2, side, width]
  const int side_;
  const bool axes_;
  const Tensor x_;
  std::vector<Size> sizes_;  // of each row's image
};

}  // namespace

const RegisterCpuOp kGridEmbedding({{Op::grid_embedding}}, bind_op<GridEmbedding>);

}  // namespace as
