// What makes drafts with a program of its own. It samples with the random numbers that the model will use.
#pragma once
#include <functional>
#include <memory>
#include <vector>

#include "batch/slots.h"

namespace as {

class Drafter {
 public:
  virtual ~Drafter() = default;
  // Before a step: appends drafts to the histories of items that want them. Tokens that a step under way will sample
  // may be unknown yet (sampled_after()), but no item wants drafts then.
  virtual void draft(Slots& slots) = 0;
  // After draft(): says in the model's batch where hidden states are kept.
  virtual void place(Batch&) {}

 protected:
  // A sequence that gets drafts: its slot and how many more it may get.
  struct Sampling {
    int slot, left;
  };
  void clear();
  // Makes an item of the slot's last `count` rows in the batch. samples: the last one has an output. ahead: how many
  // positions beyond its own a row predicts.
  void end_item(int slot, int count, bool samples, int ahead);
  // Runs the batch, whose outputs are those of `sampling` in their order, and appends the tokens to the histories.
  // `sampling` is left with the sequences that may get more drafts.
  void sample(Runner& program, Slots& slots, std::vector<Sampling>& sampling);
  // While sequences may get more drafts: follow(slot) adds the row of the last token of each, and these are run.
  void repeat(Runner& program, Slots& slots, std::vector<Sampling>& sampling, int ahead,
              const std::function<void(int)>& follow);

  Batch batch_;
};

// The drafter of a draft model, or of a draft head's layers. All programs must outlive it.
std::unique_ptr<Drafter> make_drafter(const std::vector<Runner*>& programs, bool is_head, const SlotLimits& limits);

}  // namespace as
