#include "cuda/step/sample_list.h"

#include <algorithm>

namespace as::cuda {
namespace {

using namespace sampling;

// Lists the edits of logit processors instead of applying them.
class ListedEdits {
 public:
  explicit ListedEdits(std::vector<Edit>* lists) : lists_(lists) {}
  void repeat(int32_t id, float penalty) { lists_[0].push_back({id, penalty, 0}); }
  void lower(int32_t id, float by) { lists_[1].push_back({id, by, 0}); }
  void ban(int32_t id) { lists_[2].push_back({id, 0, 0}); }
  void bias(int32_t id, float by) { lists_[3].push_back({id, by, 0}); }

 private:
  std::vector<Edit>* lists_;
};

}  // namespace

bool SampleList::add(const Batch& batch, int row, int mask) {
  const Output& out = batch.outputs[row];
  const Slot& slot = batch.slot(out.slot);
  const bool scores = out.wanted == Wanted::score;
  const SamplingParams& p = scores ? scoring_params() : slot.sampling;
  RowSample sample{};
  sample.row = sample.output = row, sample.kind = kind_of(p), sample.mask = mask;
  sample.target = scores ? slot.history[out.history] : -1;
  sample.top_k = p.top_k, sample.top_p = p.top_p;
  sample.top_logprobs = p.logprobs() ? p.top_logprobs : -1;
  sample.deepest = p.min_p > 0.0f ? min_p_depth(p) : -1;
  sample.scale = sample.kind == SamplingKind::greedy ? 1.0f : 1.0f / p.temperature;
  sample.end = !p.eos.empty() && p.eos[0] >= 0 && p.eos[0] < vocab_size_ ? p.eos[0] : -1;
  sample.random = {p.seed, p.sample_index, out.history};
  sample.first_edit = (int32_t)edits_.size();
  if (!scores) {
    for (auto& list : of_row_) list.clear();
    const SampleInput input{&p, slot.history.data(), out.history, nullptr, nullptr};
    Processors(input, 0, vocab_size_, seen_, ListedEdits(of_row_)).run();
    size_t edits = 0;
    for (const auto& list : of_row_) edits += list.size();
    if (edits_.size() + edits > max_edits_) return false;
    std::stable_sort(of_row_[3].begin(), of_row_[3].end(), [](const Edit& a, const Edit& b) { return a.id < b.id; });
    for (const auto& list : of_row_) edits_.insert(edits_.end(), list.begin(), list.end());
    sample.repeats = (int32_t)of_row_[0].size(), sample.lowers = (int32_t)of_row_[1].size();
    sample.bans = (int32_t)of_row_[2].size(), sample.biases = (int32_t)of_row_[3].size();
  }
  parts_.edits |= sample.edits() > 0, parts_.both_sums |= sample.needs_both_sums();
  parts_.wide |= !scores && sample.may_be_wide();
  samples_.push_back(sample);
  return true;
}

}  // namespace as::cuda
