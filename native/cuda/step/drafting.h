// Steps with a draft model on the same GPU. Steps do not overlap, because the drafts decide the target model's rows.
// With several ranks each has the whole draft model, and all make the same drafts: two sums a layer would take longer
// than a small model's weights, and ranks would have to agree on every draft.
#pragma once
#include "batch/decoder.h"
#include "cuda/memory/host_spans.h"
#include "cuda/runner.h"

namespace as::cuda {

class Drafting {
 public:
  // All must outlive this. store: null, or the host cache of both models.
  Drafting(CudaRunner& runner, CudaRunner& draft, SpanStore* store, const SlotLimits& limits)
      : runner_(runner), draft_(draft), store_(store), decoder_(runner_, &draft_, store ? &store_ : nullptr, limits) {}

  StepOutput step(const std::string& plan, bool want_logits) { return decoder_.step(plan, want_logits); }
  void set_adapter(int index, bool loaded) { decoder_.set_adapter(index, loaded); }

 private:
  struct Waiting : Runner {
    CudaRunner& runner;
    explicit Waiting(CudaRunner& runner) : runner(runner) {}
    RunOutput run(const Batch& batch, bool want_logits) override {
      runner.begin(batch, want_logits);
      if (batch.rows.empty()) return {};
      runner.sample(batch);
      return runner.finish(batch);
    }
  };
  struct WaitingStore : SpanStore {
    SpanStore* spans_of;
    explicit WaitingStore(SpanStore* store) : spans_of(store) {}
    int spans() const override { return spans_of->spans(); }
    void copy(const std::vector<SpanCopy>& saved, const std::vector<SpanCopy>& restored) override {
      spans_of->copy(saved, restored);
      spans_of->finish();
    }
  };

  Waiting runner_, draft_;
  WaitingStore store_;
  Decoder decoder_;
};

}  // namespace as::cuda
