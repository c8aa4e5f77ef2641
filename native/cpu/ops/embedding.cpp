// embedding: scaled rows of the token embedding; zeros for ids in another rank's part of the vocabulary. given_rows,
// add_given: rows that the plan gives.
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
        given_id_(b.parts[0].op.integer("given_id")),
        scale_((float)b.parts[0].op.number("scale")),
        out_(b.parts[0].out()) {}

  void run(const Batch& batch, int thread) override {
    const auto [r0, r1] = my_rows(core_, out_, batch, thread);
    for (int r = r0; r < r1; r++) {
      const float* given = batch.given_row(r);
      if (given && given_id_ < 0) {  // the first rank's part of the sum over ranks
        if (core_.rank == 0) std::copy_n(given, out_.width, out_.row(r));
        else std::fill_n(out_.row(r), out_.width, 0.0f);
        continue;
      }
      const int64_t id = (int64_t)(given ? given_id_ : batch.rows[r].token) - vocab_begin_;
      if (id < 0 || id >= m_.n) std::fill_n(out_.row(r), m_.inputs, 0.0f);
      else core_.k.read_row(m_, id, out_.row(r));
      if (scale_ != 1) core_.k.scale(out_.row(r), scale_, m_.inputs);
    }
  }

 private:
  const Core& core_;
  const Packed m_;
  const int vocab_begin_, given_id_;
  const float scale_;
  const Tensor out_;
};

class Given : public RowOp {
 public:
  explicit Given(const Binding& b)
      : core_(b.core),
        adds_(b.parts[0].is(Op::add_given)),
        offset_(adds_ ? b.parts[0].op.integer("offset") : 0),
        x_(adds_ ? b.parts[0].in() : b.parts[0].out()) {}

  bool needed(const Batch& batch) const override { return !adds_ || !batch.given.empty(); }

  int rows(const Batch& batch) const override { return x_.rows(batch); }

  void run_rows(const Batch& batch, const RowRange& range, int thread) override {
    const auto [r0, r1] = range.of(thread, core_.pool.size());
    for (int r = r0; r < r1; r++) {
      const float* given = batch.given_row(r);
      if (adds_ && given) core_.k.add(x_.row(r), given + offset_, x_.width);
      else if (given) std::copy_n(given, x_.width, x_.row(r));
      else if (!adds_) std::fill_n(x_.row(r), x_.width, 0.0f);
    }
  }

 private:
  const Core& core_;
  const bool adds_;
  const int offset_;
  const Tensor x_;
};

}  // namespace

const RegisterCpuOp kGivenRows({{Op::given_rows}, {Op::add_given}}, bind_op<Given>);
const RegisterCpuOp kEmbedding({{Op::embedding}}, bind_op<Embedding>);

}  // namespace as
