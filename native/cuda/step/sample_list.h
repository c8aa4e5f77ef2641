// The samples that a step computes on the device, in the form that kernels read.
#pragma once
#include <vector>

#include "batch/batch.h"
#include "cuda/kernels/sampling/sample.h"
#include "sampling/processors.h"

namespace as::cuda {

class SampleList {
 public:
  // vocab_size: columns of the logits. max_edits: the most edits of logits in a step.
  SampleList(int vocab_size, size_t max_edits) : vocab_size_(vocab_size), max_edits_(max_edits) {}

  size_t max_edits() const { return max_edits_; }
  void clear() { samples_.clear(), edits_.clear(), parts_ = {}; }
  // Adds the sample that outputs[row] requests. mask: the index of its mask in the step; -1: none. Returns false, and
  // adds nothing, if there are too many edits.
  bool add(const Batch& batch, int row, int mask);

  const std::vector<RowSample>& samples() const { return samples_; }
  const std::vector<Edit>& edits() const { return edits_; }
  const SampleParts& parts() const { return parts_; }

 private:
  const int vocab_size_;
  const size_t max_edits_;
  std::vector<RowSample> samples_;
  std::vector<Edit> edits_;
  SampleParts parts_;
  sampling::Occurrences seen_;
  std::vector<Edit> of_row_[4];  // repetition penalties, other penalties, bans, biases
};

}  // namespace as::cuda
