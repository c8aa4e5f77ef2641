// Logits processors that change few logits, on a range of the vocabulary.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "sampling/sampler.h"
#include "sampling/sampler_blob.h"

namespace as {
namespace sampling {

// Counts of tokens in a row's history. Kept between samples, because the arrays are too large to allocate each time.
struct Occurrences {
  std::vector<int32_t> counts;  // by offset in the range; all zero between samples
  std::vector<int32_t> touched;
};

// A penalty may overflow. The passes need finite values.
AS_BOTH inline float limited(float value) {
  return value <= 3.40282346638528859812e38f ? value : 3.40282346638528859812e38f;
}

// What the processors do to a logit.
AS_BOTH inline float repeated(float x, float penalty) { return limited(x > 0.0f ? x / penalty : x * penalty); }
AS_BOTH inline float lowered(float x, float by) { return limited(x - by); }
AS_BOTH inline float biased(float x, float by) { return limited(x + by); }

// Logits of a range. Records every change as (offset in the range, previous value).
class ChangedLogits {
 public:
  using Changes = std::vector<std::pair<int32_t, float>>;

  ChangedLogits(float* logits, Changes& changes) : x_(logits), changes_(changes) {}
  void repeat(int32_t i, float penalty) { set(i, repeated(x_[i], penalty)); }
  void lower(int32_t i, float by) { set(i, lowered(x_[i], by)); }
  void ban(int32_t i) {
    if (x_[i] != kBanned) set(i, kBanned);
  }
  void bias(int32_t i, float by) {
    if (x_[i] != kBanned) set(i, biased(x_[i], by));
  }

 private:
  void set(int32_t i, float value) {
    changes_.emplace_back(i, x_[i]);
    x_[i] = value;
  }

  float* x_;
  Changes& changes_;
};

// Logits: ChangedLogits or another class with the same functions on offsets in [begin, begin + size). For each id, the
// order is: repeated at most once, lowered at most once, banned at most once, biased.
template <class Logits>
class Processors {
 public:
  Processors(const SampleInput& input, int begin, int size, Occurrences& seen, Logits logits)
      : in_(input), p_(*input.params), begin_(begin), size_(size), seen_(seen), x_(logits) {}

  void run() {
    if (p_.repetition_penalty != 1.0f) {
      count(p_.suppress_repetition_in_generation ? generated_from() : 0);
      for (int32_t i : seen_.touched) x_.repeat(i, p_.repetition_penalty);
      forget();
    }
    if (p_.presence_penalty != 0.0f || p_.frequency_penalty != 0.0f) {
      count(generated_from());
      for (int32_t i : seen_.touched)
        x_.lower(i, p_.presence_penalty + p_.frequency_penalty * static_cast<float>(seen_.counts[i]));
      forget();
    }
    if (p_.no_repeat_ngram_size > 0) ban_ngrams();
    for (const auto& word : p_.bad_words) ban_word(word);
    if (in_.history_len < p_.min_length) {
      for (int32_t id : p_.eos) ban(id);
    }
    for (const auto& [id, bias] : p_.logit_bias) {
      const int64_t i = place_of(id);
      if (i >= 0) x_.bias(static_cast<int32_t>(i), bias);
    }
  }

 private:
  int generated_from() const { return std::min(std::max(p_.prompt_len, 0), in_.history_len); }

  // The offset of an id in this range; -1: outside.
  int64_t place_of(int32_t id) const {
    const int64_t i = static_cast<int64_t>(id) - begin_;
    return i >= 0 && i < size_ ? i : -1;
  }

  void ban(int32_t id) {
    const int64_t i = place_of(id);
    if (i >= 0) x_.ban(static_cast<int32_t>(i));
  }

  void count(int from) {
    if (seen_.counts.size() < static_cast<size_t>(size_)) seen_.counts.resize(size_, 0);
    seen_.touched.clear();
    for (int t = from; t < in_.history_len; ++t) {
      const int64_t i = place_of(in_.history[t]);
      if (i >= 0 && seen_.counts[i]++ == 0) seen_.touched.push_back(static_cast<int32_t>(i));
    }
  }

  void forget() {
    for (int32_t i : seen_.touched) seen_.counts[i] = 0;
  }

  // Bans every id that would complete an n-gram that is already in the history.
  void ban_ngrams() {
    const int n = p_.no_repeat_ngram_size;
    const int32_t* h = in_.history;
    const int last = in_.history_len - (n - 1);  // start of the incomplete n-gram
    for (int t = 0; t < last && t + n <= in_.history_len; ++t) {
      if (std::equal(h + t, h + t + n - 1, h + last)) ban(h[t + n - 1]);
    }
  }

  void ban_word(const std::vector<int32_t>& word) {
    const int prefix = static_cast<int>(word.size()) - 1;
    if (prefix < 0 || prefix > in_.history_len) return;
    // As in Hugging Face, a bad word that consists of an end-of-sequence id is ignored: otherwise nothing would ever
    // end.
    if (prefix == 0 && std::find(p_.eos.begin(), p_.eos.end(), word[0]) != p_.eos.end()) return;
    if (std::equal(word.begin(), word.end() - 1, in_.history + in_.history_len - prefix)) ban(word.back());
  }

  const SampleInput& in_;
  const SamplingParams& p_;
  int begin_, size_;
  Occurrences& seen_;
  Logits x_;
};

}  // namespace sampling
}  // namespace as
