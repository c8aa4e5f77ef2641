// gated_rms_norm, sigmoid_gate, multiply: rows times gates, one for each value, which may be activated.
#include <cstring>

#include "cpu/ops/ops.h"

namespace as {
namespace {

class GatedRmsNorm : public BoundOp {
 public:
  explicit GatedRmsNorm(const Binding& b)
      : core_(b.core),
        x_(b.parts[0].in()),
        gate_(b.parts[0].in(1)),
        weight_(b.parts[0].vector()),
        head_dim_(b.parts[0].op.integer("head_dim")),
        gate_first_(b.parts[0].op.flag("gate_first")),
        eps_((float)b.parts[0].op.number("eps")),
        gated_(std::strcmp(b.parts[0].op.choice("gate"), "sigmoid") ? b.core.k.silu_mul : b.core.k.sigmoid_mul) {}

  void run(const Batch& batch, int thread) override {
    const auto [r0, r1] = my_rows(core_, x_, batch, thread);
    for (int r = r0; r < r1; r++) {
      float* x = x_.row(r);
      if (gate_first_) gated_(gate_.row(r), x, x, x_.width);
      for (int i = 0; i < x_.width; i += head_dim_)
        core_.k.rms_norm(x + i, weight_ + (gate_first_ ? i : 0), x + i, head_dim_, eps_);
      if (!gate_first_) gated_(gate_.row(r), x, x, x_.width);
    }
  }

 private:
  const Core& core_;
  const Tensor x_, gate_;
  const float* weight_;
  const int head_dim_;
  const bool gate_first_;
  const float eps_;
  void (*gated_)(const float* gate, const float* x, float* y, int n);
};

class SigmoidGate : public BoundOp {
 public:
  explicit SigmoidGate(const Binding& b) : core_(b.core), x_(b.parts[0].in()), gate_(b.parts[0].in(1)) {}

  void run(const Batch& batch, int thread) override {
    const auto [r0, r1] = my_rows(core_, x_, batch, thread);
    for (int r = r0; r < r1; r++) core_.k.sigmoid_mul(gate_.row(r), x_.row(r), x_.row(r), x_.width);
  }

 private:
  const Core& core_;
  const Tensor x_, gate_;
};

class Multiply : public BoundOp {
 public:
  explicit Multiply(const Binding& b)
      : core_(b.core), x_(b.parts[0].in()), y_(b.parts[0].in(1)), offset_(b.parts[0].op.integer("offset")) {}

  void run(const Batch& batch, int thread) override {
    const auto [r0, r1] = my_rows(core_, x_, batch, thread);
    for (int r = r0; r < r1; r++) core_.k.multiply(x_.row(r), y_.row(r) + offset_, 1, x_.width);
  }

 private:
  const Core& core_;
  const Tensor x_, y_;
  const int offset_;
};

}  // namespace

const RegisterCpuOp kGatedRmsNorm({{Op::gated_rms_norm}}, bind_op<GatedRmsNorm>);
const RegisterCpuOp kSigmoidGate({{Op::sigmoid_gate}}, bind_op<SigmoidGate>);
const RegisterCpuOp kMultiply({{Op::multiply}}, bind_op<Multiply>);

}  // namespace as
