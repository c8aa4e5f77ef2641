// head_norm: RMS norm of each head in a range, in place.
#include "cpu/ops/ops.h"

namespace as {
namespace {

class HeadNorm : public BoundOp {
 public:
  explicit HeadNorm(const Binding& b)
      : core_(b.core),
        weight_(norm_weight(b.parts[0])),
        eps_((float)b.parts[0].op.number("eps")),
        offset_(b.parts[0].op.integer("offset")),
        heads_(b.parts[0].op.integer("heads")),
        head_dim_(b.parts[0].op.integer("head_dim")),
        x_(b.parts[0].in()) {}

  void run(const Batch& batch, int thread) override {
    const auto [r0, r1] = my_rows(core_, x_, batch, thread);
    for (int r = r0; r < r1; r++)
      for (int h = 0; h < heads_; h++) {
        float* x = x_.row(r) + offset_ + (size_t)h * head_dim_;
        core_.k.rms_norm(x, weight_.data(), x, head_dim_, eps_);
      }
  }

 private:
  const Core& core_;
  const std::vector<float> weight_;
  const float eps_;
  const int offset_, heads_, head_dim_;
  const Tensor x_;
};

}  // namespace

std::vector<float> norm_weight(const Part& norm) {
  std::vector<float> weight = norm.weights.vector(norm.op.weights[0]);
  if (norm.op.flag("unit_offset"))
    for (float& w : weight) w += 1;
  return weight;
}

const RegisterCpuOp kHeadNorm({{Op::head_norm}}, bind_op<HeadNorm>);

}  // namespace as
