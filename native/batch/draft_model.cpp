#include "batch/draft_model.h"

#include <algorithm>

namespace as {

constexpr int kAhead = 1;  // a row predicts the next position

void DraftModel::draft(Slots& slots) {
  std::vector<Sampling> sampling;
  const auto add_rows = [&](int index, int first, int end) {
    Slot& slot = slots.slot(index);
    for (int p = first; p < end; p++) batch_.rows.push_back({index, p, slot.history[p]});
    slot.drafted = end;
  };
  clear();
  batch_.slots = &slots.all();
  for (const Slots::Pending& item : slots.pending()) {
    const Slot& slot = slots.slot(item.slot);
    const int room = max_rows_ - (int)batch_.rows.size(), first = slot.drafted, end = std::min(item.end, first + room);
    const bool samples = item.by_model() && item.drafts > 0 && end == item.end;
    if (item.samples() && item.rows == 1 && !(item.by_model() && item.drafts))
      continue;  // no drafts this time: a later step computes the missing positions
    if (end <= first) continue;
    add_rows(item.slot, first, end);
    end_item(item.slot, end - first, samples, kAhead);
    if (samples) sampling.push_back({item.slot, item.drafts});
  }
  if (batch_.rows.empty()) return;
  sample(model_, slots, sampling);
  repeat(model_, slots, sampling, kAhead, [&](int index) {
    const int length = (int)slots.slot(index).history.size();
    add_rows(index, length - 1, length);
  });
}

}  // namespace as
