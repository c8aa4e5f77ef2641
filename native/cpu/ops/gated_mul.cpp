// silu_mul, gelu_tanh_mul, gelu_mul, clamped_silu_mul, limited_silu_mul: activation(gate) * up, of rows [gate | up].
#include <algorithm>

#include "cpu/ops/ops.h"

namespace as {
namespace {

class GatedMul : public RowOp {
 public:
  explicit GatedMul(const Binding& b)
      : core_(b.core),
        multiply_(b.parts[0].is(Op::gelu_mul)        ? b.core.k.gelu_mul
                  : b.parts[0].is(Op::gelu_tanh_mul) ? b.core.k.gelu_tanh_mul
                                                     : b.core.k.silu_mul),
        in_(b.parts[0].in()),
        out_(b.parts[0].out()) {
    const OpNode& op = b.parts[0].op;
    if (op.is(Op::clamped_silu_mul))
      clamped_ = true, alpha_ = (float)op.number("alpha"), limit_ = (float)op.number("limit");
    if (op.is(Op::limited_silu_mul)) limited_ = true, limit_ = (float)op.number("limit");
  }

  int rows(const Batch& batch) const override { return out_.rows(batch); }

  void run_rows(const Batch& batch, const RowRange& range, int thread) override {
    const int n = out_.width;
    const bool one = range.size() == 1;
    const auto [c0, c1] = one ? part(n, thread, core_.pool.size()) : std::pair<int, int>(0, n);
    const auto [r0, r1] = one ? range : range.of(thread, core_.pool.size());
    for (int r = r0; r < r1; r++) {
      const float *gate = in_.row(r) + c0, *up = gate + n;
      float* y = out_.row(r) + c0;
      if (clamped_) core_.k.clamped_silu_mul(gate, up, y, c1 - c0, alpha_, limit_);
      else if (limited_) multiply_limited(gate, up, y, c1 - c0);
      else multiply_(gate, up, y, c1 - c0);
    }
  }

 private:
  void multiply_limited(const float* gate, const float* up, float* y, int n) const {
    constexpr int kColumns = 256;
    float g[kColumns], u[kColumns];
    for (int c = 0; c < n; c += kColumns) {
      const int count = std::min(kColumns, n - c);
      for (int i = 0; i < count; i++) {  // NaN stays
        g[i] = gate[c + i] > limit_ ? limit_ : gate[c + i];
        u[i] = up[c + i] > limit_ ? limit_ : up[c + i] < -limit_ ? -limit_ : up[c + i];
      }
      multiply_(g, u, y + c, count);
    }
  }

  const Core& core_;
  void (*const multiply_)(const float* gate, const float* up, float* y, int n);
  const Tensor in_, out_;
  bool clamped_ = false, limited_ = false;
  float alpha_ = 0, limit_ = 0;
};

}  // namespace

const RegisterCpuOp kGatedMul(
    {{Op::clamped_silu_mul}, {Op::gelu_mul}, {Op::gelu_tanh_mul}, {Op::silu_mul}, {Op::limited_silu_mul}},
    bind_op<GatedMul>);

}  // namespace as
