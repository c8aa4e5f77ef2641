// Runs step plans on an asynchronous device: queues a step while the previous one is computed.
#pragma once
#include <deque>
#include <stdexcept>
#include <string>

#include "batch/decoder.h"

namespace as {

// A program compiled for such a device. A step calls begin(), sample(), finish() in this order. The next step's begin()
// may follow a sample() that returned true; its sample() must follow this step's finish().
class QueuedRunner {
 public:
  virtual ~QueuedRunner() = default;
  // Queues a batch's copies of states, then its rows. Nothing else is called for a batch without rows. A row has the id
  // sampled_after(i) if the previous step samples its id from output i.
  virtual void begin(const Batch& batch, bool want_logits) = 0;
  // In place of begin(): queues a part of the program for a batch; see Runner::run_part() and positions().
  virtual void begin_part(const Batch&, int /*from*/, int /*to*/) {
    throw std::invalid_argument("this backend does not run a step's ops in parts");
  }
  virtual int positions() const { return 0; }
  // Queues sampling. Returns false if the host samples some rows; then the next step's rows may not refer to those.
  virtual bool sample(const Batch& batch) = 0;
  // Returns whether finish() would return without waiting.
  virtual bool done() const = 0;
  virtual RunOutput finish(const Batch& batch) = 0;
};

// A drafter's program on such a device.
class DraftRunner : public Runner {
 public:
  explicit DraftRunner(QueuedRunner& runner) : runner_(runner) {}
  // Waits for the samples, if there are any.
  RunOutput run(const Batch& batch, bool want_logits) override;

 private:
  QueuedRunner& runner_;
  int queued_ = 0;  // runs since the latest one that was waited for
};

class QueuedDecoder {
 public:
  // The runner must outlive the decoder. drafter: null, or as in Decoder; it waits for the drafts that it makes, and
  // queues all else. A step with drafts begins when no other one is unfinished, because drafts follow the sequences'
  // latest tokens; steps without drafts are queued. store: null, or the second tier of the caches, whose copies are
  // queued, too.
  QueuedDecoder(QueuedRunner& runner, std::unique_ptr<Drafter> drafter, SpanStore* store, SlotLimits limits)
      : runner_(runner), store_(store), slots_(std::move(limits)), drafter_(std::move(drafter)) {}

  // Throws std::invalid_argument, and changes nothing, if the plan does not follow the previous ones.
  StepOutput step(std::string_view plan, bool want_logits);
  // The parts of a step, as in StepModel.
  bool begin(std::string_view plan, bool want_logits = false);
  void sample();
  bool done() const { return steps_.empty() || !steps_.front().runs() || runner_.done(); }
  StepOutput finish();
  // Sets whether an adapter is loaded. Rows may use loaded adapters only.
  void set_adapter(int index, bool loaded) { slots_.set_adapter(index, loaded); }

 private:
  struct Step {
    Batch batch;
    bool copies = false;    // whether the plan copies spans
    bool foretold = false;  // whether histories hold sampled_after() in place of the step's tokens
    bool part = false;      // of a step that runs in parts; only the last one has the batch

    bool runs() const { return part || !batch.rows.empty(); }
  };

  bool begin_part(Plan& plan);

  QueuedRunner& runner_;
  SpanStore* store_;
  Slots slots_;
  const std::unique_ptr<Drafter> drafter_;
  std::deque<Step> steps_;  // begun steps, at most two; the second one has not sampled yet
  // Of a step that runs in parts: its batch, and where the next one begins; 0: none is under way.
  Batch batch_;
  int next_part_ = 0;
};

}  // namespace as
