// One step's rows, as backends get them: what a step plan makes of the slots.
#pragma once
#include <cstdint>
#include <vector>

#include "batch/lookup.h"
#include "batch/plan.h"

namespace as {

// What a rank keeps of a running sequence.
struct Slot {
  bool live = false;
  SamplingParams sampling;
  std::vector<int32_t> history;             // during a step with the drafts that it tries
  std::vector<std::vector<int32_t>> spans;  // by cache group: where its positions are
  Lookup lookup;
  int cached = 0;   // positions whose keys and values are in the cache
  int drafted = 0;  // of these, or of drafts beyond them, those in the draft model's cache
};

// A position of a sequence to be computed.
struct Row {
  int slot, position, token;
};

// A row whose logits are wanted: a token is drawn after it, from a history of `history` ids.
struct Output {
  int row, slot, history;
};

// A slot's rows, which are adjacent: rows [row, row + count) are positions from `start` on; the last `drafts` are
// drafts.
struct Item {
  int slot, row, start, count, drafts;
  int output, outputs;  // adjacent, too: of the last row that is no draft, and of each draft
  bool draws;           // else nobody wants the tokens, but logits perhaps
};

struct Batch {
  std::vector<Row> rows;
  std::vector<Output> outputs;
  std::vector<Item> items;
  const std::vector<Slot>* slots = nullptr;

  const Slot& slot(int index) const { return (*slots)[index]; }
};

// What was drawn after each of a batch's outputs. Every rank has the tokens, rank 0 the rest.
struct Drawn {
  std::vector<SampleOutput> samples;
  std::vector<float> logits;  // [outputs, local vocabulary], if wanted
  int logit_width = 0;
};

// A program compiled for a device, with its weights, its cache and its peers.
class Runner {
 public:
  virtual ~Runner() = default;
  virtual Drawn run(const Batch& batch, bool want_logits) = 0;
};

}  // namespace as
