// all_reduce: sums the ranks' rows in rank order. add: x += y. rms_norm: norms each row into the format of the linear
// that reads it. In sequences of these, one thread runs all ops of a row.
//
// Ranks divide the rows of a sum. Each sums its own rows, adds them to its part of x, norms them, and sends the others
// what they need. So a rank's x holds only its own rows as long as only such sums read it. With fewer rows than ranks,
// every rank computes everything, which takes one exchange instead of two.
//
// In shares of a sum ranks divide each share's rows. Those of the next sum may be others, so every rank gets all of x.
#include "cpu/ops/ops.h"

namespace as {
namespace {

class Sum : public RowOp {
 public:
  explicit Sum(const Binding& b) : core_(b.core), scratch_(b.scratch), feeds_sum_(b.feeds_sum) {
    if (const Part* reduce = b.part(Op::all_reduce)) partial_ = x_ = reduce->in();
    if (const Part* add = b.part(Op::add)) x_ = add->in(), addend_ = add->in(1);
    if (const Part* norm = b.part(Op::rms_norm))
      weight_ = norm_weight(*norm), eps_ = (float)norm->op.number("eps"), x_ = norm->in(), normed_ = norm->out();
  }

  int rows(const Batch& batch) const override { return x_.rows(batch); }
  void run(const Batch& batch, int thread) override { sum({0, rows(batch)}, feeds_sum_, thread); }
  void run_rows(const Batch&, const RowRange& range, int thread) override { sum(range, false, thread); }

 private:
  // only_own: nobody needs other rows of x than a rank's own.
  void sum(const RowRange& range, bool only_own, int thread) {
    const int first = range.begin, rows = range.size(), threads = core_.pool.size();
    Communicator* peers = partial_.data ? core_.peers : nullptr;
    if (peers && !addend_.data) return peers->all_reduce(x_.row(first), (size_t)rows * x_.width, thread, threads);
    if (!peers || rows < peers->size()) {
      if (peers) {
        peers->all_reduce(partial_.row(first), (size_t)rows * x_.width, thread, threads);
        if (!core_.pool.barrier()) return;
      }
      return go_on(first, first + rows, thread);
    }
    peers->reduce_scatter_rows(partial_.row(first), rows, x_.width, thread, threads);
    if (!core_.pool.barrier()) return;
    const auto [r0, r1] = peers->rows_of(rows, core_.rank);
    core_.pool.guard([&, r0 = first + (int)r0, r1 = first + (int)r1] { go_on(r0, r1, thread); });
    if (!core_.pool.barrier()) return;
    if (!weight_.empty() && normed_.converted_for)
      peers->all_gather_rows(normed_.bytes(first), rows, normed_.converted, thread, threads);
    else if (!weight_.empty())
      peers->all_gather_rows(normed_.row(first), rows, x_.width * sizeof(float), thread, threads);
    if (weight_.empty() || !only_own)
      peers->all_gather_rows(x_.row(first), rows, x_.width * sizeof(float), thread, threads);
  }

  // Adds and norms this thread's part of rows [begin, end).
  void go_on(int begin, int end, int thread) {
    const int n = x_.width;
    const auto [r0, r1] = part(end - begin, thread, core_.pool.size());
    for (int r = begin + r0; r < begin + r1; r++) {
      if (addend_.data) core_.k.add(x_.row(r), addend_.row(r), n);
      if (weight_.empty()) continue;
      const Packed* next = normed_.converted_for;
      float* y = next ? scratch_.row(thread) : normed_.row(r);
      core_.k.rms_norm(x_.row(r), weight_.data(), y, n, eps_);
      if (next) core_.k.convert_row(*next, y, normed_.bytes(r));
    }
  }

  const Core& core_;
  const Scratch& scratch_;
  const bool feeds_sum_;
  Tensor partial_, x_, addend_, normed_;
  std::vector<float> weight_;
  float eps_ = 0;
};

}  // namespace

static std::unique_ptr<BoundOp> bind_sum(const Binding& b) {
  if (b.parts.size() == 1 && b.parts[0].is(Op::all_reduce) && b.core.world == 1) return nullptr;
  return std::make_unique<Sum>(b);
}

const RegisterCpuOp kSum({{Op::add},
                          {Op::add, Op::rms_norm},
                          {Op::all_reduce},
                          {Op::all_reduce, Op::add},
                          {Op::all_reduce, Op::add, Op::rms_norm},
                          {Op::rms_norm}},
                         bind_sum);

}  // namespace as
