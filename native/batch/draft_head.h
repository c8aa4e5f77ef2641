// Drafts of the model itself (multi-token prediction: DeepSeek-V3 technical report, arXiv 2412.19437, section 2.2). A
// draft head is one more layer. Its row at position p takes the model's hidden state of p and the token of p + 1, and
// predicts the token of p + 2; for further drafts it takes its own hidden state. It samples with the random numbers
// that the model will use.
//
// Its cache shares the model's span tables. Entries of positions whose tokens are known are made from the model's
// hidden states alone, so entries of drafts are written again. In a span that was found in the prefix cache, the last
// entry was made with the token that followed in the sequence that filled the span. Drafts may suffer, outputs cannot.
//
// Hidden states stay in the device's memory, which has so many places: one for each row of the model's batch, one for
// each slot (the head's own state of the latest draft), and a ring of kRing for each slot, by position. The last kLast
// rows of an item keep their states in the ring, where they stay until the head reads them, and earlier rows in the
// places of the batch, which the head reads before the model's next batch.
#pragma once
#include <vector>

#include "batch/drafter.h"

namespace as {

class DraftHead : public Drafter {
 public:
  // The most hidden states that are held of a slot that gets no drafts. Their rows are computed together later, which
  // reads the head's weights once.
  static constexpr int kHeld = 16;
  static constexpr int kLast = 16, kRing = kHeld + kLast;
  static constexpr int kPlacesOfSlot = 1 + kRing;
  static constexpr size_t places(int max_rows, int max_slots) { return max_rows + (size_t)max_slots * kPlacesOfSlot; }

  // head: the draft head's program, with the same spans. max_rows: the most rows of a batch of the model, and of one
  // run of the head; at least one for each slot.
  DraftHead(Runner& head, int max_rows, int max_slots) : Drafter(head, 2), max_rows_(max_rows), unread_(max_slots) {}

  // Computes the positions that the head's cache lacks, unless few are and no drafts are wanted of their slot. Then
  // appends drafts to the histories of items that want them.
  void draft(Slots& slots) override;
  void place(Batch& batch) override;

 private:
  // The hidden states of a slot that the head may not have read: positions [first, end). Those of [start, ringed) are
  // in places of the batch, position p in place row + p, the others in the ring.
  struct Unread {
    int64_t sequence = -1;
    int first = 0, end = 0, start = 0, ringed = 0, row = 0;

    bool in_batch(int position) const { return start <= position && position < ringed; }
  };
  // Rows [first, end) of a slot; drafts: how many follow.
  struct Part {
    int slot, first, end, drafts;
  };
  int own_place(int slot) const { return max_rows_ + slot; }
  int ring_place(int slot, int position) const {
    return max_rows_ + (int)unread_.size() + slot * kRing + position % kRing;
  }
  int place_of(int slot, int position) const {
    const Unread& unread = unread_[slot];
    return unread.in_batch(position) ? unread.row + position : ring_place(slot, position);
  }
  void plan(Slots& slots);
  void add(int slot, int position, int token, int takes);

  const int max_rows_;
  std::vector<Unread> unread_;                 // by slot
  std::vector<const Slots::Pending*> coming_;  // by slot; null: the step has no item of it
  std::vector<Part> parts_;
};

}  // namespace as
