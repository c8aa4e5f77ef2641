// spread_columns: output columns are the input's columns that a weight names, or -infinity.
#include <limits>

#include "cpu/ops/ops.h"

namespace as {
namespace {

class SpreadColumns : public BoundOp {
 public:
  explicit SpreadColumns(const Binding& b)
      : core_(b.core), in_(b.parts[0].in()), out_(b.parts[0].out()), columns_(b.parts[0].vector()) {}

  void run(const Batch& batch, int thread) override {
    const auto [begin, end] = part(out_.width, thread, core_.pool.size());
    for (int r = 0; r < out_.rows(batch); r++) {
      const float* in = in_.row(r);
      float* out = out_.row(r);
      for (int i = begin; i < end; i++) {
        const int column = (int)columns_[i];
        out[i] = column >= 0 && column < in_.width ? in[column] : -std::numeric_limits<float>::infinity();
      }
    }
  }

 private:
  const Core& core_;
  const Tensor in_, out_;
  const float* const columns_;
};

}  // namespace

const RegisterCpuOp kSpreadColumns({{Op::spread_columns}}, bind_op<SpreadColumns>);

}  // namespace as
