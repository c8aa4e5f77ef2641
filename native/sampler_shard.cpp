// A rank's side of a draw: logits processors and the passes over one shard of the vocabulary.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>

#include "sampler.h"
#include "sampler_blob.h"

namespace as {

namespace {

using namespace sampling;

#include "logit_passes.h"

constexpr int kNucleusCandidates = 1024;  // of each rank; a wider nucleus takes the second round

template <class T>
void put(std::vector<uint8_t>& blob, const T* values, size_t count) {
  const uint8_t* bytes = reinterpret_cast<const uint8_t*>(values);
  blob.insert(blob.end(), bytes, bytes + count * sizeof(T));
}

// ---- processors
// --------------------------------------------------------------------------------------------------------

// Working memory of a thread: rows of a vocabulary are too large to allocate for every draw.
struct Scratch {
  std::vector<float> groups;  // maxima (LogitKernels::group_max)
  std::vector<float> masked;  // logits under a mask
  std::vector<float> order;   // for the threshold
  std::vector<double> sums;
  std::vector<int32_t> counts;  // occurrences by local id; all zero between draws
  std::vector<int32_t> touched;
  std::vector<std::pair<int32_t, float>> undo;
};

Scratch& scratch() {
  thread_local Scratch s;
  return s;
}

// Applies the sparse processors to one shard and remembers what was there before.
class Processors {
 public:
  Processors(const SampleInput& input, int begin, int local, float* logits, Scratch& s)
      : in_(input), p_(*input.params), begin_(begin), local_(local), x_(logits), s_(s) {}

  void run() {
    s_.undo.clear();
    if (p_.repetition_penalty != 1.0f) {
      count(p_.suppress_repetition_in_generation ? generated_from() : 0);
      for (int32_t i : s_.touched) {
        const float v = x_[i];
        set(i, v > 0.0f ? v / p_.repetition_penalty : v * p_.repetition_penalty);
      }
      forget();
    }
    if (p_.presence_penalty != 0.0f || p_.frequency_penalty != 0.0f) {
      count(generated_from());
      for (int32_t i : s_.touched) {
        set(i, x_[i] - (p_.presence_penalty + p_.frequency_penalty * static_cast<float>(s_.counts[i])));
      }
      forget();
    }
    if (p_.no_repeat_ngram_size > 0) ban_ngrams();
    for (const auto& word : p_.bad_words) ban_word(word);
    if (in_.history_len < p_.min_length) {
      for (int32_t id : p_.eos) ban(id);
    }
  }

  void undo() {
    for (auto it = s_.undo.rbegin(); it != s_.undo.rend(); ++it) x_[it->first] = it->second;
  }

 private:
  int generated_from() const { return std::min(std::max(p_.prompt_len, 0), in_.history_len); }

  void set(int32_t i, float value) {
    s_.undo.emplace_back(i, x_[i]);
    // A penalty may overflow; the passes need numbers no larger than the largest float.
    x_[i] = value <= std::numeric_limits<float>::max() ? value : std::numeric_limits<float>::max();
  }

  void ban(int32_t id) {
    const int64_t i = static_cast<int64_t>(id) - begin_;
    if (i >= 0 && i < local_ && x_[i] != kBanned) {
      s_.undo.emplace_back(static_cast<int32_t>(i), x_[i]);
      x_[i] = kBanned;
    }
  }

  void count(int from) {
    if (s_.counts.size() < static_cast<size_t>(local_)) s_.counts.resize(local_, 0);
    s_.touched.clear();
    for (int t = from; t < in_.history_len; ++t) {
      const int64_t i = static_cast<int64_t>(in_.history[t]) - begin_;
      if (i >= 0 && i < local_ && s_.counts[i]++ == 0) s_.touched.push_back(static_cast<int32_t>(i));
    }
  }

  void forget() {
    for (int32_t i : s_.touched) s_.counts[i] = 0;
  }

  // Bans every id that would complete an n-gram that the history already holds.
  void ban_ngrams() {
    const int n = p_.no_repeat_ngram_size;
    const int32_t* h = in_.history;
    const int last = in_.history_len - (n - 1);  // where the open n-gram starts
    for (int t = 0; t < last && t + n <= in_.history_len; ++t) {
      if (std::equal(h + t, h + t + n - 1, h + last)) ban(h[t + n - 1]);
    }
  }

  void ban_word(const std::vector<int32_t>& word) {
    const int prefix = static_cast<int>(word.size()) - 1;
    if (prefix < 0 || prefix > in_.history_len) return;
    // As Hugging Face has it: a bad word that is an end-of-sequence id alone is left out, or nothing would ever end.
    if (prefix == 0 && std::find(p_.eos.begin(), p_.eos.end(), word[0]) != p_.eos.end()) return;
    if (std::equal(word.begin(), word.end() - 1, in_.history + in_.history_len - prefix)) ban(word.back());
  }

