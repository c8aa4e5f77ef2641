// Draws on the host from logits that a device has computed and copied there.
#pragma once
#include "batch/batch.h"
#include "batch/masks.h"
#include "program/program.h"

namespace as {

class LogitSampler {
 public:
  virtual ~LogitSampler() = default;
  // Before the first draw. op: the program's sample. logits: [max_outputs, width], where every draw() finds those of a
  // batch's outputs. masks: null, or those that draws name. All must outlive the sampler's use.
  virtual void attach(const OpNode& op, float* logits, int width, int max_outputs, Masks* masks) = 0;
  // What is wanted of each output; samples are of the batch's outputs.
  virtual void sample(const Batch& batch, std::vector<SampleOutput>& samples) = 0;
};

}  // namespace as
