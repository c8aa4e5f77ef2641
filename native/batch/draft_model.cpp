#include "batch/draft_model.h"

#include <algorithm>

namespace as {

void DraftModel::draft(Slots& slots) {
  // A sequence that draws, how many drafts it may still have, and where its next row is.
  struct Drawing {
    Slot* slot;
    int index, left;
  };
  std::vector<Drawing> drawing, next;
  const auto add = [&](Slot& slot, int index, int first, int end, bool draws) {
    const int row = (int)batch_.rows.size(), output = (int)batch_.outputs.size();
    for (int p = first; p < end; p++) batch_.rows.push_back({index, p, slot.history[p]});
    if (draws) batch_.outputs.push_back({(int)batch_.rows.size() - 1, index, end});
    batch_.items.push_back({index, row, first, end - first, 0, output, draws, draws ? kDraw : 0});
    slot.drafted = end;
  };
  const auto clear = [&] { batch_.rows.clear(), batch_.outputs.clear(), batch_.items.clear(); };
  clear();
  batch_.slots = &slots.all();
  for (const Slots::Pending& item : slots.pending()) {
    Slot& slot = slots.slot(item.slot);
    const int room = max_rows_ - (int)batch_.rows.size(), end = std::min(item.end, slot.drafted + room);
    const bool draws = item.by_model() && item.drafts > 0 && end == item.end;
    if (item.draws() && item.rows == 1 && !item.by_model())
      continue;  // no drafts just now: what it misses is made up for later
    if (end <= slot.drafted) continue;
    add(slot, item.slot, slot.drafted, end, draws);
    if (draws) drawing.push_back({&slot, item.slot, item.drafts});
  }
  while (!batch_.rows.empty()) {
    const Drawn drawn = runner_.run(batch_, false);
    clear();
    next.clear();
    for (size_t i = 0; i < drawing.size(); i++) {
      Drawing& d = drawing[i];
      const int token = drawn.samples[i].token;
      if (token < 0) continue;
      d.slot->history.push_back(token);
      if (--d.left == 0) continue;
      const int position = (int)d.slot->history.size() - 1;
      add(*d.slot, d.index, position, position + 1, true);
      next.push_back(d);
    }
    drawing.swap(next);
  }
}

}  // namespace as
