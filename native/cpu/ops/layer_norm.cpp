// layer_norm: each row less its mean, divided by its standard deviation, times a weight, plus a bias.
#include "cpu/ops/ops.h"

namespace as {
namespace {

class LayerNorm : public RowOp {
 public:
  explicit LayerNorm(const Binding& b)
      : core_(b.core),
        weight_(b.parts[0].vector(0)),
        bias_(b.parts[0].vector(1)),
        eps_((float)b.parts[0].op.number("eps")),
        x_(b.parts[0].in()),
        y_(b.parts[0].out()) {}

  int rows(const Batch& batch) const override { return x_.rows(batch); }

  void run_rows(const Batch& batch, const RowRange& range, int thread) override {
    const auto [r0, r1] = range.of(thread, core_.pool.size());
    for (int r = r0; r < r1; r++) core_.k.layer_norm(x_.row(r), weight_, bias_, y_.row(r), x_.width, eps_);
  }

 private:
  const Core& core_;
  const float *const weight_, *const bias_;
  const float eps_;
  const Tensor x_, y_;
};

}  // namespace

const RegisterCpuOp kLayerNorm({{Op::layer_norm}}, bind_op<LayerNorm>);

}  // namespace as
