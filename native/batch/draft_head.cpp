#include "batch/draft_head.h"

#include <algorithm>

namespace as {

void DraftHead::place(Batch& batch) {
  batch.keeps.clear();
  for (const Item& item : batch.items) {
    Unread& unread = unread_[item.slot];
    const int64_t sequence = batch.slot(item.slot).sequence;
    if (unread.sequence != sequence) unread.sequence = sequence, unread.first = item.start;
    // With many rows the ring loses the states of positions before them, of which some layers made entries of drafts.
    if (item.count > kLast) unread.first = std::max(unread.first, item.start);
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
    const Slots::Pending* coming = coming_[i];
    // Behind the known tokens are drafts from elsewhere, or placeholders.
    int known = coming && coming->samples() ? coming->end : (int)slot.history.size();
    while (known > 0 && slot.history[known - 1] < 0) known--;
    const bool follows = end < known;
    const int drafts = coming && coming->by_model() && coming->rows == 1 && follows ? coming->drafts : 0;
    // The step would overwrite the states in places of the batch, and with many rows those in the ring.
    const bool lost = unread.in_batch(end - 1) || (coming && coming->rows + coming->drafts > kLast);
    // Without drafts one row is left, from which drafts can begin.
    if (!drafts && !(lost && follows)) end--;
    const int held = end - unread.first;
    const bool due = held > 0 && (drafts || lost || unread.in_batch(unread.first) || held >= held_);
    // If the head runs anyway, these slots' rows are computed with the others', and need fewer runs of their own.
    if (due || held - (depth() - 1) >= held_ / 2) parts_.push_back({i, unread.first, end, known, drafts, due});
  }
  if (std::none_of(parts_.begin(), parts_.end(), [](const Part& part) { return part.due; })) parts_.clear();
  // The last layer has final entries of positions before known - depth().
  for (const Part& part : parts_)
    slots.slot(part.slot).drafted = std::max(part.first, std::min(part.end, part.known - depth()));
}

// Adds a row: the token that it takes, and the places of the hidden state that it takes and of its own.
void DraftHead::add(int slot, int position, int token, int takes, int keeps) {
  batch_.rows.push_back({slot, position, token});
  batch_.takes.push_back(takes), batch_.keeps.push_back(keeps);
}

void DraftHead::run(Slots& slots, const std::vector<Part>& parts, std::vector<Sampling>& sampling) {
  for (int layer = 0; layer < depth(); layer++) {
    const bool last = layer == depth() - 1;
    int passed = passed_place();
    size_t sampled = 0;
    clear();
    for (const Part& part : parts) {
      const std::vector<int32_t>& history = slots.slot(part.slot).history;
      const int known = part.drafts ? (int)history.size() : part.known;  // with the drafts of the layers before
      const int end = std::min(part.end, known - 1 - layer);
      for (int p = part.first; p < end; p++) {
        const int place = passed + p - part.first;
        add(part.slot, p, history[p + 1 + layer], layer ? place : place_of(part.slot, p), last ? -1 : place);
      }
      const bool samples = sampled < sampling.size() && sampling[sampled].slot == part.slot;
      if (samples && last) batch_.keeps.back() = own_place(part.slot);
      if (end > part.first) end_item(part.slot, end - part.first, samples, layer + 2);
      sampled += samples, passed += part.end - part.first;
    }
    if (!batch_.rows.empty()) sample(*layers_[layer], slots, sampling);
  }
}

void DraftHead::draft(Slots& slots) {
  plan(slots);
  if (parts_.empty()) return;
  batch_.slots = &slots.all();
  // Rows that do not fit the run with the last rows, from which drafts begin, are computed before it.
  const int most = run_rows(max_rows_, (int)unread_.size(), depth());
  std::vector<Sampling> sampling;
  int total = 0;
  for (const Part& part : parts_) total += part.end - part.first;
  if (total > most) {
    std::vector<Part> some;
    int rows = 0;
    const auto flush = [&] {
      run(slots, some, sampling);
      some.clear(), rows = 0;
    };
    for (Part& part : parts_) {
      const int end = part.end - (part.drafts > 0 ? depth() : 0);
      while (part.first < end) {
        const int next = std::min(end, part.first + most - rows);
        some.push_back({part.slot, part.first, next, part.known, part.drafts});
        rows += next - part.first, part.first = next;
        if (rows == most) flush();
      }
    }
    if (rows) flush();
  }
  for (const Part& part : parts_)
    if (part.drafts) sampling.push_back({part.slot, part.drafts});
  run(slots, parts_, sampling);
  repeat(*layers_.back(), slots, sampling, depth() + 1, [&](int slot) {
    const std::vector<int32_t>& history = slots.slot(slot).history;
    add(slot, (int)history.size() - 1 - depth(), history.back(), own_place(slot), own_place(slot));
  });
}

}  // namespace as
