// The step plan that rank 0 sends, version 2: see allspark_server/runtime/plan.py, which writes it and has the layout.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "sampling/sampler.h"

namespace as {

// A sequence enters a slot. Its first `cached` positions are in the cache already (in spans that its first item
// brings).
struct NewSequence {
  int slot, cached;
  SamplingParams sampling;
  std::vector<int32_t> history;
};

// What an item's flags say.
enum WorkFlags : int32_t {
  kSample = 1,      // a token is drawn after the last row, which is the history's last
  kLookup = 2,      // drafts are looked up in the history
  kGiven = 4,       // the last known ids are drafts
  kDraftModel = 8,  // drafts are the draft model's
  kHidden = 16,     // hidden states of the rows with outputs are wanted
  kPromptLogprobs = 32,
  kAllFlags = 63,
};

// Rows of one slot, from its first position that is not in the cache on.
struct Work {
  int slot, rows, outputs, drafts;
  int32_t flags;
  int adapter, mask;
  std::vector<int32_t> known;               // appended to the history first
  std::vector<std::vector<int32_t>> spans;  // appended to the tables of each cache group

  bool samples() const { return flags & kSample; }
};

// In a span table: no span, as a window has left its positions behind.
constexpr int32_t kNoSpan = -1;

// Names what a full span holds (allspark_server/cache/span_keys.py). Of zeros: nothing.
using SpanKey = std::array<uint64_t, 2>;

// A span of the cache goes to one of the second tier, or comes back from there.
struct SpanCopy {
  int32_t span, host;
  SpanKey key;
};

struct Plan {
  std::vector<int32_t> free;
  std::vector<NewSequence> fresh;
  std::vector<Work> work;
  std::vector<SpanCopy> saved, restored;  // before the rows are computed, in this order

  // Throws std::invalid_argument on anything that is not a whole, well-formed plan of `groups` cache groups.
  static Plan parse(const std::string& bytes, int groups);
};

}  // namespace as
