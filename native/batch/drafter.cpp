#include "batch/drafter.h"

#include "batch/draft_head.h"
#include "batch/draft_model.h"

namespace as {

void Drafter::clear() {
  batch_.rows.clear(), batch_.outputs.clear(), batch_.items.clear(), batch_.keeps.clear(), batch_.takes.clear();
}

void Drafter::end_item(int slot, int count, bool samples) {
  const int row = (int)batch_.rows.size() - count, output = (int)batch_.outputs.size();
  const Row& last = batch_.rows.back();
  if (samples) batch_.outputs.push_back({row + count - 1, slot, last.position + ahead_});
  batch_.items.push_back({slot, row, last.position - count + 1, count, 0, output, samples, samples ? kSample : 0});
}

void Drafter::sample(Slots& slots, std::vector<Sampling> sampling, const std::function<void(int)>& follow) {
  std::vector<Sampling> next;
  while (!batch_.rows.empty()) {
    const RunOutput result = program_.run(batch_, false);
    clear();
    next.clear();
    for (size_t i = 0; i < sampling.size(); i++) {
      Sampling& one = sampling[i];
      const int token = result.samples[i].token;
      if (token < 0) continue;
      slots.slot(one.slot).history.push_back(token);
      if (--one.left == 0) continue;
      follow(one.slot);
      end_item(one.slot, 1, true);
      next.push_back(one);
    }
    sampling.swap(next);
  }
}

std::unique_ptr<Drafter> make_drafter(Runner& program, bool is_head, const SlotLimits& limits) {
  if (is_head) return std::make_unique<DraftHead>(program, limits.max_rows, limits.max_slots);
  return std::make_unique<DraftModel>(program, limits.max_rows);
}

}  // namespace as
