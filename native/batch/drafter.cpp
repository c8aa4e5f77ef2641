#include "batch/drafter.h"

#include "batch/draft_head.h"
#include "batch/draft_model.h"

namespace as {

void Drafter::clear() {
  batch_.rows.clear(), batch_.outputs.clear(), batch_.items.clear(), batch_.keeps.clear(), batch_.takes.clear();
}

void Drafter::end_item(int slot, int count, bool samples, int ahead) {
  const int row = (int)batch_.rows.size() - count, output = (int)batch_.outputs.size();
  const Row& last = batch_.rows.back();
  if (samples) batch_.outputs.push_back({row + count - 1, slot, last.position + ahead});
  batch_.items.push_back({slot, row, last.position - count + 1, count, 0, output, samples, samples ? kSample : 0});
}

void Drafter::sample(Runner& program, Slots& slots, std::vector<Sampling>& sampling) {
  const RunOutput result = program.run(batch_, false);
  size_t kept = 0;
  for (size_t i = 0; i < sampling.size(); i++) {
    Sampling one = sampling[i];
    const int token = result.samples[i].token;
    if (token < 0) continue;
    slots.slot(one.slot).history.push_back(token);
    if (--one.left > 0) sampling[kept++] = one;
  }
  sampling.resize(kept);
}

void Drafter::repeat(Runner& program, Slots& slots, std::vector<Sampling>& sampling, int ahead,
                     const std::function<void(int)>& follow) {
  while (!sampling.empty()) {
    clear();
    for (const Sampling& one : sampling) follow(one.slot), end_item(one.slot, 1, true, ahead);
    sample(program, slots, sampling);
  }
}

std::unique_ptr<Drafter> make_drafter(const std::vector<Runner*>& programs, bool is_head, const SlotLimits& limits) {
  if (is_head) return std::make_unique<DraftHead>(programs, limits.max_rows, limits.max_slots);
  return std::make_unique<DraftModel>(*programs.front(), limits.max_rows);
}

}  // namespace as
