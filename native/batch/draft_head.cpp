#include "batch/draft_head.h"

#include <algorithm>
#include <utility>

namespace as {

void DraftHead::computed(const Batch& batch) {
  for (const Item& item : batch.items) {
    Unread& unread = unread_[item.slot];
    const int64_t sequence = batch.slot(item.slot).sequence;
    if (unread.sequence != sequence) unread.sequence = sequence, unread.held = 0;
    unread.row = item.row, unread.start = item.start, unread.count = item.count;
  }
}

const float* DraftHead::state(const Unread& unread, int position) const {
  const int width = model_.kept().width;
  if (unread.held && position < unread.held_from + unread.held)
    return unread.rows.data() + (size_t)(position - unread.held_from) * width;
  return model_.kept().row(unread.row + position - unread.start);
}

// Holds the states of these positions and forgets the others. The model's next batch overwrites its own.
void DraftHead::hold(Unread& unread, int first, int end) {
  const int width = model_.kept().width;
  unread.rows.resize((size_t)kHeld * width);
  for (int p = first; p < end; p++) {
    const float* from = state(unread, p);  // never before the place that it moves to
    float* to = unread.rows.data() + (size_t)(p - first) * width;
    if (from != to) std::copy_n(from, width, to);
  }
  unread.held_from = first, unread.held = end - first, unread.count = 0;
}

// Decides which rows to compute, and holds the states of the others.
void DraftHead::plan(Slots& slots) {
  parts_.clear();
  wanted_.assign(unread_.size(), 0);
  for (const Slots::Pending& item : slots.pending())
    if (item.by_model()) wanted_[item.slot] = item.drafts;
  for (int i = 0; i < (int)unread_.size(); i++) {
    Unread& unread = unread_[i];
    Slot& slot = slots.slot(i);
    if (!slot.live || unread.sequence != slot.sequence) unread.held = unread.count = 0;
    if (!unread.held && !unread.count) continue;
    // Positions that are accepted: the model has computed them, and the token that follows is known.
    const int first = std::max(slot.drafted, unread.first()), end = slot.cached;
    if (first < end && (wanted_[i] || end - first > kHeld)) {
      // Without drafts one row is left, from which drafts can begin.
      parts_.push_back({i, first, end - !wanted_[i], wanted_[i]});
      slot.drafted = parts_.back().end;
    } else {
      hold(unread, std::min(first, end), end);
    }
  }
}

// Adds a row: the hidden state of a position, and the token of the next one.
void DraftHead::add(int slot, int position, int token, const float* hidden) {
  batch_.rows.push_back({slot, position, token});
  batch_.hidden.push_back(hidden);
}

void DraftHead::draft(Slots& slots) {
  plan(slots);
  if (parts_.empty()) return;
  clear();
  batch_.slots = &slots.all();
  const auto add_rows = [&](const Part& part, int first, int end, bool samples) {
    const Slot& slot = slots.slot(part.slot);
    for (int p = first; p < end; p++) add(part.slot, p, slot.history[p + 1], state(unread_[part.slot], p));
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
  sample(slots, std::move(sampling), [&](int slot, int output) {
    const std::vector<int32_t>& history = slots.slot(slot).history;
    add(slot, (int)history.size() - 2, history.back(), program_.kept().row(output));
  });
  for (const Part& part : parts_) {
    Unread& unread = unread_[part.slot];
    const int end = slots.slot(part.slot).cached;
    hold(unread, part.end, end);
  }
}

}  // namespace as
