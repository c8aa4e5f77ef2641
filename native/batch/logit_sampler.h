// Samples on the host from logits that a device computed and copied there.
#pragma once
#include "batch/batch.h"
#include "batch/masks.h"
#include "program/program.h"

namespace as {

class LogitSampler {
 public:
  virtual ~LogitSampler() = default;
  // Must be called first. op: the program's sample. logits: [max_outputs, width]; sample() reads a batch's logits
  // there. masks: null, or the masks that outputs refer to. All must outlive the sampler's use.
  virtual void attach(const OpNode& op, float* logits, int width, int max_outputs, Masks* masks) = 0;
  // Computes what each output requests; samples[i] is the result of the batch's output i.
  virtual void sample(const Batch& batch, std::vector<SampleOutput>& samples) = 0;
};

}  // namespace as
