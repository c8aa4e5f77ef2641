#include "batch/draft_head.h"

#include <algorithm>
#include <utility>

namespace as {

void DraftHead::place(Batch& batch) {
  batch.keeps.clear();
  for (const Item& item : batch.items) {
    Unread& unread = unread_[item.slot];
    const int64_t sequence = batch.slot(item.slot).sequence;
    if (unread.sequence != sequence) unread.sequence = sequence, unread.first = item.start;
    unread.start = item.start, unread.end = item.start + item.count, unread.row = item.row - item.start;
    unread.ringed = std::max(item.start, unread.end - kLast);
    for (int p = item.start; p < unread.end; p++) batch.keeps.push_back(place_of(item.slot, p));
  }
}

// Decides which rows to compute.
void DraftHead::plan(Slots& slots) {
  parts_.clear();
  coming_.assign(unread_.size(), nullptr);
  for (const Slots::Pending& item : slots.pending()) coming_[item.slot] = &item;
  for (int i = 0; i < (int)unread_.size(); i++) {
    Unread& unread = unread_[i];
    Slot& slot = slots.slot(i);
    if (!slot.live || unread.sequence != slot.sequence) continue;
    // Positions that are accepted: the model computes them, and the token that follows is known.
    unread.first = std::max(slot.drafted, unread.first);
    int end = std::min(slot.cached, unread.end);
    const bool known = slot.history[end] >= 0;
    const Slots::Pending* coming = coming_[i];
    const int drafts = coming && coming->by_model() && coming->rows == 1 && known ? coming->drafts : 0;
    // The step would overwrite the states in places of the batch, and with many rows those in the ring.
    const bool lost = unread.in_batch(end - 1) || (coming && coming->rows + coming->drafts > kLast);
    // Without drafts one row is left, from which drafts can begin.
    if (!drafts && !(lost && known)) end--;
    if (unread.first < end && (drafts || lost || unread.in_batch(unread.first) || end - unread.first >= kHeld)) {
      parts_.push_back({i, unread.first, end, drafts});
      slot.drafted = end;
    }
  }
}

// Adds a row: the place of a position's hidden state, and the token of the next position.
void DraftHead::add(int slot, int position, int token, int takes) {
  batch_.rows.push_back({slot, position, token});
  batch_.takes.push_back(takes), batch_.keeps.push_back(-1);
}

void DraftHead::draft(Slots& slots) {
  plan(slots);
  if (parts_.empty()) return;
  clear();
  batch_.slots = &slots.all();
  const auto add_rows = [&](const Part& part, int first, int end, bool samples) {
    const Slot& slot = slots.slot(part.slot);
    for (int p = first; p < end; p++) add(part.slot, p, slot.history[p + 1], place_of(part.slot, p));
    if (samples) batch_.keeps.back() = own_place(part.slot);
    if (end > first) end_item(part.slot, end - first, samples);
  };
  // Rows that do not fit the run with the last rows, from which drafts begin, are computed before it.
  int total = 0;
  for (const Part& part : parts_) total += part.end - part.first;
  if (total > max_rows_)
    for (Part& part : parts_) {
      const int end = part.end - (part.drafts > 0);
      while (part.first < end) {
        const int some = std::min(end, part.first + max_rows_ - (int)batch_.rows.size());
        add_rows(part, part.first, some, false);
        part.first = some;
        if ((int)batch_.rows.size() == max_rows_) program_.run(batch_, false), clear();
      }
    }
  if (total > max_rows_ && !batch_.rows.empty()) program_.run(batch_, false), clear();
  std::vector<Sampling> sampling;
  for (const Part& part : parts_) {
    add_rows(part, part.first, part.end, part.drafts > 0);
    if (part.drafts) sampling.push_back({part.slot, part.drafts});
  }
  sample(slots, std::move(sampling), [&](int slot) {
    const std::vector<int32_t>& history = slots.slot(slot).history;
    add(slot, (int)history.size() - 2, history.back(), own_place(slot));
    batch_.keeps.back() = own_place(slot);
  });
}

}  // namespace as
