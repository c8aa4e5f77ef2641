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
  // ahead: how many positions beyond its own a row predicts.
  Drafter(Runner& program, int ahead) : program_(program), ahead_(ahead) {}

  void clear();
  // Makes an item of the slot's last `count` rows in the batch. samples: the last one has an output.
  void end_item(int slot, int count, bool samples);
  // Runs the batch, whose outputs are those of `sampling` in their order, and appends the tokens to the histories.
  // While sequences may get more drafts, follow(slot) adds the row of the last token of each, and these are run.
  void sample(Slots& slots, std::vector<Sampling> sampling, const std::function<void(int)>& follow);

  Runner& program_;
  Batch batch_;

 private:
  const int ahead_;
};

// The drafter of a draft model or a draft head, which must outlive it.
std::unique_ptr<Drafter> make_drafter(Runner& program, bool is_head, const SlotLimits& limits);

}  // namespace as
