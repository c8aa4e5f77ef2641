// A rank's side of a draw: logits processors and the passes over one shard of the vocabulary.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>

#include "common/exact.h"
#include "sampling/sampler.h"
#include "sampling/sampler_blob.h"

namespace as {

namespace {

using namespace sampling;

#include "sampling/logit_passes.h"

template <class T>
void put(std::vector<uint8_t>& blob, const T* values, size_t count) {
  const uint8_t* bytes = reinterpret_cast<const uint8_t*>(values);
  blob.insert(blob.end(), bytes, bytes + count * sizeof(T));
}

// ---- processors
// --------------------------------------------------------------------------------------------------------

// Working memory of a thread: rows of a vocabulary are too large to allocate for every draw.
struct Scratch {
  std::vector<float> groups;    // maxima (LogitKernels::group_max)
  std::vector<float> masked;    // logits under a mask
  std::vector<float> kept;      // those of the set that is drawn from
  std::vector<float> order;     // for the threshold
  std::vector<float> maxima;    // of chunks
  std::vector<double> sums;     // of their weights, relative to the maximum
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
  float tops[kLanes];
  std::fill_n(tops, kLanes, kBanned);
  for (size_t g = 0; g < count; g += kLanes) {
#pragma GCC unroll 1
    for (int j = 0; j < kLanes; ++j) tops[j] = groups[g + j] > tops[j] ? groups[g + j] : tops[j];
  }
  return *std::max_element(tops, tops + kLanes);
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

size_t chunk_count(int n, int chunk) { return (static_cast<size_t>(n) + chunk - 1) / chunk; }

// Maxima of chunks and the sums of their weights relative to them, which do not depend on where shards begin.
void weigh_chunks(const float* x, int n, int chunk, float scale, Scratch& s) {
  const LogitKernels& kernels = logit_kernels();
  const size_t chunks = chunk_count(n, chunk);
  if (s.sums.size() < chunks) s.sums.resize(chunks), s.maxima.resize(chunks);
  if (chunk == kChunk) return kernels.chunk_sum_exp(x, n, s.groups.data(), scale, s.maxima.data(), s.sums.data());
  for (size_t c = 0; c < chunks; ++c) {
    const int begin = static_cast<int>(c) * chunk, count = std::min(chunk, n - begin);
    float values[kChunk];
    s.maxima[c] = *std::max_element(x + begin, x + begin + count);
    s.sums[c] = 0.0;
    if (s.maxima[c] == kBanned) continue;
    kernels.exp_values(x + begin, count, s.maxima[c], scale, values);
    for (int i = 0; i < count; ++i) s.sums[c] += values[i];
  }
}

// Sum of the weights relative to `top`, the greatest of the maxima.
double total_weight(const Scratch& s, size_t chunks, float top, float scale) {
  double sum = 0.0;
  for (size_t c = 0; c < chunks; ++c) {
    const double depth = (static_cast<double>(top) - s.maxima[c]) * scale;
    if (depth < 80.0) sum += s.sums[c] * exact::exp(-depth);
  }
  return sum;
}

struct Winner {
  int index = -1;
  double key = 0.0;
};

// Unrestricted sampling: the chunk with the greatest key log(weight) + Gumbel noise, ties to the first, and the token
// that `second` draws in it. The key is log(sum / E) + maximum * scale with E = -log(uniform), which has an exponential
// distribution: the chunk with the smallest E / weight, so that most need no logarithm: E >= 1 - uniform.
Winner draw_chunk(const SamplingParams& p, int position, const float* x, int begin, int n, int chunk, Scratch& s) {
  const LogitKernels& kernels = logit_kernels();
  const float scale = 1.0f / p.temperature;
  const size_t chunks = chunk_count(n, chunk);
  weigh_chunks(x, n, chunk, scale, s);
  const float top = *std::max_element(s.maxima.begin(), s.maxima.begin() + chunks);
  if (top == kBanned) return {};
  s.order.resize(chunks);
  kernels.exp_values(s.maxima.data(), static_cast<int>(chunks), top, scale, s.order.data());
  constexpr double kSlack = 1.0001;  // far more than the estimates' error
  Winner winner;
  size_t best = 0;
  double least = std::numeric_limits<double>::infinity();  // E / weight of the winner
  Uniforms pair{};
  const int first = begin / chunk;  // global number of the shard's first chunk
  for (size_t c = 0; c < chunks; ++c) {
    const int global = first + static_cast<int>(c);
    if (c == 0 || global % 2 == 0) pair = chunk_uniforms(p, position, global / 2);
    const double uniform = global % 2 ? pair.second : pair.first, weight = s.sums[c] * s.order[c];
    if (weight <= 0.0 || 1.0 - uniform > least * weight * kSlack)
      continue;  // weights of 0 are below e^-87: never drawn
    const double wait = -exact::log(uniform);
    const double key = exact::log(s.sums[c] / wait) + static_cast<double>(s.maxima[c]) * scale;
    if (winner.index < 0 || key > winner.key) winner = {0, key}, best = c;
    least = std::min(least, wait / weight);
  }
  const int from = static_cast<int>(best) * chunk, count = std::min(chunk, n - from);
  float values[kChunk];
  kernels.exp_values(x + from, count, s.maxima[best], scale, values);
  double sum = 0.0;
  for (int i = 0; i < count; ++i) sum += values[i];
  double left = uniforms(p, position).second * sum;
  for (int i = 0; i < count; ++i) {
    if (values[i] <= 0.0f) continue;
    winner.index = from + i;
    if (left < values[i]) break;
    left -= values[i];
  }
  return winner;
}

// Applies processors and mask, and hands the processed row to `use`: the logits themselves, which are put back
// afterwards, or a copy under a mask. s.groups must be those of the logits; they are brought up to date.
template <class Use>
void with_processed(const SampleInput& input, int begin, int local, Scratch& s, Use use) {
  float* x = input.logits;
  if (input.mask) {
    s.masked.assign(input.logits, input.logits + local);
    x = s.masked.data();
  }
  Processors processors(input, begin, local, x, s);
  processors.run();
  if (input.mask) {
    for (int i = 0; i < local; ++i) {
      const uint32_t id = static_cast<uint32_t>(begin + i);
      if (!((input.mask[id / 32] >> (id % 32)) & 1u)) x[i] = kBanned;
    }
    logit_kernels().group_max(x, local, s.groups.data());
  } else {
    for (const auto& change : s.undo) refresh_group(x, local, change.first, s.groups.data());
  }
  use(x);
  if (!input.mask) processors.undo();
}

}  // namespace

void check_shard(int begin, int local, int vocab_size) {
  if (begin < 0 || local < 0 || local > vocab_size - begin) {
    throw std::invalid_argument("vocabulary shard [" + std::to_string(begin) + ", " +
                                std::to_string(static_cast<int64_t>(begin) + local) + ") is outside of [0, " +
                                std::to_string(vocab_size) + ")");
  }
  const int chunk = chunk_of(vocab_size);
  if (begin % chunk || (local % chunk && begin + local != vocab_size)) {
    throw std::invalid_argument("vocabulary shard [" + std::to_string(begin) + ", " + std::to_string(begin + local) +
                                ") is not made of whole chunks of " + std::to_string(chunk) + " ids");
  }
}

size_t candidates(const SampleInput& input, int begin, int local, int vocab_size, std::vector<uint8_t>& blob) {
  check_shard(begin, local, vocab_size);
  const SamplingParams& p = *input.params;
  const LogitKernels& kernels = logit_kernels();
  Scratch& s = scratch();
  const int chunk = chunk_of(vocab_size);
  const size_t groups = group_count(local), chunks = chunk_count(local, chunk);
  const Draw kind = kind_of(p);
  if (s.groups.size() < groups) s.groups.resize(groups);

  Header head{};
  head.magic = kCandidatesMagic;
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
  std::vector<Candidate> top, chosen;
  if (head.not_finite == 0 && head.raw_max != kBanned) {
    if (p.logprobs()) {
      weigh_chunks(raw, local, chunk, 1.0f, s);
      head.raw_sum = total_weight(s, chunks, head.raw_max, 1.0f);
    }
    if (p.top_logprobs > 0) select_best(raw, local, begin, s, p.top_logprobs, top);
    head.best_id = begin + first_of_value(raw, local, s.groups.data(), head.raw_max);
    head.best_raw = head.raw_max;
    head.allowed_id = head.best_id;
    head.allowed_raw = head.best_raw;
    if (input.mask) {
      head.allowed_id = -1;
      head.allowed_raw = kBanned;
      for (int i = 0; i < local; ++i) {
        const uint32_t id = static_cast<uint32_t>(begin + i);
        if (((input.mask[id / 32] >> (id % 32)) & 1u) && raw[i] > head.allowed_raw) {
          head.allowed_raw = raw[i];
          head.allowed_id = begin + i;
        }
      }
    }
    with_processed(input, begin, local, s, [&](const float* x) {
      head.max = max_of(s.groups.data(), groups);
      if (head.max == kBanned) return;
      if (kind == Draw::greedy) {
        chosen.push_back({begin + first_of_value(x, local, s.groups.data(), head.max), head.max, 0.0f});
      } else if (kind == Draw::all) {
        const Winner winner = draw_chunk(p, input.history_len, x, begin, local, chunk, s);
        head.winner_id = begin + winner.index;
        head.winner_key = winner.key;
      } else {
        if (kind == Draw::nucleus) {
          const float scale = 1.0f / p.temperature;
          weigh_chunks(x, local, chunk, scale, s);
          head.sum = total_weight(s, chunks, head.max, scale);
        }
        const int want = kind == Draw::top_k ? std::min(p.top_k, kCandidates) : kCandidates;
        head.truncated = select_best(x, local, begin, s, std::min(want, local), chosen);
      }
    });
    if (head.winner_id >= 0) head.winner_raw = raw[head.winner_id - begin];
    for (Candidate& c : chosen) c.raw = raw[c.id - begin];
  }
  head.n_candidates = static_cast<int32_t>(chosen.size());
  head.n_top = static_cast<int32_t>(top.size());
  const size_t bytes = sizeof(Header) + (chosen.size() + top.size()) * sizeof(Candidate);
  head.bytes = static_cast<uint32_t>(bytes);
  blob.reserve(blob.size() + bytes);
  put(blob, &head, 1);
  put(blob, chosen.data(), chosen.size());
  put(blob, top.data(), top.size());
  return bytes;
}

namespace {

class Places {
 public:
  Places(float top, float scale) : top_(top), steps_(steps_of(scale)) {}

