// Drafts of a smaller model (Leviathan et al., "Fast inference from transformers via speculative decoding", 2023),
// which draws as the large one will: from the same random numbers. So it is often right also where tokens are not the
// likeliest ones.
#pragma once
#include "batch/slots.h"

namespace as {

class DraftModel {
 public:
  // max_rows: of one run.
  DraftModel(Runner& runner, int max_rows) : runner_(runner), max_rows_(max_rows) {}
  // Brings the model's cache up to what the items' slots hold, and appends to the histories of those that want them as
  // many drafts as they may have. Slots that it lags behind get none.
  void draft(Slots& slots);

 private:
  Runner& runner_;
  const int max_rows_;
  Batch batch_;
};

}  // namespace as