  const SampleInput& in_;
  const SamplingParams& p_;
  int begin_, local_;
  float* x_;
  Scratch& s_;
};

// ---- passes over a shard
// -----------------------------------------------------------------------------------------------

size_t group_count(int n) { return static_cast<size_t>((n + kChunk - 1) / kChunk) * kLanes; }

void refresh_group(const float* x, int n, int i, float* groups) {
  const int chunk = i / kChunk;
  const int lane = i % kLanes;
  const int end = std::min(n, (chunk + 1) * kChunk);
  float top = kBanned;
  for (int k = chunk * kChunk + lane; k < end; k += kLanes) top = std::max(top, x[k]);
  groups[chunk * kLanes + lane] = top;
}

float max_of(const float* groups, size_t count) {
  float top = kBanned;
  for (size_t g = 0; g < count; ++g) top = std::max(top, groups[g]);
  return top;
}

// Calls visit(i) for every i with x[i] >= threshold, passing over groups that hold none. Not in the order of i.
template <class Visit>
void visit_at_least(const float* x, int n, const float* groups, float threshold, Visit visit) {
  const size_t count = group_count(n);
  for (size_t g = 0; g < count; ++g) {
    if (!(groups[g] >= threshold) || groups[g] == kBanned) continue;
    const int chunk = static_cast<int>(g) / kLanes;
    const int end = std::min(n, (chunk + 1) * kChunk);
    for (int i = chunk * kChunk + static_cast<int>(g) % kLanes; i < end; i += kLanes) {
      if (x[i] >= threshold && x[i] != kBanned) visit(i);
    }
  }
}

int first_of_value(const float* x, int n, const float* groups, float value) {
  int best = n;
  visit_at_least(x, n, groups, value, [&](int i) { best = std::min(best, i); });
  return best < n ? best : -1;
}

// The `want` best finite logits, sorted by (value descending, id ascending). True if finite ones were left out.
bool select_best(const float* x, int n, int begin, Scratch& s, int want, std::vector<Candidate>& out) {
  out.clear();
  const size_t groups = group_count(n);
  float threshold = kBanned;
  if (static_cast<size_t>(want) < groups) {
    // At least `want` logits reach the want-th largest of the groups' maxima.
    s.order.assign(s.groups.begin(), s.groups.begin() + groups);
    std::nth_element(s.order.begin(), s.order.begin() + (want - 1), s.order.end(), std::greater<float>());
    threshold = s.order[want - 1];
  }
  visit_at_least(x, n, s.groups.data(), threshold, [&](int i) { out.push_back({begin + i, x[i], x[i]}); });
  bool more = out.size() > static_cast<size_t>(want);
  if (more) {
    std::nth_element(out.begin(), out.begin() + want, out.end(), better);
    out.resize(want);
  } else if (threshold != kBanned) {
    visit_at_least(x, n, s.groups.data(), kBanned, [&](int i) { more = more || x[i] < threshold; });
  }
  std::sort(out.begin(), out.end(), better);
  return more;
}

double total(const std::vector<double>& sums, size_t count) {
  double sum = 0.0;
  for (size_t c = 0; c < count; ++c) sum += sums[c];
  return sum;
}

// Index drawn from exp((x[i] - shift) * scale), given the sums of its chunks; -1 if all weights are 0.
int draw_index(const float* x, int n, float shift, float scale, const std::vector<double>& sums, double sum,
               double uniform) {
  const int chunks = (n + kChunk - 1) / kChunk;
  double left = uniform * sum;
  int chunk = -1;
  for (int c = 0; c < chunks; ++c) {
    if (sums[c] <= 0.0) continue;
    chunk = c;  // the last chunk with weight takes what rounding leaves over
    if (left < sums[c]) break;
    left -= sums[c];
  }
  if (chunk < 0) return -1;
  float weights[kChunk];
  const int begin = chunk * kChunk;
  const int count = std::min(kChunk, n - begin);
  logit_kernels().exp_values(x + begin, count, shift, scale, weights);
  int pick = -1;
  for (int i = 0; i < count; ++i) {
    if (weights[i] <= 0.0f) continue;
    pick = begin + i;
    if (left < weights[i]) break;
    left -= weights[i];
  }
  return pick;
}

size_t make_blob(const SampleInput& input, int begin, int local, int vocab_size, bool dense,
                 std::vector<uint8_t>& blob) {
  if (begin < 0 || local < 0 || local > vocab_size - begin) {
    throw std::invalid_argument("vocabulary shard [" + std::to_string(begin) + ", " +
                                std::to_string(static_cast<int64_t>(begin) + local) + ") is outside of [0, " +
                                std::to_string(vocab_size) + ")");
  }
  const SamplingParams& p = *input.params;
  const LogitKernels& kernels = logit_kernels();
  Scratch& s = scratch();
  const size_t groups = group_count(local);
  const size_t chunks = groups / kLanes;
  const Draw kind = kind_of(p);
  if (s.groups.size() < groups) s.groups.resize(groups);
  if (s.sums.size() < chunks) s.sums.resize(chunks);

  Header head{};
  head.magic = dense ? kFullMagic : kCandidatesMagic;
  head.vocab_begin = begin;
  head.vocab_local = local;
  head.best_id = head.allowed_id = head.eos_id = head.winner_id = -1;
  head.best_raw = head.allowed_raw = head.max = kBanned;
  const float* raw = input.logits;
  head.not_finite = kernels.group_max(raw, local, s.groups.data());
  head.raw_max = max_of(s.groups.data(), groups);
  if (!p.eos.empty() && p.eos[0] >= begin && p.eos[0] - begin < local) {
    head.eos_id = p.eos[0];
    head.eos_raw = raw[p.eos[0] - begin];
  }
  const size_t start = blob.size();
  std::vector<Candidate> top, chosen;
  std::vector<float> raw_copy;
  if (head.not_finite == 0 && head.raw_max != kBanned) {
    if (p.logprobs()) {
      kernels.chunk_sum_exp(raw, local, head.raw_max, 1.0f, s.sums.data());
      head.raw_sum = total(s.sums, chunks);
    }
    if (p.top_logprobs > 0) select_best(raw, local, begin, s, p.top_logprobs, top);
    const int best = first_of_value(raw, local, s.groups.data(), head.raw_max);
    head.best_id = begin + best;
    head.best_raw = head.raw_max;
    if (dense && p.logprobs()) raw_copy.assign(raw, raw + local);

    float* x = input.logits;
    if (input.mask) {
      s.masked.assign(raw, raw + local);
      x = s.masked.data();
    }
    Processors processors(input, begin, local, x, s);
    processors.run();
    if (input.mask) {
      for (int i = 0; i < local; ++i) {
        const uint32_t id = static_cast<uint32_t>(begin + i);
        if (!((input.mask[id / 32] >> (id % 32)) & 1u)) {
          x[i] = kBanned;
        } else if (raw[i] > head.allowed_raw) {
          head.allowed_raw = raw[i];
          head.allowed_id = begin + i;
        }
      }
      kernels.group_max(x, local, s.groups.data());
    } else {
      head.allowed_id = head.best_id;
      head.allowed_raw = head.best_raw;
      for (const auto& change : s.undo) refresh_group(x, local, change.first, s.groups.data());
    }
    head.max = max_of(s.groups.data(), groups);

    if (dense) {
      s.masked.assign(x, x + local);  // the processed row, kept past undo()
    } else if (head.max != kBanned && kind == Draw::greedy) {
      chosen.push_back({begin + first_of_value(x, local, s.groups.data(), head.max), head.max, 0.0f});
    } else if (head.max != kBanned) {
      const float scale = 1.0f / p.temperature;
      if (kind != Draw::top_k) {
        kernels.chunk_sum_exp(x, local, head.max, scale, s.sums.data());
        head.sum = total(s.sums, chunks);
      }
      if (kind == Draw::all) {
        const double uniform = uniforms(p, input.history_len).second;
        const int winner = draw_index(x, local, head.max, scale, s.sums, head.sum, uniform);
        if (winner >= 0) head.winner_id = begin + winner;
      } else {
        const int want = std::min(kind == Draw::top_k ? p.top_k : kNucleusCandidates, local);
        head.truncated = select_best(x, local, begin, s, want, chosen);
      }
    }
    if (!input.mask) processors.undo();
    if (head.winner_id >= 0) head.winner_raw = raw[head.winner_id - begin];
    for (Candidate& c : chosen) c.raw = raw[c.id - begin];
  } else if (dense) {
    s.masked.assign(local, kBanned);
    if (p.logprobs()) raw_copy.assign(local, kBanned);
  }
  head.n_candidates = static_cast<int32_t>(chosen.size());
  head.n_top = static_cast<int32_t>(top.size());
  const size_t bytes = sizeof(Header) + (chosen.size() + top.size()) * sizeof(Candidate) +
                       (dense ? (static_cast<size_t>(local) + raw_copy.size()) * sizeof(float) : 0);
  head.bytes = static_cast<uint32_t>(bytes);
  blob.reserve(start + bytes);
  put(blob, &head, 1);
  put(blob, chosen.data(), chosen.size());
  put(blob, top.data(), top.size());
  if (dense) {
    put(blob, s.masked.data(), static_cast<size_t>(local));
    put(blob, raw_copy.data(), raw_copy.size());
  }
  return blob.size() - start;
}

}  // namespace

namespace sampling {

static const LogitKernels* g_kernels = nullptr;  // set once at import, before any thread draws

const LogitKernels& logit_kernels() {
  static const LogitKernels baseline{group_max, chunk_sum_exp, exp_values};
  return g_kernels ? *g_kernels : baseline;
}

}  // namespace sampling

void use_logit_kernels(const LogitKernels& kernels) { sampling::g_kernels = &kernels; }

size_t candidates(const SampleInput& input, int vocab_begin, int vocab_local, int vocab_size,
                  std::vector<uint8_t>& blob) {
  return make_blob(input, vocab_begin, vocab_local, vocab_size, false, blob);
}

size_t full(const SampleInput& input, int vocab_begin, int vocab_local, int vocab_size, std::vector<uint8_t>& blob) {
  return make_blob(input, vocab_begin, vocab_local, vocab_size, true, blob);
}

}  // namespace as
