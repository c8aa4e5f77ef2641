// layer_norm: each row less its mean, divided by its standard deviation, times a weight, plus a bias, in place. Sums
// are in float64, in ascending order. Rows are few and short (an indexer's keys), so plain code serves every
// instruction set.
#include <cmath>

#include "cpu/ops/ops.h"

namespace as {
namespace {

class LayerNorm : public BoundOp {
 public:
  explicit LayerNorm(const Binding& b)
      : core_(b.core),
        weight_(b.parts[0].vector(0)),
        bias_(b.parts[0].vector(1)),
        eps_(b.parts[0].op.number("eps")),
        x_(b.parts[0].in()) {}

  void run(const Batch& batch, int thread) override {
    const auto [r0, r1] = my_rows(core_, x_, batch, thread);
    for (int r = r0; r < r1; r++) {
      float* x = x_.row(r);
      double sum = 0, squares = 0;
      for (int i = 0; i < x_.width; i++) sum += x[i];
      const double mean = sum / x_.width;
      for (int i = 0; i < x_.width; i++) squares += (x[i] - mean) * (x[i] - mean);
      const double inverse = 1 / std::sqrt(squares / x_.width + eps_);
      for (int i = 0; i < x_.width; i++) x[i] = (float)((x[i] - mean) * inverse) * weight_[i] + bias_[i];
    }
  }

 private:
  const Core& core_;
  const float *const weight_, *const bias_;
  const double eps_;
  const Tensor x_;
};

}  // namespace

const RegisterCpuOp kLayerNorm({{Op::layer_norm}}, bind_op<LayerNorm>);

}  // namespace as
