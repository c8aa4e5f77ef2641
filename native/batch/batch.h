// One step's rows as backends get them. Slots make them from a step plan.
#pragma once
#include <cstdint>
#include <vector>

#include "batch/lookup.h"
#include "batch/plan.h"

namespace as {

// The state that a rank keeps of a running sequence.
struct Slot {
  bool live = false;
  SamplingParams sampling;
  std::vector<int32_t> history;             // during a step, with the drafts that it tries
  std::vector<std::vector<int32_t>> spans;  // by cache group: the sequence's span table
  Lookup lookup;
  int begun = 0;    // length of the history when the sequence entered
  int cached = 0;   // positions whose keys and values are in the cache
  int drafted = 0;  // positions in the draft model's cache, which may include drafts
};

// Stands for an id that is not known yet: the one that the previous step samples after its output `output`.
constexpr int32_t sampled_after(int output) { return ~output; }

// A position of a sequence to compute.
struct Row {
  int slot, position, token;
};

// What a row's output is for, besides its hidden state: nothing, sampling a token after it, or the log probability of
// the id that follows it in the history.
enum class Wanted : uint8_t { nothing, sample, score };

// A row with an output. `history`: ids up to and including the row. mask: 1 + the index of the mask (batch/masks.h) to
// sample under, 0 for none.
struct Output {
  int row, slot, history;
  Wanted wanted = Wanted::sample;
  int mask = 0;
};

// A slot's rows, which are adjacent: rows [row, row + count) are positions from `start` on. The last `drafts` of them
// are drafts.
struct Item {
  int slot, row, start, count, drafts;
  int output, outputs;  // adjacent, too: of the last rows that are not drafts, and of each draft
  int32_t flags;        // WorkFlags
  int adapter = -1;     // of its rows; -1: none

  bool samples() const { return flags & kSample; }
  // The first output after which a token is sampled: that of the last row that is not a draft.
  int first_sample() const { return output + outputs - 1 - drafts; }
};

struct Batch {
  std::vector<Row> rows;
  std::vector<Output> outputs;
  std::vector<Item> items;
  const std::vector<Slot>* slots = nullptr;

  const Slot& slot(int index) const { return (*slots)[index]; }
};

// The results of a batch's outputs. Every rank has the tokens; only rank 0 has the rest.
struct RunOutput {
  std::vector<SampleOutput> samples;
  std::vector<float> logits;  // [outputs, local vocabulary], on request
  int logit_width = 0;
  std::vector<float> hidden;  // [outputs of items with kHidden, hidden_width]
  int hidden_width = 0;
};

// The prefix cache's second tier, in host memory.
class SpanStore {
 public:
  virtual ~SpanStore() = default;
  virtual int spans() const = 0;
  // Saves spans, then restores others. Throws std::runtime_error if a span is not the one saved under its key.
  virtual void copy(const std::vector<SpanCopy>& saved, const std::vector<SpanCopy>& restored) = 0;
  // Where copy() only queues the copies: waits for the copies queued first and returns the seconds that they took.
  virtual double finish() { return 0; }
};

// A program compiled for a device, with its weights, cache and peers.
class Runner {
 public:
  virtual ~Runner() = default;
  virtual RunOutput run(const Batch& batch, bool want_logits) = 0;
};

}  // namespace as
