#include "batch/drafter.h"

namespace as {

void Drafter::clear() { batch_.rows.clear(), batch_.outputs.clear(), batch_.items.clear(), batch_.hidden.clear(); }

void Drafter::end_item(int slot, int count, bool samples) {
  const int row = (int)batch_.rows.size() - count, output = (int)batch_.outputs.size();
  const Row& last = batch_.rows.back();
  if (samples) batch_.outputs.push_back({row + count - 1, slot, last.position + ahead_});
  batch_.items.push_back({slot, row, last.position - count + 1, count, 0, output, samples, samples ? kSample : 0});
}

void Drafter::sample(Slots& slots, std::vector<Sampling> sampling, const std::function<void(int, int)>& follow) {
  std::vector<Sampling> next;
  while (!batch_.rows.empty()) {
    const RunOutput result = program_.run(batch_, false);
    const std::vector<Output> outputs = batch_.outputs;
    clear();
    next.clear();
    for (size_t i = 0; i < sampling.size(); i++) {
      Sampling& one = sampling[i];
      const int token = result.samples[i].token;
      if (token < 0) continue;
      slots.slot(one.slot).history.push_back(token);
      if (--one.left == 0) continue;
      follow(one.slot, outputs[i].row);
      end_item(one.slot, 1, true);
      next.push_back(one);
    }
    sampling.swap(next);
  }
}

}  // namespace as
