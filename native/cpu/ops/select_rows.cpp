// select_rows: the rows with outputs.
#include <algorithm>

#include "cpu/ops/ops.h"

namespace as {
namespace {

class SelectRows : public BoundOp {
 public:
  explicit SelectRows(const Binding& b) : core_(b.core), in_(b.parts[0].in()), out_(b.parts[0].out()) {}

  void run(const Batch& batch, int thread) override {
    const auto [r0, r1] = my_rows(core_, out_, batch, thread);
    for (int r = r0; r < r1; r++) std::copy_n(in_.row(batch.outputs[r].row), in_.width, out_.row(r));
  }

 private:
  const Core& core_;
  const Tensor in_, out_;
};

}  // namespace

const RegisterCpuOp kSelectRows({{Op::select_rows}}, bind_op<SelectRows>);

}  // namespace as
