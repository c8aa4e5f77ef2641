// combine_experts: sums each row's entries times their weights, in ascending order of experts. A rank with some of the
// experts sums over those.
#include <algorithm>

#include "cpu/ops/ops.h"
#include "cpu/ops/routing.h"

namespace as {
namespace {

class CombineExperts : public BoundOp {
 public:
  explicit CombineExperts(const Binding& b)
      : core_(b.core),
        in_(b.parts[0].in()),
        weights_(b.parts[0].in(1)),
        out_(b.parts[0].out()),
        routing_(b.routing(in_.row_set)),
        begin_(routing_.begin),
        end_(routing_.end) {
    for (int i = 0; i < core_.pool.size(); i++) own_.emplace_back(routing_.top);
  }

  void run(const Batch& batch, int thread) override {
    const int rows = out_.rows(batch), threads = core_.pool.size();
    // With few rows, threads divide the columns.
    const auto [r0, r1] = rows < threads ? std::pair<int, int>(0, rows) : part(rows, thread, threads);
    const auto [c0, c1] = rows < threads ? part(out_.width, thread, threads) : std::pair<int, int>(0, out_.width);
    Own& own = own_[thread];
    for (int r = r0; r < r1; r++) {
      int count = 0;
      for (int i = r * routing_.top; i < (r + 1) * routing_.top; i++) {
        if (routing_.chosen[i] < begin_ || routing_.chosen[i] >= end_) continue;
        const int entry = routing_.entry_of[i];
        own.rows[count] = in_.row(entry) + c0, own.weights[count++] = *weights_.row(entry);
      }
      core_.k.weighted_sum(own.rows.data(), own.weights.data(), count, out_.row(r) + c0, c1 - c0);
    }
  }

 private:
  struct Own {  // of a thread
    std::vector<const float*> rows;
    std::vector<float> weights;
    explicit Own(int top) : rows(top), weights(top) {}
  };

  const Core& core_;
  const Tensor in_, weights_, out_;
  const Routing& routing_;
  const int begin_, end_;
  std::vector<Own> own_;
};

}  // namespace

const RegisterCpuOp kCombineExperts({{Op::combine_experts}}, bind_op<CombineExperts>);

}  // namespace as
