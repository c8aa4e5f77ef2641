// What layers with a state keep of each slot's sequence: a page of memory for each slot, and the check that a step
// continues what the page holds.
#pragma once
#include <string>
#include <vector>

#include "batch/batch.h"
#include "cpu/memory.h"

namespace as {

// The most drafts of an item. So many rows may be computed again with other tokens.
constexpr int kMostDrafts = 64;

class SlotPages {
 public:
  SlotPages(int slots, size_t bytes, const char* purpose)
      : bytes_((bytes + 63) / 64 * 64), memory_(bytes_ * slots, purpose), held_(slots) {}

  char* page(int slot) const { return memory_.as() + bytes_ * slot; }

  // Called before the rows of a step. Throws std::invalid_argument if a page does not hold the rows before an item.
  void begin(const Batch& batch) {
    for (const Item& item : batch.items) {
      Held& held = held_.at(item.slot);
      const int first = batch.slot(item.slot).first;
      const std::string name = "slot " + std::to_string(item.slot);
      if (item.start == first ? first > 0 : item.start < held.accepted || item.start > held.end)
        throw std::invalid_argument(name + " has no recurrent state at position " + std::to_string(item.start));
      if (item.drafts > kMostDrafts)
        throw std::invalid_argument(name + " has " + std::to_string(item.drafts) + " drafts, at most " +
                                    std::to_string(kMostDrafts) + " with recurrent layers");
      held = {item.start + item.count - item.drafts, item.start + item.count};
    }
  }

 private:
  struct Held {
    int accepted = 0, end = 0;  // rows up to here are accepted, and computed
  };
  size_t bytes_;
  Buffer memory_;
  std::vector<Held> held_;
};

}  // namespace as
