#include "batch/draft_model.h"

#include <algorithm>

namespace as {

void DraftModel::draft(Slots& slots) {
  // A sequence that gets drafts: its slot, the slot's index, and how many more drafts it may get.
  struct Sampling {
    Slot* slot;
    int index, left;
  };
  std::vector<Sampling> sampling, next;
  const auto add = [&](Slot& slot, int index, int first, int end, bool samples) {
    const int row = (int)batch_.rows.size(), output = (int)batch_.outputs.size();
    for (int p = first; p < end; p++) batch_.rows.push_back({index, p, slot.history[p]});
    if (samples) batch_.outputs.push_back({(int)batch_.rows.size() - 1, index, end});
    batch_.items.push_back({index, row, first, end - first, 0, output, samples, samples ? kSample : 0});
    slot.drafted = end;
  };
  const auto clear = [&] { batch_.rows.clear(), batch_.outputs.clear(), batch_.items.clear(); };
  clear();
  batch_.slots = &slots.all();
  for (const Slots::Pending& item : slots.pending()) {
    Slot& slot = slots.slot(item.slot);
    const int room = max_rows_ - (int)batch_.rows.size(), end = std::min(item.end, slot.drafted + room);
    const bool samples = item.by_model() && item.drafts > 0 && end == item.end;
    if (item.samples() && item.rows == 1 && !item.by_model())
      continue;  // no drafts this time: a later step computes the missing positions
    if (end <= slot.drafted) continue;
    add(slot, item.slot, slot.drafted, end, samples);
    if (samples) sampling.push_back({&slot, item.slot, item.drafts});
  }
  while (!batch_.rows.empty()) {
    const RunOutput result = runner_.run(batch_, false);
    clear();
    next.clear();
    for (size_t i = 0; i < sampling.size(); i++) {
      Sampling& d = sampling[i];
      const int token = result.samples[i].token;
      if (token < 0) continue;
      d.slot->history.push_back(token);
      if (--d.left == 0) continue;
      const int position = (int)d.slot->history.size() - 1;
      add(*d.slot, d.index, position, position + 1, true);
      next.push_back(d);
    }
    sampling.swap(next);
  }
}

}  // namespace as
