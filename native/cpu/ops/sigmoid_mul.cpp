// sigmoid_mul: multiplies each row with the sigmoid of its gate.
#include "common/exact.h"
#include "cpu/ops/ops.h"

namespace as {
namespace {

class SigmoidMul : public BoundOp {
 public:
  explicit SigmoidMul(const Binding& b) : core_(b.core), x_(b.parts[0].in()), gate_(b.parts[0].in(1)) {}

  void run(const Batch& batch, int thread) override {
    const auto [r0, r1] = my_rows(core_, x_, batch, thread);
    for (int r = r0; r < r1; r++) {
      const float* x = x_.row(r);
      const float factor = (float)exact::sigmoid(*gate_.row(r));
      core_.k.weighted_sum(&x, &factor, 1, x_.row(r), x_.width);
    }
  }

 private:
  const Core& core_;
  const Tensor x_, gate_;
};

}  // namespace

const RegisterCpuOp kSigmoidMul({{Op::sigmoid_mul}}, bind_op<SigmoidMul>);

}  // namespace as
