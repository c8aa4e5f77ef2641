// all_reduce: adds up the ranks' rows, in rank order. add: x += y. rms_norm: each row at once as the linear wants it
// that reads it. And these in sequence: one thread goes on with a row.
#include "cpu/ops/ops.h"

namespace as {
namespace {

class Sum : public BoundOp {
 public:
  explicit Sum(const Binding& b) : core_(b.core), scratch_(b.scratch) {
    if (const Part* reduce = b.part("all_reduce")) partial_ = x_ = reduce->in();
    if (const Part* add = b.part("add")) x_ = add->in(), addend_ = add->in(1);
    if (const Part* norm = b.part("rms_norm"))
      weight_ = norm->vector(), eps_ = (float)norm->op.number("eps"), x_ = norm->in(), normed_ = norm->out();
  }

  void run(const Batch& batch, int thread) override {
    const int rows = x_.rows(batch), n = x_.width;
    if (partial_.data && core_.window) {
      core_.window->all_reduce(partial_.data, (size_t)rows * n, thread, core_.pool.size());
      if (!addend_.data || !core_.pool.barrier()) return;
    }
    const auto [r0, r1] = part(rows, thread, core_.pool.size());
    for (int r = r0; r < r1; r++) {
      if (addend_.data) core_.k.add(x_.row(r), addend_.row(r), n);
      if (!weight_) continue;
      const Packed* next = normed_.prepared_for;
      float* y = next ? scratch_.row(thread) : normed_.row(r);
      core_.k.rms_norm(x_.row(r), weight_, y, n, eps_);
      if (next) core_.k.prepare(*next, y, normed_.bytes(r));
    }
  }

 private:
  const Core& core_;
  const Scratch& scratch_;
  Tensor partial_, x_, addend_, normed_;
  const float* weight_ = nullptr;
  float eps_ = 0;
};

}  // namespace

std::unique_ptr<BoundOp> bind_sum(const Binding& b) {
  if (b.parts.size() == 1 && b.parts[0].is("all_reduce") && b.core.world == 1) return nullptr;
  return std::make_unique<Sum>(b);
}

}  // namespace as
