// Which positions the recurrent states of slots are at, and the check that a step continues what a slot's page holds
// (docs/decisions/recurrent.md).
#pragma once
#include <stdexcept>
#include <string>
#include <vector>

#include "batch/batch.h"

namespace as {

// The most drafts of an item. So many rows may be computed again with other tokens.
constexpr int kMostDrafts = 64;

class StatePositions {
 public:
  explicit StatePositions(int slots) : held_(slots) {}

  // During a step: the position of the slot's state before the step. Afterwards the ops have advanced it to
  // state_position() of the positions that the step's known tokens reach.
  int position(int slot) const { return held_[slot].state; }

  // Called before the rows of a step. Throws std::invalid_argument if a page does not hold the rows before an item.
  void begin(const Batch& batch) {
    for (const Item& item : batch.items) {
      Held& held = held_.at(item.slot);
      if (item.start == 0) held = {};
      if (item.start < held.accepted || item.start > held.end)
        throw std::invalid_argument("slot " + std::to_string(item.slot) + " has no recurrent state at position " +
                                    std::to_string(item.start));
      if (item.drafts > kMostDrafts)
        throw std::invalid_argument("slot " + std::to_string(item.slot) + " has " + std::to_string(item.drafts) +
                                    " drafts, at most " + std::to_string(kMostDrafts) + " with recurrent layers");
      held.state = state_position(held.accepted);
      held.accepted = item.start + item.count - item.drafts, held.end = item.start + item.count;
    }
  }
  // Between steps: checks that a slot's state is at this position. Throws std::invalid_argument.
  void check(int slot, int position) const {
    if (const int found = state_position(held_.at(slot).accepted); found != position)
      throw std::invalid_argument("slot " + std::to_string(slot) + " has its recurrent state at position " +
                                  std::to_string(found) + ", not " + std::to_string(position));
  }
  // Between steps: the slot's state was replaced by that of this position.
  void loaded(int slot, int position) { held_.at(slot) = {position, position, position}; }

 private:
  struct Held {
    int state = 0, accepted = 0, end = 0;  // rows up to `accepted` are accepted, up to `end` computed
  };
  std::vector<Held> held_;
};

}  // namespace as
