// scale, clamp, standardize, soft_cap, activate, relu_square: in place, value by value.
#include <cstring>

#include "cpu/ops/ops.h"

namespace as {
namespace {

class ByValue : public BoundOp {
 public:
  explicit ByValue(const Binding& b)
      : core_(b.core),
        caps_(b.parts[0].is(Op::soft_cap)),
        number_((float)b.parts[0].op.number(caps_ ? "cap" : "factor") *
                (b.parts[0].op.weights.empty() ? 1.0f : *b.parts[0].vector())),
        x_(b.parts[0].in()) {}

  void run(const Batch& batch, int thread) override {
    const auto [begin, end] = part((int64_t)x_.rows(batch) * x_.width, thread, core_.pool.size());
    if (caps_) core_.k.soft_cap(x_.data + begin, 1, number_, end - begin);
    else core_.k.scale(x_.data + begin, number_, end - begin);
  }

 private:
  const Core& core_;
  const bool caps_;
  const float number_;
  const Tensor x_;
};

Activation activation_of(const OpNode& op) {
  const char* name = op.choice("function");
  for (auto [known, function] : {std::pair{"gelu", Activation::gelu},
                                 {"gelu_tanh", Activation::gelu_tanh},
                                 {"silu", Activation::silu},
                                 {"tanh", Activation::tanh},
                                 {"quick_gelu", Activation::quick_gelu}})
    if (!std::strcmp(name, known)) return function;
  return Activation::relu;
}

class Activate : public RowOp {
 public:
  explicit Activate(const Binding& b) : core_(b.core), function_(activation_of(b.parts[0].op)), x_(b.parts[0].in()) {}

  int rows(const Batch& batch) const override { return x_.rows(batch); }

  void run_rows(const Batch& batch, const RowRange& range, int thread) override {
    const auto [begin, end] = part((int64_t)range.size() * x_.width, thread, core_.pool.size());
    core_.k.activate(function_, x_.row(range.begin) + begin, end - begin);
  }

 private:
  const Core& core_;
  const Activation function_;
  const Tensor x_;
};

class Clamp : public RowOp {
 public:
  explicit Clamp(const Binding& b)
      : core_(b.core), low_(*b.parts[0].vector(0)), high_(*b.parts[0].vector(1)), x_(b.parts[0].in()) {}

  int rows(const Batch& batch) const override { return x_.rows(batch); }

  void run_rows(const Batch&, const RowRange& range, int thread) override {
    const auto [begin, end] = part((int64_t)range.size() * x_.width, thread, core_.pool.size());
    float* const values = x_.row(range.begin);
    for (int64_t i = begin; i < end; i++)  // NaN stays
      values[i] = values[i] < low_ ? low_ : values[i] > high_ ? high_ : values[i];
  }

 private:
  const Core& core_;
  const float low_, high_;
  const Tensor x_;
};

class Standardize : public RowOp {
 public:
  explicit Standardize(const Binding& b)
      : core_(b.core), shift_(b.parts[0].vector(0)), factor_(b.parts[0].vector(1)), x_(b.parts[0].in()) {}

  int rows(const Batch& batch) const override { return x_.rows(batch); }

  void run_rows(const Batch&, const RowRange& range, int thread) override {
    const auto [r0, r1] = range.of(thread, core_.pool.size());
    for (int r = r0; r < r1; r++) {
      float* x = x_.row(r);
      for (int i = 0; i < x_.width; i++) x[i] = (x[i] - shift_[i]) * factor_[i];
    }
  }

 private:
  const Core& core_;
  const float *const shift_, *const factor_;
  const Tensor x_;
};

class ReluSquare : public BoundOp {
 public:
  explicit ReluSquare(const Binding& b) : core_(b.core), x_(b.parts[0].in()) {}

  void run(const Batch& batch, int thread) override {
    const auto [begin, end] = part((int64_t)x_.rows(batch) * x_.width, thread, core_.pool.size());
    for (int64_t i = begin; i < end; i++) {
      const float positive = x_.data[i] < 0 ? 0 : x_.data[i];  // NaN stays
      x_.data[i] = positive * positive;
    }
  }

 private:
  const Core& core_;
  const Tensor x_;
};

}  // namespace

const RegisterCpuOp kActivate({{Op::activate}}, bind_op<Activate>);
const RegisterCpuOp kClamp({{Op::clamp}}, bind_op<Clamp>);
const RegisterCpuOp kStandardize({{Op::standardize}}, bind_op<Standardize>);
const RegisterCpuOp kReluSquare({{Op::relu_square}}, bind_op<ReluSquare>);
const RegisterCpuOp kByValue({{Op::scale}, {Op::soft_cap}}, bind_op<ByValue>);

}  // namespace as
