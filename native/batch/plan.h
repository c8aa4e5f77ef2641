// The step plan that rank 0 sends, version 2. allspark_server/runtime/plan.py writes it and documents the layout.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "sampling/sampler.h"

namespace as {

// A sequence that enters a slot. Its first `cached` positions are already cached (its first item lists the spans).
struct NewSequence {
  int slot, cached;
  SamplingParams sampling;
  std::vector<int32_t> history;
};

// An item's flags.
enum WorkFlags : int32_t {
  kSample = 1,      // sample a token after the last row, which is the history's last id
  kLookup = 2,      // look up drafts in the history
  kGiven = 4,       // the last known ids are drafts
  kDraftModel = 8,  // the draft model makes drafts
  kHidden = 16,     // output hidden states of the rows with outputs
  kPromptLogprobs = 32,
  kAllFlags = 63,
};

// Rows of one slot, from its first position that is not in the cache.
struct Work {
  int slot, rows, outputs, drafts;
  int32_t flags;
  int adapter, mask;
  std::vector<int32_t> known;               // ids that are appended to the history first
  std::vector<std::vector<int32_t>> spans;  // appended to the span table of each cache group

  bool samples() const { return flags & kSample; }
};

// In a span table: no span, because the attention window no longer covers its positions.
constexpr int32_t kNoSpan = -1;

// Identifies the content of a full span (allspark_server/cache/span_keys.py). All zeros: none.
using SpanKey = std::array<uint64_t, 2>;

// A copy of a span between the cache and the second tier.
struct SpanCopy {
  int32_t span, host;
  SpanKey key;
};

// A copy of a slot's recurrent state at this position to spans, or from them.
struct StateCopy {
  int32_t slot, position;
  std::vector<int32_t> spans;
};

// Rows that a program takes as they are for positions [position, position + rows) of a slot: embeddings of an image, or
// the patches of one. values: [rows, width], in the plan's bytes, unless they had to be copied, or keep() was called.
struct GivenRows {
  int32_t slot, position, rows, width;
  const float* values;
  std::vector<float> own;

  // Copies the values, so that they outlive the plan's bytes.
  void keep() {
    if (!own.empty()) return;
    own.assign(values, values + (size_t)rows * width);
    values = own.data();
  }
};

// The rotary positions (time, height, width) of a slot's first positions. Those of later ones are the position + delta.
struct RotaryPositions {
  int32_t slot, delta;
  std::vector<int32_t> parts;  // [positions, 3]
};

// Positions of a slot's sequence between which attention is another.
struct SlotPlaces {
  int32_t slot;
  std::vector<int32_t> places;
};

// A step that runs in parts may be cut within an op: an op has so many positions.
constexpr int kOpPositions = 1 << 16;

struct Plan {
  std::vector<int32_t> free;
  std::vector<NewSequence> fresh;
  std::vector<Work> work;
  // Copied before the rows are computed, in this order.
  std::vector<SpanCopy> saved, restored;
  std::vector<StateCopy> saved_states, loaded_states;
  std::vector<GivenRows> given;
  std::vector<RotaryPositions> positions;
  // Where the segments of a slot's rows end, for attention within segments. The last one ends with the sequence.
  std::vector<SlotPlaces> segments;
  // [begin, end) of each image of a slot, for attention in both directions within an image.
  std::vector<SlotPlaces> images;
  // Only the part [from, to) of the program is run, in kOpPositions-ths of an op; to 0: all of it. The parts after the
  // first one have no work of their own.
  int from = 0, to = 0;

  // Throws std::invalid_argument unless `bytes` is a complete, well-formed plan for `groups` cache groups. They must
  // outlive the given rows of the plan.
  static Plan parse(std::string_view bytes, int groups);
};

}  // namespace as
