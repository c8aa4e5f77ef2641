// embedding: scaled rows of the token embedding; zeros for ids in another rank's part of the vocabulary.
#include <algorithm>

#include "cpu/ops/ops.h"

namespace as {
namespace {

class Embedding : public BoundOp {
 public:
  explicit Embedding(const Binding& b)
      : core_(b.core),
        m_(b.parts[0].matrix()),
        vocab_begin_(b.parts[0].op.integer("vocab_begin")),
        scale_((float)b.parts[0].op.number("scale")),
        out_(b.parts[0].out()) {}

  void run(const Batch& batch, int thread) override {
    const auto [r0, r1] = my_rows(core_, out_, batch, thread);
    for (int r = r0; r < r1; r++) {
      const int64_t id = (int64_t)batch.rows[r].token - vocab_begin_;
      if (id < 0 || id >= m_.n) std::fill_n(out_.row(r), m_.inputs, 0.0f);
      else core_.k.read_row(m_, id, out_.row(r));
      if (scale_ != 1) core_.k.scale(out_.row(r), scale_, m_.inputs);
    }
  }

 private:
  const Core& core_;
  const Packed m_;
  const int vocab_begin_;
  const float scale_;
  const Tensor out_;
};

}  // namespace

const RegisterCpuOp kEmbedding({{Op::embedding}}, bind_op<Embedding>);

}  // namespace as
