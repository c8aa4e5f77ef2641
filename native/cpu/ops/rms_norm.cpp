// rms_norm, alone or after an add to its input; each row at once as the linear wants it that reads it.
#include "cpu/ops/ops.h"

namespace as {
namespace {

class RmsNorm : public BoundOp {
 public:
  // addend: what is added to x first, or null.
  RmsNorm(const Binding& b, const Tensor* addend, const Tensor& out)
      : core_(b.core),
        weight_(b.vector()),
        eps_((float)b.op.number("eps")),
        x_(b.in()),
        addend_(addend ? *addend : Tensor{}),
        out_(out),
        next_(out.prepared_for) {
    // Some formats need no floats: then a row of each thread is enough.
    if (next_ && (next_->pairs || next_->planes))
      rows_ = Buffer((size_t)core_.pool.size() * x_.width * sizeof(float), "norms");
  }

  void run(const Batch& batch, int thread) override {
    const int n = x_.width;
    const auto [r0, r1] = my_rows(core_, x_, batch, thread);
    for (int r = r0; r < r1; r++) {
      if (addend_.data) core_.k.add(x_.row(r), addend_.row(r), n);
      float* y = rows_.size() ? rows_.as<float>() + (size_t)thread * n : out_.row(r);
      core_.k.rms_norm(x_.row(r), weight_, y, n, eps_);
      if (next_) core_.k.prepare(*next_, y, out_.bytes(r));
    }
  }

 private:
  const Core& core_;
  const float* weight_;
  const float eps_;
  const Tensor x_, addend_, out_;
  const Packed* next_;
  Buffer rows_;
};

}  // namespace

std::unique_ptr<BoundOp> bind_rms_norm(const Binding& b) { return std::make_unique<RmsNorm>(b, nullptr, b.out()); }

// x += y; normed = rms_norm(x): outputs x and normed.
std::unique_ptr<BoundOp> bind_add_rms_norm(const Binding& b) {
  return std::make_unique<RmsNorm>(b, &b.in(1), b.out(1));
}

}  // namespace as
