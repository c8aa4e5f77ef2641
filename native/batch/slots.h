// The sequences of a rank, and how step plans change them.
#pragma once
#include <string>
#include <vector>

#include "batch/batch.h"

namespace as {

// Limits that plans are checked against.
struct SlotLimits {
  int max_rows = 0, max_outputs = 0, max_slots = 0, max_length = 0, span_size = 0;
  int num_spans = 0;
  std::vector<int> windows;  // of each cache group: its attention window in positions; 0: unlimited
  int masks = 0;
  bool hidden_states = false;  // whether the program outputs them
  int host_spans = 0;          // size of the second tier
  std::vector<char> adapters;  // of each adapter index: whether it is loaded
  int state_spans = 0;         // spans that hold a slot's recurrent state; 0: the model has none
  bool whole = false;          // rows attend to later ones, so an item has all rows of its sequence
  int merged = 0;              // with `whole`, so many rows make an output; 0: all of them make one
  int given_width = 0;         // of the rows that plans may give; 0: none
  bool rotary_parts = false;   // whether plans may give rotary positions
  bool images = false;         // whether rows of an image see each other, so that a step has all that are left of them
};

class Slots {
 public:
  Slots() = default;
  explicit Slots(SlotLimits limits);

  int groups() const { return (int)limits_.windows.size(); }
  // Sets whether an adapter is loaded.
  void set_adapter(int index, bool loaded) { limits_.adapters.at(index) = loaded; }
  // Throws std::invalid_argument, and changes nothing, if the plan does not fit the state of the slots.
  void check(const Plan& plan, bool has_draft_model);
  // Applies a checked plan to the slots and looks up drafts. A draft model appends its drafts afterwards. Takes the
  // given rows out of the plan.
  void begin(Plan& plan);

  // An item of the plan: `rows` rows of known ids up to position `end`, the last `outputs` of them with outputs,
  // followed by at most `drafts` drafts.
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

  // The step's rows, including the drafts at the ends of the histories.
  Batch& batch();
  // Applies the step's samples. Returns for each item that samples: its `count` tokens, from samples[output] on, and
  // how many drafts it verified.
  struct Accepted {
    int output, count, drafts;
  };
  std::vector<Accepted> accept(const Batch& batch, const std::vector<SampleOutput>& samples, bool foretold = false);
  // Appends sampled_after() to the history of each item that samples without drafts. The placeholders stay until that
  // batch is accepted with foretold = true; other plans may begin in between.
  void foretell(const Batch& batch);

 private:
  // The sizes that a slot would have after a plan.
  struct Outlook {
    bool live;
    long history, cached;
    std::vector<long> spans;
  };
  void check_copies(const Plan& plan);
  void check_states(const Plan& plan) const;
  void check_spans(const Work& work, Outlook& slot) const;
  void check_given(const Plan& plan) const;
  void check_images(const Plan& plan) const;
  void check_whole(const Work& work, const Outlook& slot) const;
  void place_given();

  SlotLimits limits_;
  std::vector<Slot> slots_;
  std::vector<Outlook> outlook_;  // of the slots in the plan
  std::vector<Pending> pending_;
  std::vector<GivenRows> given_;  // of the plan
  std::vector<char> copied_;      // second-tier spans in the plan
  Batch batch_;
};

}  // namespace as
