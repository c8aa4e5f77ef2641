// hidden_states: copies the rows with outputs that requests want, for rank 0 to return. Every rank has all rows.
#include <algorithm>

#include "cpu/ops/ops.h"

namespace as {
namespace {

class HiddenStates : public BoundOp {
 public:
  explicit HiddenStates(const Binding& b) : core_(b.core), in_(b.parts[0].in()), output_(b.output) {}

  bool needed(const Batch& batch) const override { return core_.rank == 0 && wanted(batch) > 0; }

  void begin(const Batch& batch) override {
    output_.hidden.resize((size_t)wanted(batch) * in_.width);
    output_.hidden_width = in_.width;
  }

  void run(const Batch& batch, int thread) override {
    if (thread != 0) return;
    float* to = output_.hidden.data();
    for (const Item& item : batch.items)
      if (item.flags & kHidden) to = std::copy_n(in_.row(item.output), (size_t)rows_of(item) * in_.width, to);
  }

 private:
  static int rows_of(const Item& item) { return item.outputs - item.drafts; }  // drafts may be rejected
  static int wanted(const Batch& batch) {
    int rows = 0;
    for (const Item& item : batch.items)
      if (item.flags & kHidden) rows += rows_of(item);
    return rows;
  }

  const Core& core_;
  const Tensor in_;
  RunOutput& output_;
};

}  // namespace

const RegisterCpuOp kHiddenStates({{Op::hidden_states}}, bind_op<HiddenStates>);

}  // namespace as
