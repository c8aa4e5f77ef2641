// lora: y += scale * B (A x) for rows with an adapter, for all of the adapter's targets in one linear's columns.
//
// Rows of one adapter are multiplied together. Threads divide the GEMMs with A by adapter, target and rows and, after a
// barrier, those with B by columns. Every value that is added follows the kernels' recipe for its own row, so other
// rows of the step do not matter. Rows without an adapter are not touched.
#include "cpu/ops/lora.h"
#include "cpu/kernels/lora.h"
#include "cpu/ops/ops.h"

namespace as {
namespace {

class Lora : public BoundOp {
 public:
  explicit Lora(const Binding& b)
      : core_(b.core),
        k_(lora_kernels()),
        rows_(b.parts[0].in(1).of_outputs ? b.adapters->outputs : b.adapters->all),
        x_(b.parts[0].in(1)),
        y_(b.parts[0].in(0)),
        inner_width_(inner_width(b.adapters->limits)),
        inner_(b.scratch.lora) {
    for (const Part& part : b.parts) targets_.push_back({part.op.integer("target"), part.op.integer("offset")});
  }

  bool needed(const Batch&) const override {
    for (const AdaptedRows::Group& group : rows_.groups)
      for (const Target& target : targets_)
        if (group.adapter->pair(target.number)) return true;
    return false;
  }

  void begin(const Batch&) override {
    gemms_.clear();
    for (const AdaptedRows::Group& group : rows_.groups)
      for (int t = 0; t < (int)targets_.size(); t++)
        for (int r = 0; group.adapter->pair(targets_[t].number) && r < group.count; r += kLoraRows)
          gemms_.push_back(
              {group.adapter->pair(targets_[t].number), t, group.begin + r, std::min(kLoraRows, group.count - r)});
  }

  void run(const Batch&, int thread) override {
    const auto [begin, end] = part((int)gemms_.size(), thread, core_.pool.size());
    for (int p = begin; p < end; p++) shrink(gemms_[p]);
    if (!core_.pool.barrier()) return;
    for (const AdaptedRows::Group& group : rows_.groups) expand(group, thread);
  }

 private:
  struct Target {
    int number, offset;  // its first column of y
  };
  // Rows of one adapter times one target's A.
  struct Gemm {
    const Adapter::Pair* pair;
    int target, begin, count;
  };

  int ld() const { return inner_width_ * (int)targets_.size(); }
  float* inner(int entry, int target) const {
    return inner_.as<float>() + (size_t)entry * ld() + (size_t)target * inner_width_;
  }

  void shrink(const Gemm& p) const {
    const float* x[kLoraRows];
    for (int i = 0; i < p.count; i++) x[i] = x_.row(rows_.rows[p.begin + i]);
    k_.shrink(p.pair->a, x, p.count, p.pair->scale, inner(p.begin, p.target), ld());
  }

  // Computes this thread's columns of all targets.
  void expand(const AdaptedRows::Group& group, int thread) const {
    long panels = 0, before = 0;
    for (const Target& target : targets_)
      if (const Adapter::Pair* pair = group.adapter->pair(target.number)) panels += pair->b.panels();
    const auto [begin, end] = part(panels, thread, core_.pool.size());
    for (int t = 0; t < (int)targets_.size(); t++) {
      const Adapter::Pair* pair = group.adapter->pair(targets_[t].number);
      if (!pair) continue;
      const int first = (int)std::max<long>(0, begin - before),
                last = (int)std::min<long>(pair->b.panels(), end - before);
      before += pair->b.panels();
      for (int r = 0; first < last && r < group.count; r += kLoraRows) {
        const int count = std::min(kLoraRows, group.count - r);
        float* y[kLoraRows];
        for (int i = 0; i < count; i++) y[i] = y_.row(rows_.rows[group.begin + r + i]) + targets_[t].offset;
        k_.expand(pair->b, inner(group.begin + r, t), ld(), y, count, first, last);
      }
    }
  }

  const Core& core_;
  const LoraKernels& k_;
  const AdaptedRows& rows_;
  const Tensor x_, y_;
  const int inner_width_;
  const Buffer& inner_;  // A x of each entry of rows_ and each target
  std::vector<Target> targets_;
  std::vector<Gemm> gemms_;
};

}  // namespace

int inner_width(const AdapterLimits& limits) {
  const int panel = lora_kernels().a_panel();
  return (limits.max_rank + panel - 1) / panel * panel;
}

size_t lora_bytes(const AdapterLimits& limits, int rows, int targets) {
  return (size_t)rows * targets * inner_width(limits) * sizeof(float);
}

const RegisterCpuOp kLora({{Op::lora}, {Op::lora, Op::lora}, {Op::lora, Op::lora, Op::lora}}, bind_op<Lora>);

}  // namespace as
