// add: x += y.
#include "cpu/ops/ops.h"

namespace as {
namespace {

class Add : public BoundOp {
 public:
  explicit Add(const Binding& b) : core_(b.core), x_(b.in()), y_(b.in(1)) {}

  void run(const Batch& batch, int thread) override {
    const auto [r0, r1] = my_rows(core_, x_, batch, thread);
    if (r1 > r0) core_.k.add(x_.row(r0), y_.row(r0), (size_t)(r1 - r0) * x_.width);
  }

 private:
  const Core& core_;
  const Tensor x_, y_;
};

}  // namespace

std::unique_ptr<BoundOp> bind_add(const Binding& b) { return std::make_unique<Add>(b); }

}  // namespace as
