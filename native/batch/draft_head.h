// Drafts of the model itself (multi-token prediction: DeepSeek-V3 technical report, arXiv 2412.19437, section 2.2). A
// draft head is one more layer. Its row at position p takes the model's hidden state of p and the token of p + 1, and
// predicts the token of p + 2; for further drafts it takes its own hidden state. It samples with the random numbers
// that the model will use.
//
// Its cache shares the model's span tables. Entries of positions whose tokens are known are made from the model's
// hidden states alone, so entries of drafts are written again. In a span that was found in the prefix cache, the last
// entry was made with the token that followed in the sequence that filled the span. Drafts may suffer, outputs cannot.
#pragma once
#include <vector>

#include "batch/drafter.h"

namespace as {

class DraftHead : public Drafter {
 public:
  // The most hidden states that are held of a slot that gets no drafts. Their rows are computed together later, which
  // reads the head's weights once.
  static constexpr int kHeld = 16;

  // head: the draft head's program, with the same spans. model: a program that keeps hidden states. max_rows: the most
  // rows of one run of the head, at least one for each slot.
  DraftHead(Runner& head, const Runner& model, int max_rows, int max_slots)
      : Drafter(head, 2), model_(model), max_rows_(max_rows), unread_(max_slots) {}

  // Computes the positions that the head's cache lacks, unless few are and no drafts are wanted of their slot. Then
  // appends drafts to the histories of items that want them.
  void draft(Slots& slots) override;
  void computed(const Batch& batch) override;

 private:
  // Hidden states of a slot that the head has not read: `held` from position `held_from` on, then those of the model's
  // latest batch, `count` from position `start` and row `row` on.
  struct Unread {
    int64_t sequence = -1;
    std::vector<float> rows;
    int held_from = 0, held = 0;
    int row = 0, start = 0, count = 0;

    int first() const { return held ? held_from : start; }
  };
  // Rows [first, end) of a slot; drafts: how many follow.
  struct Part {
    int slot, first, end, drafts;
  };
  const float* state(const Unread& unread, int position) const;
  void hold(Unread& unread, int first, int end);
  void plan(Slots& slots);
  void add(int slot, int position, int token, const float* hidden);

  const Runner& model_;
  const int max_rows_;
  std::vector<Unread> unread_;  // by slot
  std::vector<int> wanted_;     // drafts, by slot
  std::vector<Part> parts_;
};

}  // namespace as
