// linear and the silu_mul that follows: a panel of gate and one of up give n columns instead of 2n, at once as the next
// linear wants its rows where that is bfloat16.
#include "cpu/ops/ops.h"
#include "cpu/ops/product.h"

namespace as {
namespace {

class LinearSiluMul : public BoundOp {
 public:
  explicit LinearSiluMul(const Binding& b)
      : core_(b.core), m_(b.matrix()), bias_(b.vector(1)), in_(b.in()), out_(b.out()), scratch_(b.scratch) {}

  void run(const Batch& batch, int thread) override {
    const int rows = in_.rows(batch);
    Activations a;
    if (!activations(core_, thread, m_, in_, rows, scratch_, a)) return;
    const auto [p0, p1, r0, r1] = share_of(thread, core_.pool.size(), m_.panels() / 2, rows);
    if (r0 >= r1 || p0 >= p1) return;
    a.x += (size_t)r0 * m_.k, a.prepared += r0 * a.stride;
    GatedOutput to{};
    if (out_.prepared) to.rounded = out_.bytes(r0), to.rounded_stride = out_.prepared;
    else to.y = out_.row(r0), to.ldy = out_.width;
    core_.k.matmul_gated(m_, a, bias_, to, r1 - r0, p0, p1);
  }

 private:
  const Core& core_;
  const Packed m_;
  const float* bias_;
  const Tensor in_, out_;
  const Buffer& scratch_;
};

}  // namespace

std::unique_ptr<BoundOp> bind_linear_silu_mul(const Binding& b) { return std::make_unique<LinearSiluMul>(b); }

}  // namespace as
