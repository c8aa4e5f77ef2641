// silu_mul: silu(gate) * up of rows [gate | up].
#include "cpu/ops/ops.h"

namespace as {
namespace {

class SiluMul : public BoundOp {
 public:
  explicit SiluMul(const Binding& b) : core_(b.core), in_(b.parts[0].in()), out_(b.parts[0].out()) {}

  void run(const Batch& batch, int thread) override {
    const int n = out_.width, rows = out_.rows(batch);
    const auto [c0, c1] = rows == 1 ? part(n, thread, core_.pool.size()) : std::pair<int, int>(0, n);
    const auto [r0, r1] = rows == 1 ? std::pair<int, int>(0, 1) : part(rows, thread, core_.pool.size());
    for (int r = r0; r < r1; r++) {
      const float* gate = in_.row(r);
      core_.k.silu_mul(gate + c0, gate + n + c0, out_.row(r) + c0, c1 - c0);
    }
  }

 private:
  const Core& core_;
  const Tensor in_, out_;
};

}  // namespace

std::unique_ptr<BoundOp> bind_silu_mul(const Binding& b) { return std::make_unique<SiluMul>(b); }

}  // namespace as
