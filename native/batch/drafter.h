// What makes drafts with a program of its own.
#pragma once
#include "batch/slots.h"

namespace as {

class Drafter {
 public:
  virtual ~Drafter() = default;
  // Before a step: appends drafts to the histories of items that want them.
  virtual void draft(Slots& slots) = 0;
  // After the model has computed a batch, before its samples are accepted.
  virtual void computed(const Batch&) {}
};

}  // namespace as
