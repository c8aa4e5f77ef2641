// rope: rotates some features of each head in a range by a rotary table's angles, in place.
#include "cpu/ops/ops.h"

namespace as {
namespace {

class Rope : public BoundOp {
 public:
  explicit Rope(const Binding& b)
      : core_(b.core),
        table_(rotary_table(b, b.parts[0].op.integer("table"))),
        rotate_(rotation(b, b.parts[0].op)),
        offset_(b.parts[0].op.integer("offset") + b.parts[0].op.integer("skip")),
        heads_(b.parts[0].op.integer("heads")),
        head_dim_(b.parts[0].op.integer("head_dim")),
        inverse_(b.parts[0].op.flag("inverse")),
        x_(b.parts[0].in()) {}

  void run(const Batch& batch, int thread) override {
    const int half = table_->half;
    const auto [r0, r1] = my_rows(core_, x_, batch, thread);
    std::vector<float> negated(inverse_ ? half : 0);
    for (int r = r0; r < r1; r++) {
      const float* sine = table_->sine.data() + (size_t)r * half;
      if (inverse_) {
        for (int i = 0; i < half; i++) negated[i] = -sine[i];
        sine = negated.data();
      }
      for (int h = 0; h < heads_; h++)
        rotate_(x_.row(r) + offset_ + (size_t)h * head_dim_, table_->cosine.data() + (size_t)r * half, sine, half);
    }
  }

 private:
  const Core& core_;
  const std::shared_ptr<RotaryTable> table_;
  const Rotation rotate_;
  const int offset_, heads_, head_dim_;
  const bool inverse_;
  const Tensor x_;
};

}  // namespace

Rotation rotation(const Binding& b, const OpNode& rope) {
  return std::string(rope.choice("pairs")) == "interleaved" ? b.core.k.rope_interleaved : b.core.k.rope;
}

const RegisterCpuOp kRope({{Op::rope}}, bind_op<Rope>);

}  // namespace as
