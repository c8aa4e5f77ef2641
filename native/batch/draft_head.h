// Drafts of the model itself (multi-token prediction: DeepSeek-V3 technical report, arXiv 2412.19437, section 2.2). A
// draft head has one layer more than the model, or several, each with a program of its own. The row of layer 1 at
// position p takes the model's hidden state of p and the token of p + 1, and predicts the token of p + 2; that of layer
// k takes the state of p of the layer before it and the token of p + k, and predicts that of p + k + 1. So draft k
// comes from layer k. For further drafts the last layer takes its own hidden state. All sample with the random numbers
// that the model will use.
//
// Their caches share the model's span tables. Entries of positions whose tokens are known are made from the model's
// hidden states alone, so entries of drafts are written again: of n layers, the rows of the last n - 1 positions. In a
// span that was found in the prefix cache, the last n entries were made with the tokens that followed in the sequence
// that filled the span. Drafts may suffer, outputs cannot.
//
// Hidden states stay in the device's memory, which has so many places: one for each row of the model's batch, one for
// each slot (the last layer's own state of the latest draft), and a ring for each slot, by position. The last
// kLast rows of an item keep their states in the ring, where they stay until the head reads them, and earlier rows in
// the places of the batch, which the head reads before the model's next batch. Several layers pass their states on in
// one more place for each row of a run.
#pragma once
#include <algorithm>
#include <utility>
#include <vector>

#include "batch/drafter.h"

namespace as {

class DraftHead : public Drafter {
 public:
  static constexpr int kLast = 16;
  // The most hidden states that are held of a slot that gets no drafts. Their rows are computed together later, which
  // reads the head's weights once: the more, the less a head costs that is never right, and the more memory it takes.
  static constexpr int held(int max_slots) { return std::clamp(kHeldOfAll / max_slots, kLeastHeld, kMostHeld); }
  static constexpr int places_of_slot(int max_slots) { return 1 + held(max_slots) + kLast; }
  // The most layers: fewer than are held at least, among which are the positions whose rows are computed again.
  static constexpr int kMostLayers = 8;
  // The most rows of a run of `layers` layers: those of a batch of the model, at least `layers` for each slot.
  static constexpr int run_rows(int max_rows, int max_slots, int layers) {
    return std::max(max_rows, layers * max_slots);
  }
  static constexpr size_t places(int max_rows, int max_slots, int layers) {
    return max_rows + (size_t)max_slots * places_of_slot(max_slots) +
           (layers > 1 ? run_rows(max_rows, max_slots, layers) : 0);
  }

  // layers: the programs of the draft head's layers in their order, 1 to kMostLayers, with the same spans. max_rows:
  // the most rows of a batch of the model; at least one for each slot.
  DraftHead(std::vector<Runner*> layers, int max_rows, int max_slots)
      : layers_(std::move(layers)), max_rows_(max_rows), held_(held(max_slots)), unread_(max_slots) {}

  // Computes the positions that the head's caches lack, unless few are and no drafts are wanted of any slot. Then
  // appends drafts to the histories of items that want them.
  void draft(Slots& slots) override;
  void place(Batch& batch) override;

 private:
  static constexpr int kLeastHeld = 16, kMostHeld = 64, kHeldOfAll = 1024;
  // The hidden states of a slot that the head may not have read: positions [first, end). Those of [start, ringed) are
  // in places of the batch, position p in place row + p, the others in the ring.
  struct Unread {
    int64_t sequence = -1;
    int first = 0, end = 0, start = 0, ringed = 0, row = 0;

    bool in_batch(int position) const { return start <= position && position < ringed; }
  };
  // Rows [first, end) of a slot. known: how many of its tokens are known; drafts: how many follow these; due: whether
  // they cannot wait for a later step.
  struct Part {
    int slot, first, end, known, drafts;
    bool due = true;
  };
  int depth() const { return (int)layers_.size(); }
  int ring() const { return held_ + kLast; }
  int own_place(int slot) const { return max_rows_ + slot; }
  int ring_place(int slot, int position) const {
    return max_rows_ + (int)unread_.size() + slot * ring() + position % ring();
  }
  int place_of(int slot, int position) const {
    const Unread& unread = unread_[slot];
    return unread.in_batch(position) ? unread.row + position : ring_place(slot, position);
  }
  // The first of the places in which layers pass states on.
  int passed_place() const { return max_rows_ + (int)unread_.size() * (1 + ring()); }
  void plan(Slots& slots);
  void add(int slot, int position, int token, int takes, int keeps);
  // Computes the rows of parts with every layer, as far as their tokens are known, and samples a draft of each layer
  // for those in `sampling`, which are in the order of the parts.
  void run(Slots& slots, const std::vector<Part>& parts, std::vector<Sampling>& sampling);

  const std::vector<Runner*> layers_;
  const int max_rows_, held_;
  std::vector<Unread> unread_;                 // by slot
  std::vector<const Slots::Pending*> coming_;  // by slot; null: the step has no item of it
  std::vector<Part> parts_;
};

}  // namespace as
