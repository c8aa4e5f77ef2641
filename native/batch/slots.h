// The sequences that a rank runs, and what a step plan does to them.
#pragma once
#include <string>
#include <vector>

#include "batch/batch.h"

namespace as {

// What plans may ask for.
struct SlotLimits {
  int max_rows = 0, max_outputs = 0, max_slots = 0, max_length = 0, span_size = 0;
  int num_spans = 0;
  std::vector<int> windows;  // of each cache group: how many of the last positions its ops see; 0: all
  int masks = 0;
  bool hidden_states = false;  // whether the program hands them out
  int host_spans = 0;          // of the second tier
  std::vector<char> adapters;  // whether each that rows may name is loaded
};

class Slots {
 public:
  Slots() = default;
  explicit Slots(SlotLimits limits);

  int groups() const { return (int)limits_.windows.size(); }
  // An adapter is loaded, or no longer.
  void set_adapter(int index, bool loaded) { limits_.adapters.at(index) = loaded; }
  // Throws std::invalid_argument, and changes nothing, if the plan does not follow what the slots have.
  void check(const Plan& plan, bool has_draft_model);
  // Brings the slots up to date with a plan that was checked, and looks up drafts. Those of a draft model are still to
  // be appended.
  void begin(const Plan& plan);

  // An item of the plan: `rows` rows of known ids up to position `end`, the last `outputs` of them with outputs, and at
  // most `drafts` more.
  struct Pending {
    int slot, rows, end, outputs, drafts, mask;
    int32_t flags;
    int adapter;

    bool samples() const { return flags & kSample; }
    bool by_model() const { return flags & kDraftModel; }
  };
  const std::vector<Pending>& pending() const { return pending_; }
  std::vector<Slot>& all() { return slots_; }
  Slot& slot(int index) { return slots_[index]; }

  // The step's rows, with the drafts that histories now end with.
  const Batch& batch();
  // Takes over what was drawn in that step. Of each item that draws: how many tokens, the first of which is
  // samples[output], and how many drafts were tried.
  struct Accepted {
    int output, count, drafts;
  };
  std::vector<Accepted> accept(const Batch& batch, const std::vector<SampleOutput>& samples, bool foretold = false);
  // A token will be drawn after each item that draws and has no drafts: histories have sampled_after() in its place
  // until that batch is accepted as one that was foretold, though other plans may have come in between.
  void foretell(const Batch& batch);

 private:
  // What a plan would make of a slot: sizes only.
  struct Outlook {
    bool live;
    long history, cached;
    std::vector<long> spans;
  };
  void check_copies(const Plan& plan);
  void check_spans(const Work& work, Outlook& slot) const;

  SlotLimits limits_;
  std::vector<Slot> slots_;
  std::vector<Outlook> outlook_;  // of the slots that a plan names
  std::vector<Pending> pending_;
  std::vector<char> copied_;  // spans of the second tier that a plan names
  Batch batch_;
};

}  // namespace as
