#include "batch/model.h"

#include <algorithm>
#include <stdexcept>

#include "batch/draft_head.h"

namespace as {

void Model::allocate_masks(int masks, bool samples) {
  if (masks < 0) throw std::invalid_argument("allocate: " + std::to_string(masks) + " masks");
  if (samples && masks > 0 && !program_.ops().empty() && program_.ops().back().is(Op::sample))
    masks_ = std::make_shared<Masks>(masks, program_.ops().back().integer("vocab_size"));
}

void Model::check_drafts(const std::vector<const Model*>& drafts, int max_rows, int max_slots) const {
  const int count = (int)drafts.size();
  const std::vector<int> windows = program_.windows();
  if (count > DraftHead::kMostLayers)
    throw std::invalid_argument("allocate: " + std::to_string(count) + " layers of a draft head; at most " +
                                std::to_string(DraftHead::kMostLayers) + " are possible");
  for (const Model* draft : drafts) {
    if (count > 1 && !draft->is_draft_head()) throw std::invalid_argument("allocate: several draft models");
    const int rows = draft->is_draft_head() ? DraftHead::run_rows(max_rows, max_slots, count) : max_rows;
    if (draft->slot_limits_.max_rows < rows || draft->slot_limits_.max_slots < max_slots)
      throw std::invalid_argument("allocate: a draft model or head of " + std::to_string(draft->slot_limits_.max_rows) +
                                  " rows and " + std::to_string(draft->slot_limits_.max_slots) + " slots; it needs " +
                                  std::to_string(rows) + " and " + std::to_string(max_slots));
    for (size_t group = 0; group < draft->program_.windows().size(); group++)
      if (group >= windows.size() || windows[group])
        throw std::invalid_argument("allocate: a draft model or head has cache group " + std::to_string(group) +
                                    ", of which the model does not keep every position");
  }
}

void Model::check_adapters(int count, int max_rank, int highest_rank) {
  if (count < 0 || (count > 0 && (max_rank < 1 || max_rank > highest_rank)))
    throw std::invalid_argument("allocate: " + std::to_string(count) + " adapters of ranks up to " +
                                std::to_string(max_rank));
}

void Model::check_adapter(int index) const {
  if (index < 0 || index >= (int)slot_limits_.adapters.size())
    throw std::invalid_argument("there is no adapter " + std::to_string(index));
}

int Model::adapter_targets() const {
  int targets = 0;
  for (const OpNode& op : program_.ops())
    if (op.adapts())
      targets = std::max(targets, op.integer("target") + (op.is(Op::expert_lora) ? op.integer("experts") : 1));
  return targets;
}

bool Model::needs_whole_sequences() const {
  return std::any_of(program_.ops().begin(), program_.ops().end(),
                     [](const OpNode& op) { return op.is(Op::span_attention) && op.flag("bidirectional"); });
}

bool Model::sees_images_whole() const {
  return std::any_of(program_.ops().begin(), program_.ops().end(),
                     [](const OpNode& op) { return op.is(Op::span_attention) && op.flag("images"); });
}

int Model::merged_rows() const {
  for (const OpNode& op : program_.ops())
    if (op.is(Op::merge_rows)) return op.integer("count");
  return 0;
}

int Model::given_width() const {
  int width = 0;
  for (const OpNode& op : program_.ops()) {
    const bool passes = op.is(Op::embedding) && op.integer("given_id") < 0;
    if (op.is(Op::given_rows) || passes) width = std::max(width, program_.out(op).width);
    if (op.is(Op::add_given)) width = std::max(width, op.integer("offset") + program_.in(op).width);
  }
  return width;
}

bool Model::is_draft_head() const {
  return std::any_of(program_.ops().begin(), program_.ops().end(),
                     [](const OpNode& op) { return op.is(Op::kept_hidden); });
}

}  // namespace as
