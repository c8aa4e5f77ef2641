// The draft head's bookkeeping (batch/draft_head.h) against a model of it: see test_draft_layers.py.
//
//   draft_layers SEED LAYERS STEPS
//
// Runs random steps of random sequences. Hidden states, cache entries and tokens are hashes of all that they depend on,
// so a row that takes another state, another token or another entry than it should makes another draft. Expected drafts
// are made anew for each from the sequence's tokens. Prints how many drafts were made and how many were right.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "batch/draft_head.h"

namespace {

constexpr int kSlots = 3, kRows = 24, kLength = 240, kSpan = 16, kVocabulary = 97, kMostDrafts = 12;
using Hash = uint64_t;
using Tokens = std::vector<int32_t>;

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

Hash mix(Hash a, Hash b) {
  Hash x = (a ^ (b + 0x9e3779b97f4a7c15)) * 0xbf58476d1ce4e5b9;
  x ^= x >> 31, x *= 0x94d049bb133111eb;
  return x ^ (x >> 29);
}

// The model's state of the last of the first `count` tokens, and the token that follows these.
Hash state_of(const Tokens& tokens, int count) {
  Hash h = 1;
  for (int i = 0; i < count; i++) h = mix(h, tokens.at(i));
  return h;
}
int next_of(const Tokens& tokens, int count) { return int(state_of(tokens, count) % kVocabulary); }

// A row of a layer: what its cache keeps, its state, and the token that it predicts behind the first `count` tokens,
// which is right in six of ten cases.
Hash entry_of(int layer, Hash state, int token) { return mix(mix(layer, state), token); }
Hash row_of(const std::vector<Hash>& entries, int position) {
  Hash h = 2;
  for (int i = 0; i <= position; i++) h = mix(h, entries.at(i));
  return h;
}
int draft_of(Hash state, const Tokens& tokens, int count) {
  return state % 10 < 6 ? next_of(tokens, count) : int(state / 10 % kVocabulary);
}

std::vector<Hash> places;  // hidden states

struct Model : as::Runner {
  as::RunOutput run(const as::Batch& batch, bool) override {
    require(batch.rows.size() == batch.keeps.size(), "a row without a place");
    as::RunOutput out;
    for (size_t r = 0; r < batch.rows.size(); r++) {
      const as::Row& row = batch.rows[r];
      places.at(batch.keeps[r]) = state_of(batch.slot(row.slot).history, row.position + 1);
    }
    for (const as::Output& output : batch.outputs) {
      out.samples.emplace_back();
      out.samples.back().token = next_of(batch.slot(output.slot).history, batch.rows.at(output.row).position + 1);
    }
    return out;
  }
};

struct Layer : as::Runner {
  explicit Layer(int number, int rows) : number(number), rows(rows), cache(kSlots, std::vector<Hash>(kLength)) {}
  as::RunOutput run(const as::Batch& batch, bool) override {
    const size_t count = batch.rows.size();
    require(count > 0 && (int)count <= rows, "a run of no rows, or of too many");
    require(batch.takes.size() == count && batch.keeps.size() == count, "a row without a place");
    std::vector<Hash> states(count);
    for (size_t r = 0; r < count; r++) states[r] = places.at(batch.takes[r]);
    for (size_t r = 0; r < count; r++) {
      const as::Row& row = batch.rows[r];
      std::vector<Hash>& entries = cache.at(row.slot);
      entries.at(row.position) = entry_of(number, states[r], row.token);
      states[r] = row_of(entries, row.position);
    }
    for (size_t r = 0; r < count; r++)
      if (batch.keeps[r] >= 0) places.at(batch.keeps[r]) = states[r];
    as::RunOutput out;
    for (const as::Output& output : batch.outputs) {
      const Tokens& history = batch.slot(output.slot).history;
      require(output.history == (int)history.size(), "a draft that does not follow the history");
      out.samples.emplace_back();
      out.samples.back().token = draft_of(states.at(output.row), history, (int)history.size());
    }
    return out;
  }
  const int number, rows;
  std::vector<std::vector<Hash>> cache;  // by slot
};

// The drafts that follow `tokens`, of which the model has computed all but the last.
Tokens expected(Tokens tokens, int layers, int count) {
  const int known = (int)tokens.size();
  int end = known - 1;  // rows of a layer
  std::vector<Hash> states, entries;
  for (int p = 0; p < end; p++) states.push_back(state_of(tokens, p + 1));
  for (int i = 0; i < count; i++) {
    const int layer = std::min(i + 1, layers);
    if (i < layers) {
      entries.clear();
      std::vector<Hash> own;
      for (int p = 0; p < end; p++) {
        entries.push_back(entry_of(layer, states[p], tokens[p + layer]));
        own.push_back(row_of(entries, p));
      }
      states.swap(own);
    } else {
      entries.push_back(entry_of(layer, states.back(), tokens.back()));
      states.push_back(row_of(entries, end++));
    }
    tokens.push_back(draft_of(states.back(), tokens, (int)tokens.size()));
  }
  return {tokens.begin() + known, tokens.end()};
}

}  // namespace

