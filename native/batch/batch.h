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
  int begun = 0;    // tokens of the history that it began with
  int cached = 0;   // positions whose keys and values are in the cache
  int drafted = 0;  // of these, or of drafts beyond them, those in the draft model's cache
};

// In place of an id that is not known yet: that the step before draws after its output number `output`.
constexpr int32_t sampled_after(int output) { return ~output; }

// A position of a sequence to be computed.
struct Row {
  int slot, position, token;
};

// What is wanted of a row with an output, beside its hidden state perhaps: nothing, a token drawn after it, or the log
// probability of the id that follows it in the history.
enum class Wanted : uint8_t { nothing, sample, score };

// A row with an output. The history up to it has `history` ids. mask: 1 + the index of the mask (batch/masks.h) to draw
// under, 0 for none.
struct Output {
  int row, slot, history;
  Wanted wanted = Wanted::sample;
  int mask = 0;
};

// A slot's rows, which are adjacent: rows [row, row + count) are positions from `start` on; the last `drafts` are
// drafts.
struct Item {
  int slot, row, start, count, drafts;
  int output, outputs;  // adjacent, too: of the last rows that are no drafts, and of each draft
  int32_t flags;        // WorkFlags
  int adapter = -1;     // of its rows; -1: none

  bool samples() const { return flags & kSample; }
  // The first output after which a token is drawn: that of the last row that is no draft.
  int first_sample() const { return output + outputs - 1 - drafts; }
};

struct Batch {
  std::vector<Row> rows;
  std::vector<Output> outputs;
  std::vector<Item> items;
  const std::vector<Slot>* slots = nullptr;

  const Slot& slot(int index) const { return (*slots)[index]; }
};

// What was wanted of each of a batch's outputs. Every rank has the tokens, rank 0 the rest.
struct RunOutput {
  std::vector<SampleOutput> samples;
  std::vector<float> logits;  // [outputs, local vocabulary], if wanted
  int logit_width = 0;
  std::vector<float> hidden;  // [outputs of items with kHidden, hidden_width]
  int hidden_width = 0;
};

// The prefix cache's second tier.
class SpanStore {
 public:
  virtual ~SpanStore() = default;
  virtual int spans() const = 0;
  // Saves spans, then brings others back. Throws std::runtime_error for one that is not what was saved under its key.
  virtual void copy(const std::vector<SpanCopy>& saved, const std::vector<SpanCopy>& restored) = 0;
  // Where copy() only queues them: waits for the copies that were queued first, and says how many seconds they took.
  virtual double finish() { return 0; }
};

// A program compiled for a device, with its weights, its cache and its peers.
class Runner {
 public:
  virtual ~Runner() = default;
  virtual RunOutput run(const Batch& batch, bool want_logits) = 0;
};

}  // namespace as
