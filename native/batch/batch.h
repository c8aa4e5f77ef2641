// The rows of one step, in the form that backends take. Slots makes them from a step plan.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "batch/lookup.h"
#include "batch/plan.h"

namespace as {

// A rank's state of a running sequence.
struct Slot {
  bool live = false;
  int64_t sequence = 0;  // counts the sequences that the slot has held
  SamplingParams sampling;
  std::vector<int32_t> history;             // during a step also the drafts that it verifies
  std::vector<std::vector<int32_t>> spans;  // by cache group: the sequence's span table
  Lookup lookup;
  std::vector<int32_t> parts;  // rotary positions (time, height, width) of the first positions
  int delta = 0;               // how far those of later ones are ahead of the position
  // [begin, end) of each image, for attention in both directions within them
  std::vector<int32_t> images;
  std::vector<int32_t> segments;  // where they end, for attention within segments
  int begun = 0;                  // length of the history when the sequence entered
  int first = 0;                  // positions that were in the cache when it entered
  int cached = 0;                 // positions whose keys and values are in the cache
  int drafted = 0;  // positions in the cache of the draft model, which may include drafts, or of the draft head

  // A part of a position's rotary position: 0 for time, 1 for height, 2 for width.
  int rotary_position(int position, int part) const {
    return 3 * (size_t)position < parts.size() ? parts[3 * (size_t)position + part] : position + delta;
  }
};

// A placeholder for an id that is not known yet: the token that the previous step samples from its output `output`.
constexpr int32_t sampled_after(int output) { return ~output; }

// A position of a sequence to compute.
struct Row {
  int slot, position, token;
};

// What a row's output is used for besides its hidden state: nothing, sampling the next token, or the log probability of
// the id that follows in the history.
enum class Wanted : uint8_t { nothing, sample, score };

// A row with an output. history: how many ids the history has up to and including the row. mask: 1 + the index of the
// mask (batch/masks.h) to sample under; 0: none.
struct Output {
  int row, slot, history;
  Wanted wanted = Wanted::sample;
  int mask = 0;
};

// A slot's adjacent rows: row `row + i` is position `start + i`, for i < count. The last `drafts` rows are drafts.
struct Item {
  int slot, row, start, count, drafts;
  int output, outputs;  // also adjacent: of the last rows that are not drafts, and of every draft
  int32_t flags;        // WorkFlags
  int adapter = -1;     // of the item's rows; -1: none

  bool samples() const { return flags & kSample; }
  // The first output that samples a token. It belongs to the last row that is not a draft.
  int first_sample() const { return output + outputs - 1 - drafts; }
};

// The states of recurrent layers advance at multiples of this many positions (docs/decisions/recurrent.md).
constexpr int kStateStep = 64;
// The position of the state after `positions` rows of known tokens.
constexpr int state_position(int positions) { return positions / kStateStep * kStateStep; }

struct Batch {
  std::vector<Row> rows;
  std::vector<Output> outputs;
  std::vector<Item> items;
  // Copies of the slots' recurrent states to and from spans, made before the rows are computed; saves come first.
  std::vector<StateCopy> saved_states, loaded_states;
  // If there is a draft head: the place where each row's hidden state is kept, -1: nowhere; in the head's own batches
  // also the place of the state that each row takes (batch/draft_head.h).
  std::vector<int> keeps, takes;
  // Of each row, the row that the plan gives for it; null if it gives none. Empty if it gives no rows at all.
  std::vector<const float*> given;
  const std::vector<Slot>* slots = nullptr;

  const Slot& slot(int index) const { return (*slots)[index]; }
  const float* given_row(int row) const { return given.empty() ? nullptr : given[row]; }
  // Whether there is nothing to do.
  bool empty() const { return rows.empty() && saved_states.empty() && loaded_states.empty(); }
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
  // Saves spans, then restores others. Throws std::runtime_error if a restored span was saved under another key.
  virtual void copy(const std::vector<SpanCopy>& saved, const std::vector<SpanCopy>& restored) = 0;
  // If copy() only queues copies: waits for the oldest queued ones and returns the seconds that they took.
  virtual double finish() { return 0; }
};

// A program compiled for a device, with its weights, cache and peers.
class Runner {
 public:
  virtual ~Runner() = default;
  virtual RunOutput run(const Batch& batch, bool want_logits) = 0;
  // Runs the part [from, to) of the program's positions (plan.h), the parts of a batch in order and with no other batch
  // in between. The last one has the results. The bits are those of run(). All ranks run the same parts.
  virtual RunOutput run_part(const Batch&, int /*from*/, int /*to*/) {
    throw std::invalid_argument("this backend does not run a step's ops in parts");
  }
  // Where the last part ends.
  virtual int positions() const { return 0; }
};

}  // namespace as
