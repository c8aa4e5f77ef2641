// keep_hidden: copies rows to the places that the batch names. kept_hidden: from there. concat.
#include <algorithm>

#include "cpu/ops/ops.h"

namespace as {
namespace {

class KeepHidden : public BoundOp {
 public:
  explicit KeepHidden(const Binding& b) : core_(b.core), in_(b.parts[0].in()), states_(b.states) {}

  void run(const Batch& batch, int thread) override {
    const auto [r0, r1] = my_rows(core_, in_, batch, thread);
    for (int r = r0; r < r1; r++)
      if (const int place = batch.keeps[r]; place >= 0)
        std::copy_n(in_.row(r), in_.width, *states_ + (size_t)place * in_.width);
  }

 private:
  const Core& core_;
  const Tensor in_;
  float* const* const states_;
};

class KeptHidden : public BoundOp {
 public:
  explicit KeptHidden(const Binding& b) : core_(b.core), out_(b.parts[0].out()), states_(b.states) {}

  void run(const Batch& batch, int thread) override {
    const auto [r0, r1] = my_rows(core_, out_, batch, thread);
    for (int r = r0; r < r1; r++) std::copy_n(*states_ + (size_t)batch.takes[r] * out_.width, out_.width, out_.row(r));
  }

 private:
  const Core& core_;
  const Tensor out_;
  float* const* const states_;
};

class Concat : public RowOp {
 public:
  explicit Concat(const Binding& b) : core_(b.core), inputs_(b.parts[0].inputs), out_(b.parts[0].out()) {}

  int rows(const Batch& batch) const override { return out_.rows(batch); }

  void run_rows(const Batch& batch, const RowRange& range, int thread) override {
    const auto [r0, r1] = range.of(thread, core_.pool.size());
    for (int r = r0; r < r1; r++) {
      float* rest = out_.row(r);
      for (const Tensor& input : inputs_) rest = std::copy_n(input.row(r), input.width, rest);
    }
  }

 private:
  const Core& core_;
  const std::vector<Tensor> inputs_;
  const Tensor out_;
};

}  // namespace

const RegisterCpuOp kKeepHidden({{Op::keep_hidden}}, bind_op<KeepHidden>);
const RegisterCpuOp kKeptHidden({{Op::kept_hidden}}, bind_op<KeptHidden>);
const RegisterCpuOp kConcat({{Op::concat}}, bind_op<Concat>);

}  // namespace as
