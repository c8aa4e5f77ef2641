// merge_rows: one row for each few adjacent rows of a sequence. Means are sums in float64 in the order of rows.
#include <algorithm>
#include <string>

#include "cpu/ops/ops.h"

namespace as {
namespace {

class MergeRows : public RowOp {
 public:
  explicit MergeRows(const Binding& b)
      : core_(b.core),
        count_(b.parts[0].op.integer("count")),
        mean_(b.parts[0].op.choice("how") == std::string("mean")),
        interleave_(b.parts[0].op.choice("how") == std::string("interleave")),
        in_(b.parts[0].in()),
        out_(b.parts[0].out()) {}

  int rows(const Batch& batch) const override { return out_.rows(batch); }

  void run_rows(const Batch& batch, const RowRange& range, int thread) override {
    const auto [r0, r1] = range.of(thread, core_.pool.size());
    for (const Item& item : batch.items)
      for (int r = std::max(r0, item.output); r < std::min(r1, item.output + item.outputs); r++)
        merge(item.row + (r - item.output) * count_, out_.row(r));
  }

 private:
  void merge(int first, float* y) const {
    if (mean_) {
      for (int c = 0; c < in_.width; c++) {
        double sum = 0;
        for (int i = 0; i < count_; i++) sum += in_.row(first + i)[c];
        y[c] = (float)(sum / count_);
      }
      return;
    }
    for (int i = 0; i < count_; i++) {
      const float* x = in_.row(first + i);
      if (!interleave_) std::copy_n(x, in_.width, y + (size_t)i * in_.width);
      else
        for (int c = 0; c < in_.width; c++) y[(size_t)c * count_ + i] = x[c];
    }
  }

  const Core& core_;
  const int count_;
  const bool mean_, interleave_;
  const Tensor in_, out_;
};

}  // namespace

const RegisterCpuOp kMergeRows({{Op::merge_rows}}, bind_op<MergeRows>);

}  // namespace as
