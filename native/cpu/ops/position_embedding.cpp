// position_embedding: adds to each row those of a table of positions and of a table of segments.
#include <algorithm>

#include "cpu/ops/ops.h"

namespace as {
namespace {

class PositionEmbedding : public BoundOp {
 public:
  explicit PositionEmbedding(const Binding& b)
      : core_(b.core),
        positions_(b.parts[0].vector(0)),
        segments_(b.parts[0].vector(1)),
        offset_(b.parts[0].op.integer("offset")),
        last_(b.parts[0].op.integer("positions") - 1),
        separator_(b.parts[0].op.integer("separator")),
        x_(b.parts[0].in()) {}

  void begin(const Batch& batch) override {
    if (!segments_) return;
    segment_.resize(batch.rows.size());
    for (const Item& item : batch.items) {
      bool second = false;
      for (int r = item.row; r < item.row + item.count; r++) {
        segment_[r] = second;
        second |= batch.rows[r].token == separator_;
      }
    }
  }

  void run(const Batch& batch, int thread) override {
    const auto [r0, r1] = my_rows(core_, x_, batch, thread);
    for (int r = r0; r < r1; r++) {
      const size_t at = std::min(batch.rows[r].position + offset_, last_);
      core_.k.add(x_.row(r), positions_ + at * x_.width, x_.width);
      if (segments_) core_.k.add(x_.row(r), segments_ + (size_t)segment_[r] * x_.width, x_.width);
    }
  }

 private:
  const Core& core_;
  const float *const positions_, *const segments_;  // [positions, width], [2, width]
  const int offset_, last_, separator_;
  const Tensor x_;
  std::vector<char> segment_;  // of each row
};

}  // namespace

const RegisterCpuOp kPositionEmbedding({{Op::position_embedding}}, bind_op<PositionEmbedding>);

}  // namespace as
