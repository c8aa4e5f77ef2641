#include "batch/slots.h"

#include <algorithm>
#include <stdexcept>

namespace as {
namespace {

[[noreturn]] void refuse(int slot, const std::string& what) {
  throw std::invalid_argument("step plan: slot " + std::to_string(slot) + " " + what);
}

bool enters(const Plan& plan, int slot) {
  return std::any_of(plan.fresh.begin(), plan.fresh.end(), [&](const NewSequence& s) { return s.slot == slot; });
}

}  // namespace

Slots::Slots(SlotLimits limits) : limits_(std::move(limits)), slots_(limits_.max_slots) { batch_.slots = &slots_; }

// Copies run in parallel, so none may write what another one reads or writes.
void Slots::check_copies(const Plan& plan) {
  if (plan.saved.empty() && plan.restored.empty()) return;
  auto refuse = [](const std::string& what) { throw std::invalid_argument("step plan: " + what); };
  copied_.assign(limits_.host_spans, 0);
  std::vector<char> filled(limits_.num_spans);
  for (const auto* copies : {&plan.saved, &plan.restored})
    for (const SpanCopy& copy : *copies) {
      const bool restored = copies == &plan.restored;
      if (copy.span < 0 || copy.span >= limits_.num_spans || copy.host < 0 || copy.host >= limits_.host_spans)
        refuse("a copy of span " + std::to_string(copy.span) + " of " + std::to_string(limits_.num_spans) +
               " and span " + std::to_string(copy.host) + " of the second tier's " +
               std::to_string(limits_.host_spans));
      if (restored ? filled[copy.span]++ : copied_[copy.host]++)
        refuse("two copies to span " + std::to_string(restored ? copy.span : copy.host));
    }
}

void Slots::check_states(const Plan& plan) const {
  for (const auto* copies : {&plan.saved_states, &plan.loaded_states})
    for (const StateCopy& copy : *copies) {
      const bool fits =
          std::all_of(copy.spans.begin(), copy.spans.end(), [&](int32_t s) { return s >= 0 && s < limits_.num_spans; });
      if (!fits || copy.slot < 0 || copy.slot >= limits_.max_slots || (int)copy.spans.size() < limits_.state_spans ||
          !limits_.state_spans || copy.position <= 0 || copy.position % kStateStep)
        throw std::invalid_argument("step plan: a copy of the state of slot " + std::to_string(copy.slot) +
                                    " at position " + std::to_string(copy.position) + " and " +
                                    std::to_string(copy.spans.size()) + " spans; the state takes " +
                                    std::to_string(limits_.state_spans));
    }
  if (!limits_.state_spans) return;
  for (const NewSequence& s : plan.fresh) {
    const bool loads = std::any_of(plan.loaded_states.begin(), plan.loaded_states.end(), [&](const StateCopy& copy) {
      return copy.slot == s.slot && copy.position == s.cached;
    });
    if (s.cached && !loads)
      throw std::invalid_argument("step plan: slot " + std::to_string(s.slot) + " starts with " +
                                  std::to_string(s.cached) + " cached positions but no recurrent state");
  }
}

// A table may have kNoSpan for positions that no row of the item sees. Later rows do not see them either.
void Slots::check_spans(const Work& work, Outlook& slot) const {
  for (int g = 0; g < groups(); g++) {
    const long unseen = limits_.windows[g] ? slot.cached + 1 - limits_.windows[g] : 0;
    for (int32_t s : work.spans[g])
      if (const long end = ++slot.spans[g] * limits_.span_size;
          s < kNoSpan || s >= limits_.num_spans || (s == kNoSpan && end > unseen))
        throw std::invalid_argument("step plan: span " + std::to_string(s) + " is not in 0..." +
                                    std::to_string(limits_.num_spans - 1));
  }
}

// Checks the rows and positions that the plan gives, against the slots as they are before its work.
void Slots::check_given(const Plan& plan) const {
  for (const GivenRows& given : plan.given) {
    if (given.width != limits_.given_width)
      refuse(given.slot, "is given rows of " + std::to_string(given.width) + " values, this program takes rows of " +
                             std::to_string(limits_.given_width));
    const auto work =
        std::find_if(plan.work.begin(), plan.work.end(), [&](const Work& w) { return w.slot == given.slot; });
    const long cached = work == plan.work.end() ? 0 : outlook_[given.slot].cached;
    if (work == plan.work.end() || given.position < cached || given.position + (long)given.rows > cached + work->rows)
      refuse(given.slot, "is given rows for positions " + std::to_string(given.position) + "..." +
                             std::to_string(given.position + (long)given.rows) + ", which the step does not compute");
  }
  for (const RotaryPositions& given : plan.positions) {
    if (!limits_.rotary_parts) refuse(given.slot, "is given rotary positions, which this program does not have");
    if (!enters(plan, given.slot)) refuse(given.slot, "is given rotary positions, and does not enter in this step");
  }
  for (const SlotPlaces& given : plan.segments) {
    if (!enters(plan, given.slot)) refuse(given.slot, "is given segments, and does not enter in this step");
    int last = 0;
    for (int32_t end : given.places)
      if (end <= last)
        refuse(given.slot, "has a segment of positions " + std::to_string(last) + "..." + std::to_string(end));
      else last = end;
    if (last != outlook_[given.slot].history)
      refuse(given.slot, "has segments up to position " + std::to_string(last) + " of " +
                             std::to_string(outlook_[given.slot].history));
  }
}

// Checks the images that the plan gives, and that no chunk ends within an image whose rows see each other.
void Slots::check_images(const Plan& plan) const {
  for (const SlotPlaces& given : plan.images) {
    if (!limits_.images) refuse(given.slot, "is given images, whose rows do not see each other in this program");
    if (!enters(plan, given.slot)) refuse(given.slot, "is given images, and does not enter in this step");
    long last = -1;
    for (size_t i = 0; i < given.places.size(); last = given.places[i++])
      if (given.places[i] < last || (i % 2 && given.places[i] == last) || given.places[i] < 0 ||
          given.places[i] > outlook_[given.slot].history)
        refuse(given.slot, "has an image that begins or ends at " + std::to_string(given.places[i]));
    if (given.places.size() % 2) refuse(given.slot, "has an image without an end");
  }
  for (const Work& w : plan.work) {
    const auto given = std::find_if(plan.images.begin(), plan.images.end(),
                                    [&](const SlotPlaces& images) { return images.slot == w.slot; });
    static const std::vector<int32_t> none;
    const std::vector<int32_t>& ranges = given != plan.images.end() ? given->places
                                         : enters(plan, w.slot)     ? none
                                                                    : slots_[w.slot].images;
    const long end = outlook_[w.slot].cached + w.rows;
    for (size_t i = 0; i < ranges.size(); i += 2)
      if (ranges[i] < end && end < ranges[i + 1])
        refuse(w.slot, "has rows up to " + std::to_string(end) + ", within an image at " + std::to_string(ranges[i]) +
                           "..." + std::to_string(ranges[i + 1]) + ", whose rows see each other");
  }
}

// Of programs whose rows attend to later ones.
void Slots::check_whole(const Work& w, const Outlook& slot) const {
  const long end = slot.cached + w.rows;
  const int outputs = limits_.merged ? w.rows / limits_.merged : 1;
  const bool fits = limits_.merged ? w.outputs == outputs && w.rows % limits_.merged == 0 : w.outputs <= 1;
  if (slot.cached || end != slot.history || w.samples() || !fits)
    throw std::invalid_argument(
        "step plan: slot " + std::to_string(w.slot) + " has rows " + std::to_string(slot.cached) + "..." +
        std::to_string(end) + " of " + std::to_string(slot.history) + " and " + std::to_string(w.outputs) +
        " outputs; this model computes all rows of a text in one step, with " +
        (limits_.merged ? "an output for each " + std::to_string(limits_.merged) + " rows" : "one output") +
        ", and samples nothing");
}

void Slots::check(const Plan& plan, bool has_draft_model) {
  check_copies(plan);
  check_states(plan);
  auto refuse = [](const std::string& what) { throw std::invalid_argument("step plan: " + what); };
  outlook_.resize(limits_.max_slots);
  auto at = [&](int slot) -> Outlook& {
    if (slot < 0 || slot >= limits_.max_slots)
      refuse("slot " + std::to_string(slot) + " is not in 0..." + std::to_string(limits_.max_slots - 1));
    return outlook_[slot];
  };
  auto recall = [&](int index) {
    Outlook& o = at(index);
    const Slot& s = slots_[index];
    o.live = s.live, o.history = (long)s.history.size(), o.cached = s.cached;
    o.spans.assign(groups(), 0);  // keeps its memory from step to step
    for (int g = 0; g < groups() && s.live; g++) o.spans[g] = (long)s.spans[g].size();
  };
  for (int i : plan.free) recall(i);
  for (const NewSequence& s : plan.fresh) recall(s.slot);
  for (const Work& w : plan.work) recall(w.slot);
  for (int i : plan.free) {
    if (!outlook_[i].live) refuse("slot " + std::to_string(i) + " is free already");
    outlook_[i].live = false;
  }
  for (const NewSequence& s : plan.fresh) {
    const std::string name = "slot " + std::to_string(s.slot);
    if (outlook_[s.slot].live) refuse(name + " is in use");
    if (s.history.empty() || s.history.size() > (size_t)limits_.max_length)
      refuse(name + " starts with " + std::to_string(s.history.size()) + " tokens; 1 to " +
             std::to_string(limits_.max_length) + " are possible");
    if (s.cached < 0 || s.cached % limits_.span_size || s.cached >= (int)s.history.size())
      refuse(name + " starts with " + std::to_string(s.cached) + " cached positions: that must be a multiple of " +
             std::to_string(limits_.span_size) + " below its " + std::to_string(s.history.size()) + " tokens");
    outlook_[s.slot] = {true, (long)s.history.size(), s.cached, std::vector<long>(groups())};
  }
  long rows = 0, outputs = 0;
  std::vector<char> seen(limits_.max_slots);
  for (const Work& w : plan.work) {
    Outlook& slot = outlook_[w.slot];
    const std::string name = "slot " + std::to_string(w.slot);
    if (!slot.live) refuse(name + " holds no sequence");
    if (seen[w.slot]++) refuse(name + " has two items");
    const int drafting = w.flags & (kLookup | kGiven | kDraftModel);
    if (w.flags & ~kAllFlags || drafting & (drafting - 1)) refuse(name + " has flags " + std::to_string(w.flags));
    if ((w.flags & kHidden) && !limits_.hidden_states) refuse("this program does not output hidden states");
    if ((w.flags & kDraftModel) && !has_draft_model) refuse("there is no draft model");
    if (w.adapter != -1 && limits_.adapters.empty()) refuse("adapters are not available in this backend");
    if (w.adapter < -1 || w.adapter >= (long)limits_.adapters.size())
      refuse(name + " has adapter " + std::to_string(w.adapter) + " of " + std::to_string(limits_.adapters.size()));
    if (w.adapter >= 0 && !limits_.adapters[w.adapter])
      refuse(name + " has adapter " + std::to_string(w.adapter) + ", which is not loaded");
    if (w.drafts < 0 || w.drafts > limits_.max_rows || (w.drafts && !(drafting && w.samples())))
      refuse(name + " has " + std::to_string(w.drafts) + " drafts, but no source of drafts or no sampling");
    if ((w.flags & kGiven) && (long)w.known.size() < w.drafts)
      refuse(name + ": " + std::to_string(w.drafts) + " drafts among " + std::to_string(w.known.size()) + " known ids");
    if (w.outputs < 0 || w.outputs > w.rows || (w.samples() && !w.outputs))
      refuse(name + " has " + std::to_string(w.outputs) + " outputs of " + std::to_string(w.rows) + " rows");
    if (w.mask < 0 || (w.mask && (!w.samples() || w.mask + w.drafts > limits_.masks)))
      refuse(name + " has mask " + std::to_string(w.mask) + " for " + std::to_string(w.samples() + w.drafts) +
             " samples; there are " + std::to_string(limits_.masks));
    check_spans(w, slot);
    slot.history += (long)w.known.size() - (w.flags & kGiven ? w.drafts : 0);
    const long end = slot.cached + w.rows;
    if (w.rows < 1 || end > slot.history || slot.history > limits_.max_length)
      refuse("positions " + std::to_string(slot.cached) + "..." + std::to_string(end) + " of " + name +
             " are not among its " + std::to_string(slot.history) + " tokens, or these are more than " +
             std::to_string(limits_.max_length));
    if (limits_.whole) check_whole(w, slot);
    for (long spans : slot.spans)
      if (spans * limits_.span_size < end)
        refuse("positions up to " + std::to_string(end) + " of " + name + " are not covered by its " +
               std::to_string(spans) + " spans");
    if (w.samples() && end != slot.history) refuse("only a sequence's last row can sample");
    if ((w.flags & kPromptLogprobs) && w.outputs && !w.samples() && end == slot.history)
      refuse(name + ": no token follows its last row, whose log probability is requested");
    rows += w.rows + w.drafts, outputs += w.outputs + w.drafts;
  }
  if (rows > limits_.max_rows || outputs > limits_.max_outputs)
    refuse(std::to_string(rows) + " rows, " + std::to_string(outputs) + " with outputs; at most " +
           std::to_string(limits_.max_rows) + " and " + std::to_string(limits_.max_outputs) + " fit");
  check_given(plan);
  if (limits_.images || !plan.images.empty()) check_images(plan);
}

void Slots::begin(Plan& plan) {
  for (int i : plan.free) slots_[i].live = false;
  for (const NewSequence& s : plan.fresh) {
    Slot& slot = slots_[s.slot];
    slot.live = true, slot.sequence++;
    slot.sampling = s.sampling, slot.history = s.history;
    slot.spans.assign(groups(), {});
    slot.lookup.clear();
    slot.parts.clear(), slot.segments.clear(), slot.images.clear();
    slot.delta = 0;
    slot.begun = (int)s.history.size();
    slot.first = slot.cached = slot.drafted = s.cached;
  }
  for (const RotaryPositions& p : plan.positions) slots_[p.slot].parts = p.parts, slots_[p.slot].delta = p.delta;
  for (const SlotPlaces& s : plan.segments) slots_[s.slot].segments = s.places;
  for (const SlotPlaces& s : plan.images) slots_[s.slot].images = s.places;
  given_ = std::move(plan.given);
  batch_.saved_states = plan.saved_states, batch_.loaded_states = plan.loaded_states;
  pending_.clear();
  for (const Work& w : plan.work) {
    Slot& slot = slots_[w.slot];
    slot.history.insert(slot.history.end(), w.known.begin(), w.known.end());
    for (int g = 0; g < groups(); g++) slot.spans[g].insert(slot.spans[g].end(), w.spans[g].begin(), w.spans[g].end());
    const int end = slot.cached + w.rows;
    int most = 0;
    if (w.drafts) {
      // Limited by the sequence's maximum length and by its spans.
      int64_t room = limits_.max_length;
      for (const auto& spans : slot.spans) room = std::min(room, (int64_t)spans.size() * limits_.span_size);
      most = (int)std::min<int64_t>(w.drafts, room - end);
      if (w.flags & kGiven) slot.history.resize(slot.history.size() - (w.drafts - most));
      if (w.flags & kLookup) slot.lookup.draft(slot.history, most);
    }
    pending_.push_back({w.slot, w.rows, end, w.outputs, most, w.mask, w.flags, w.adapter});
  }
}

Batch& Slots::batch() {
  batch_.rows.clear(), batch_.outputs.clear(), batch_.items.clear();
  for (const Pending& p : pending_) {
    Slot& slot = slots_[p.slot];
    const int drafts = p.samples() ? (int)slot.history.size() - p.end : 0, start = slot.cached;
    const Item item{p.slot,
                    (int)batch_.rows.size(),
                    start,
                    p.rows + drafts,
                    drafts,
                    (int)batch_.outputs.size(),
                    p.outputs + drafts,
                    p.flags,
                    p.adapter};
    for (int i = start; i < start + item.count; i++) batch_.rows.push_back({p.slot, i, slot.history[i]});
    const int inside = p.outputs - p.samples();  // outputs that are not sampled
    for (int i = 0; i < item.outputs; i++) {
      Output out{item.row + p.rows - p.outputs + i, p.slot, p.end - p.outputs + 1 + i};
      if (i < inside) out.wanted = p.flags & kPromptLogprobs ? Wanted::score : Wanted::nothing;
      else if (p.mask) out.mask = p.mask + i - inside;
      batch_.outputs.push_back(out);
    }
    slot.cached = p.end;
    batch_.items.push_back(item);
  }
  place_given();
  return batch_;
}

void Slots::place_given() {
  batch_.given.clear();
  if (given_.empty()) return;
  batch_.given.resize(batch_.rows.size());
  for (const GivenRows& given : given_)
    for (const Item& item : batch_.items)
      if (item.slot == given.slot)
        for (int i = 0; i < given.rows; i++)
          batch_.given[item.row + given.position - item.start + i] = given.values + (size_t)i * given.width;
}

void Slots::foretell(const Batch& batch) {
  for (const Item& item : batch.items)
    if (item.samples()) slots_[item.slot].history.push_back(sampled_after(item.first_sample()));
}

std::vector<Slots::Accepted> Slots::accept(const Batch& batch, const std::vector<SampleOutput>& samples,
                                           bool foretold) {
  std::vector<Accepted> accepted;
  for (const Item& item : batch.items) {
    if (!item.samples()) continue;
    Slot& slot = slots_[item.slot];
    const int first = item.first_sample();
    if (foretold) {  // the slot may belong to another sequence by now
      const size_t place = (size_t)item.start + item.count;
      if (place < slot.history.size() && slot.history[place] < 0)
        slot.history[place] = std::max(samples[first].token, 0);
      accepted.push_back({first, 1, 0});
      continue;
    }
    const int end = slot.cached;  // position of the first draft
    int kept = 0;
    while (kept < item.drafts && samples[first + kept].token == slot.history[end + kept]) kept++;
    slot.history.resize(end + kept);
    // A row without a token had invalid logits. The sequence ends, and results of its rows that are already queued are
    // discarded.
    slot.history.push_back(std::max(samples[first + kept].token, 0));
    slot.cached = end + kept;
    slot.drafted = std::min(slot.drafted, slot.cached);  // entries of rejected drafts are overwritten
    accepted.push_back({first, kept + 1, item.drafts});
  }
  return accepted;
}

}  // namespace as
