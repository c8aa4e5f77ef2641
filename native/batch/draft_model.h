// Drafts of a smaller model (Leviathan et al., "Fast inference from transformers via speculative decoding", 2023). It
// samples with the random numbers that the large model will use, so drafts are often right even at high temperatures.
#pragma once
#include "batch/drafter.h"

namespace as {

class DraftModel : public Drafter {
 public:
  // max_rows: the most rows of one run.
  DraftModel(Runner& model, int max_rows) : model_(model), max_rows_(max_rows) {}
  // Computes the positions that the model's cache lacks, then appends drafts to the histories of items that want them.
  // Slots whose missing positions do not fit one run get no drafts.
  void draft(Slots& slots) override;

 private:
  Runner& model_;
  const int max_rows_;
};

}  // namespace as
