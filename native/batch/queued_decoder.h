// From step plans to tokens with a device that works by itself: a step is queued while the one before it is computed.
#pragma once
#include <deque>
#include <string>

#include "batch/decoder.h"

namespace as {

// A program compiled for such a device. Of a step begin(), then draw(), then finish(). The next step's begin() may come
// as soon as draw() has said so; its draw() comes after finish().
class QueuedRunner {
 public:
  virtual ~QueuedRunner() = default;
  // Queues a batch's rows. For an id that the step before draws after output i a row has sampled_after(i).
  virtual void begin(const Batch& batch, bool want_logits) = 0;
  // Queues its draws; false: some are to be drawn on the host, so that no row of the next step may refer to them.
  virtual bool sample(const Batch& batch) = 0;
  // Whether finish() would not wait.
  virtual bool done() const = 0;
  virtual RunOutput finish(const Batch& batch) = 0;
};

class QueuedDecoder {
 public:
  // The runner must outlive the decoder. store: null, or the second tier of its cache, whose copies are queued, too.
  QueuedDecoder(QueuedRunner& runner, SpanStore* store, SlotLimits limits)
      : runner_(runner), store_(store), slots_(std::move(limits)) {}

  // Throws std::invalid_argument, and changes nothing, for a plan that does not follow those before it.
  StepOutput step(const std::string& plan, bool want_logits);
  // The same in parts, as of StepModel.
  bool begin(const std::string& plan, bool want_logits = false);
  void sample();
  bool done() const { return steps_.empty() || steps_.front().batch.rows.empty() || runner_.done(); }
  StepOutput finish();
  // An adapter is loaded, or no longer: rows may name it from now on, or not.
  void set_adapter(int index, bool loaded) { slots_.set_adapter(index, loaded); }

 private:
  struct Step {
    Batch batch;
    bool copies = false;    // of spans
    bool foretold = false;  // its tokens stand in histories already, as sampled_after()
  };

  QueuedRunner& runner_;
  SpanStore* store_;
  Slots slots_;
  std::deque<Step> steps_;  // begun, at most two; the second is not drawn yet
};

}  // namespace as