  uint64_t of(float x, int id) const {
    return (static_cast<uint64_t>(depth_of(x, top_, steps_)) << kIdBits) | static_cast<uint32_t>(id);
  }

  // Logits that may have places in [first, last]: a little more, so that a comparison passes over most of the others.
  std::pair<float, float> range(uint64_t first, uint64_t last) const {
    const double from = static_cast<double>(first >> kIdBits), to = static_cast<double>(last >> kIdBits);
    const double high = top_ - (from - 1.0) / steps_, low = top_ - (to + 2.0) / steps_;
    const auto outward = [](double x, double sign) {
      return static_cast<float>(std::max(-3e38, std::min(3e38, x + sign * 1e-6 * std::abs(x))));
    };
    return {to >= kDeepest ? -std::numeric_limits<float>::max() : outward(low, -1.0), outward(high, 1.0)};
  }

 private:
  double top_, steps_;
};

// Calls visit(i) for every i with low <= x[i] <= high.
template <class Visit>
void visit_between(const float* x, int n, float low, float high, Visit visit) {
  const LogitKernels& kernels = logit_kernels();
  int found[kChunk];
  for (int from = 0; from < n; from += kChunk) {
    const int count = kernels.find_between(x + from, std::min(kChunk, n - from), low, high, found);
    for (int k = 0; k < count; ++k) visit(from + found[k]);
  }
}

// The bins of a level that hold anything, of the tokens whose digits above are those of search.place.
void fill_bins(const float* x, int begin, int local, float scale, const Search& search, std::vector<Bin>& found) {
  const LogitKernels& kernels = logit_kernels();
  std::vector<Bin> bins(kBins + 1, Bin{});  // and one for what is banned
  const auto add = [&](uint32_t index, uint64_t mass) {
    ++bins[index].count;
    bins[index].mass += mass;
  };
  if (search.level == 0) {  // of depths alone
    for (int from = 0; from < local; from += kChunk) {
      const int count = std::min(kChunk, local - from);
      uint32_t indices[kChunk];
      uint64_t masses[kChunk];
      kernels.weigh_bins(x + from, count, search.top, scale, indices, masses);
      for (int i = 0; i < count; ++i) add(indices[i], masses[i]);
    }
  } else {
    const Places places(search.top, scale);
    const int shift = shift_of(search.level);
    const uint64_t first = search.place >> shift >> kDigitBits << kDigitBits << shift;
    const uint64_t last = first | ((uint64_t{1} << (shift + kDigitBits)) - 1);
    const auto [low, high] = places.range(first, last);
    visit_between(x, local, low, high, [&](int i) {
      const uint64_t place = places.of(x[i], begin + i);
      if (place < first || place > last) return;
      uint32_t unused;
      uint64_t mass;
      kernels.weigh_bins(x + i, 1, search.top, scale, &unused, &mass);
      add(static_cast<uint32_t>((place >> shift) % kBins), mass);
    });
  }
  for (int b = 0; b < kBins; ++b) {
    if (!bins[b].count) continue;
    bins[b].index = static_cast<uint32_t>(b);
    found.push_back(bins[b]);
  }
}

}  // namespace

size_t narrow(const SampleInput& input, int begin, int local, int vocab_size, const Search& search,
              std::vector<uint8_t>& blob) {
  check_shard(begin, local, vocab_size);
  const SamplingParams& p = *input.params;
  const float scale = 1.0f / p.temperature;
  Scratch& s = scratch();
  if (s.groups.size() < group_count(local)) s.groups.resize(group_count(local));
  logit_kernels().group_max(input.logits, local, s.groups.data());
  NarrowedHeader head{};
  head.magic = kNarrowedMagic;
  head.winner_id = -1;
  std::vector<Bin> bins;
  with_processed(input, begin, local, s, [&](const float* x) {
    if (local == 0 || max_of(s.groups.data(), group_count(local)) == kBanned) return;
    if (search.level < kLevels) return fill_bins(x, begin, local, scale, search, bins);
    const Places places(search.top, scale);
    const auto [low, high] = places.range(search.place, search.place);
    s.kept.resize(local);
    for (int i = 0; i < local; ++i) s.kept[i] = x[i] >= low ? x[i] : kBanned;
    visit_between(x, local, low, high, [&](int i) {
      if (places.of(x[i], begin + i) > search.place) s.kept[i] = kBanned;
    });
    logit_kernels().group_max(s.kept.data(), local, s.groups.data());
    const Winner winner = draw_chunk(p, input.history_len, s.kept.data(), begin, local, chunk_of(vocab_size), s);
    if (winner.index >= 0) head.winner_id = begin + winner.index;
    head.winner_key = winner.key;
  });
  if (head.winner_id >= 0) head.winner_raw = input.logits[head.winner_id - begin];
  head.n_bins = static_cast<int32_t>(bins.size());
  head.bytes = static_cast<uint32_t>(sizeof head + bins.size() * sizeof(Bin));
  put(blob, &head, 1);
  put(blob, bins.data(), bins.size());
  return head.bytes;
}

namespace sampling {

static const LogitKernels* g_kernels = nullptr;  // set once at import, before any thread draws

const LogitKernels& logit_kernels() {
  static const LogitKernels baseline{group_max, chunk_sum_exp, exp_values, weigh_bins, find_between};
  return g_kernels ? *g_kernels : baseline;
}

}  // namespace sampling

void use_logit_kernels(const LogitKernels& kernels) { sampling::g_kernels = &kernels; }

}  // namespace as