int main(int words, char** word) {
  require(words == 4, "draft_layers SEED LAYERS STEPS");
  std::mt19937_64 rng(std::atoi(word[1]));
  const int layers = std::atoi(word[2]), steps = std::atoi(word[3]);
  const auto below = [&](int n) { return int(rng() % n); };
  as::SlotLimits limits;
  limits.max_rows = limits.max_outputs = kRows, limits.max_slots = kSlots, limits.max_length = kLength;
  limits.span_size = kSpan, limits.num_spans = kSlots * kLength, limits.windows = {0};
  places.assign(as::DraftHead::places(kRows, kSlots, layers), 0);
  Model model;
  std::vector<std::unique_ptr<Layer>> made;
  std::vector<as::Runner*> programs;
  for (int i = 0; i < layers; i++) {
    made.push_back(std::make_unique<Layer>(i + 1, as::DraftHead::run_rows(kRows, kSlots, layers)));
    programs.push_back(made.back().get());
  }
  const auto head = as::make_drafter(programs, true, limits);
  as::Slots slots(limits);
  long drafts = 0, right = 0;
  std::vector<int> calm(kSlots);  // steps in which a slot gets no drafts
  for (int step = 0; step < steps; step++) {
    as::Plan plan;
    int rows = kRows;
    std::vector<std::pair<int, Tokens>> awaited;
    for (int s = 0; s < kSlots; s++) {
      as::Slot& slot = slots.slot(s);
      bool fresh = !slot.live;
      if (slot.live && (below(60) == 0 || (int)slot.history.size() > kLength - 30))
        plan.free.push_back(s), fresh = true;
      Tokens history = slot.history;
      int cached = slot.cached, table = fresh ? 0 : (int)slot.spans[0].size();
      if (fresh) {
        history.clear(), cached = 0;
        for (int i = 1 + below(below(2) ? 70 : 4); i > 0; i--) history.push_back(below(kVocabulary));
        plan.fresh.push_back({s, 0, {}, history});
      }
      if (rows == 0 || below(5) == 0) continue;
      as::Work work{};
      work.slot = s, work.adapter = -1, work.spans.resize(1);
      const int left = (int)history.size() - cached;
      if (left == 1 && below(12) == 0)  // tokens from elsewhere
        for (int i = 1 + below(20); i > 0; i--) work.known.push_back(below(kVocabulary));
      const int known = left + (int)work.known.size();
      work.rows = std::min(rows, below(3) ? known : 1 + below(known));
      if (work.rows == known) {
        work.flags = as::kSample, work.outputs = 1;
        calm[s] = calm[s] ? calm[s] - 1 : below(15) ? 0 : below(3) ? below(40) : below(100);
        const int most = std::min(rows - work.rows, kMostDrafts);
        if (most > 0 && !calm[s] && known == 1) {
          work.drafts = 1 + below(most);
          if (below(4) == 0) {  // given, and right up to a place
            work.flags |= as::kGiven;
            Tokens all = history;
            for (int i = 0, wrong = below(work.drafts + 1); i < work.drafts; i++) {
              all.push_back(i == wrong ? below(kVocabulary) : next_of(all, (int)all.size()));
              work.known.push_back(all.back());
            }
          } else {
            work.flags |= as::kDraftModel;
            if (cached > 0) awaited.emplace_back(s, expected(history, layers, work.drafts));
          }
        }
      }
      rows -= work.rows + work.drafts;
      for (; table * kSpan < cached + work.rows + work.drafts; table++) work.spans[0].push_back(table);
      plan.work.push_back(work);
    }
    slots.begin(plan);
    std::vector<int> sizes;
    for (const auto& [s, tokens] : awaited) sizes.push_back((int)slots.slot(s).history.size());
    head->draft(slots);
    for (size_t i = 0; i < awaited.size(); i++) {
      const Tokens& history = slots.slot(awaited[i].first).history;
      require(Tokens(history.begin() + sizes[i], history.end()) == awaited[i].second, "other drafts than expected");
      drafts += (long)awaited[i].second.size();
    }
    as::Batch& batch = slots.batch();
    if (batch.empty()) continue;
    head->place(batch);
    const as::RunOutput result = model.run(batch, false);
    for (const as::Slots::Accepted& item : slots.accept(batch, result.samples)) right += item.count - 1;
  }
  std::printf("%ld %ld\n", drafts, right);
}
