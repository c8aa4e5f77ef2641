// linear: y = x w^T + bias. Threads take panels of output features.
#include "cpu/ops/ops.h"
#include "cpu/ops/product.h"

namespace as {
namespace {

class Linear : public BoundOp {
 public:
  explicit Linear(const Binding& b)
      : core_(b.core), m_(b.matrix()), bias_(b.vector(1)), in_(b.in()), out_(b.out()), scratch_(b.scratch) {}

  void run(const Batch& batch, int thread) override {
    multiply(core_, thread, m_, in_, bias_, out_.data, in_.rows(batch), scratch_);
  }

 private:
  const Core& core_;
  const Packed m_;
  const float* bias_;
  const Tensor in_, out_;
  const Buffer& scratch_;
};

}  // namespace

std::unique_ptr<BoundOp> bind_linear(const Binding& b) { return std::make_unique<Linear>(b); }

}  // namespace as
