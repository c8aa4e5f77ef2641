// expert_lora: y += scale * B (A x) for entries of experts whose rows have an adapter, with the adapter's matrices of
// the entry's expert.
//
// Up to kLoraRows entries of one expert and one adapter are multiplied together, all columns by one thread: the
// matrices are small, and threads need not wait for each other. Every value follows the kernels' recipe for its own
// entry, so other entries do not matter. Entries of experts on other ranks are skipped: this rank's part of the adapter
// has no matrices for them.
#include <stdexcept>
#include <string>

#include "cpu/kernels/lora.h"
#include "cpu/ops/lora.h"
#include "cpu/ops/ops.h"
#include "cpu/ops/routing.h"

namespace as {
namespace {

class ExpertLora : public BoundOp {
 public:
  explicit ExpertLora(const Binding& b)
      : core_(b.core),
        k_(lora_kernels()),
        y_(b.parts[0].in(0)),
        x_(b.parts[0].in(1)),
        rows_(y_.of_outputs ? b.adapters->outputs : b.adapters->all),
        routing_(b.routing(y_.row_set)),
        target_(b.parts[0].op.integer("target")),
        experts_(b.parts[0].op.integer("experts")),
        offset_(b.parts[0].op.integer("offset")),
        inner_width_(inner_width(b.adapters->limits)),
        inner_(b.scratch.lora) {
    if (experts_ != routing_.experts)
      throw std::invalid_argument("op expert_lora of " + std::to_string(experts_) + " experts, the router has " +
                                  std::to_string(routing_.experts));
  }

  bool needed(const Batch&) const override {
    for (const AdaptedRows::Group& group : rows_.groups)
      for (int e = 0; e < experts_; e++)
        if (group.adapter->pair(target_ + e)) return true;
    return false;
  }

  void run(const Batch&, int thread) override {
    const int threads = core_.pool.size();
    int number = 0;  // of the next product; threads take them in turn
    for (const AdaptedRows::Group& group : rows_.groups)
      for (int e = 0; e < experts_; e++) {
        const Adapter::Pair* pair = group.adapter->pair(target_ + e);
        if (!pair) continue;
        int entries[kLoraRows], count = 0;
        const auto flush = [&] {
          if (count && number++ % threads == thread) multiply(*pair, entries, count, thread);
          count = 0;
        };
        for (int entry = routing_.first[e]; entry < routing_.first[e + 1]; entry++) {
          if (rows_.of_row[routing_.row_of[entry]] != group.adapter) continue;
          entries[count++] = entry;
          if (count == kLoraRows) flush();
        }
        flush();
      }
  }

 private:
  void multiply(const Adapter::Pair& pair, const int* entries, int count, int thread) const {
    const float* x[kLoraRows];
    float* y[kLoraRows];
    for (int i = 0; i < count; i++) {
      x[i] = x_.row(x_.row_set == y_.row_set ? entries[i] : routing_.row_of[entries[i]]);
      y[i] = y_.row(entries[i]) + offset_;
    }
    float* inner = inner_.as<float>() + (size_t)thread * kLoraRows * inner_width_;
    k_.shrink(pair.a, x, count, pair.scale, inner, inner_width_);
    k_.expand(pair.b, inner, inner_width_, y, count, 0, pair.b.panels());
  }

  const Core& core_;
  const LoraKernels& k_;
  const Tensor y_, x_;
  const AdaptedRows& rows_;
  const Routing& routing_;
  const int target_, experts_, offset_, inner_width_;
  const Buffer& inner_;  // A x of kLoraRows entries for each thread
};

}  // namespace

const RegisterCpuOp kExpertLora({{Op::expert_lora}}, bind_op<ExpertLora>);

}  // namespace as
