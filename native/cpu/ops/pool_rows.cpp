// pool_rows: the first row, the last one or the mean of the rows of each sequence. Means are sums in float64 in the
// order of positions.
#include <algorithm>
#include <string>

#include "cpu/ops/ops.h"

namespace as {
namespace {

class PoolRows : public BoundOp {
 public:
  explicit PoolRows(const Binding& b)
      : core_(b.core),
        mean_(b.parts[0].op.choice("pooling") == std::string("mean")),
        last_(b.parts[0].op.choice("pooling") == std::string("last")),
        in_(b.parts[0].in()),
        out_(b.parts[0].out()) {}

  void run(const Batch& batch, int thread) override {
    const auto [c0, c1] = part(in_.width, thread, core_.pool.size());
    for (const Item& item : batch.items) {
      for (int i = 0; i < item.outputs; i++) {
        float* y = out_.row(item.output + i);
        if (mean_) average(item, c0, c1, y);
        else std::copy(in_.row(row_of(item)) + c0, in_.row(row_of(item)) + c1, y + c0);
      }
    }
  }

 private:
  static constexpr int kColumns = 64;

  int row_of(const Item& item) const { return last_ ? item.row + item.count - 1 : item.row; }

  void average(const Item& item, int c0, int c1, float* y) const {
    for (int begin = c0; begin < c1; begin += kColumns) {
      const int n = std::min(kColumns, c1 - begin);
      double sums[kColumns] = {};
      for (int r = item.row; r < item.row + item.count; r++) {
        const float* x = in_.row(r) + begin;
        for (int c = 0; c < n; c++) sums[c] += x[c];
      }
      for (int c = 0; c < n; c++) y[begin + c] = (float)(sums[c] / item.count);
    }
  }

  const Core& core_;
  const bool mean_, last_;
  const Tensor in_, out_;
};

}  // namespace

const RegisterCpuOp kPoolRows({{Op::pool_rows}}, bind_op<PoolRows>);

}  // namespace as
