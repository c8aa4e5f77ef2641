// A rank's side of sampling: logits processors and the passes over one shard of the vocabulary.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>

#include "common/exact.h"
#include "sampling/processors.h"
#include "sampling/sampler.h"
#include "sampling/sampler_blob.h"

namespace as {

using namespace sampling;

namespace {

#include "sampling/logit_passes.h"

template <class T>
void put(std::vector<uint8_t>& blob, const T* values, size_t count) {
  const uint8_t* bytes = reinterpret_cast<const uint8_t*>(values);
  blob.insert(blob.end(), bytes, bytes + count * sizeof(T));
}

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

// Calls visit(i) for every i with x[i] >= threshold, not in ascending order. Skips groups without such values.
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

// The `want` largest finite logits by (value descending, id ascending), unsorted. Returns whether finite ones remain.
bool select_top(const float* x, int n, int begin, const float* groups, int want, std::vector<Candidate>& out) {
  thread_local std::vector<float> order;
  out.clear();
  const size_t count = group_count(n);
  float threshold = kBanned;
  if (static_cast<size_t>(want) < count) {
    // At least `want` logits reach the want-th largest group maximum.
    order.assign(groups, groups + count);
    std::nth_element(order.begin(), order.begin() + (want - 1), order.end(), std::greater<float>());
    threshold = order[want - 1];
  }
  visit_at_least(x, n, groups, threshold, [&](int i) { out.push_back({begin + i, x[i], x[i]}); });
  if (out.size() > static_cast<size_t>(want)) {
    std::nth_element(out.begin(), out.begin() + want, out.end(), better);
    out.resize(want);
    return true;
  }
  if (threshold == kBanned) return false;
  if (std::any_of(groups, groups + count, [&](float top) { return top < threshold && top != kBanned; })) return true;
  return std::any_of(x, x + n, [&](float value) { return value < threshold && value != kBanned; });
}

size_t chunk_count(int n, int chunk) { return (static_cast<size_t>(n) + chunk - 1) / chunk; }

// Maxima of chunks and the sums of their weights relative to them, which do not depend on the shard's boundaries.
void weigh_chunks(const float* x, int n, int chunk, float scale, const float* groups, float* maxima, double* sums) {
  const LogitKernels& kernels = logit_kernels();
  if (chunk == kChunk) return kernels.chunk_sum_exp(x, n, groups, scale, maxima, sums);
  const size_t chunks = chunk_count(n, chunk);
  for (size_t c = 0; c < chunks; ++c) {
    const int begin = static_cast<int>(c) * chunk, count = std::min(chunk, n - begin);
    float values[kChunk];
    maxima[c] = *std::max_element(x + begin, x + begin + count);
    sums[c] = 0.0;
    if (maxima[c] == kBanned) continue;
    kernels.exp_values(x + begin, count, maxima[c], scale, values);
    for (int i = 0; i < count; ++i) sums[c] += values[i];
  }
}

// Sum of the weights relative to `top`, the largest maximum.
double total_weight(const ShardSampler::Stats& stats, size_t chunks, float top, float scale) {
  double sum = 0.0;
  for (size_t c = 0; c < chunks; ++c) {
    const double depth = (static_cast<double>(top) - stats.maxima[c]) * scale;
    if (depth < 80.0) sum += stats.sums[c] * exact::exp(-depth);
  }
  return sum;
}

struct Winner {
  int index = -1;
  double key = 0.0;
};

// Unrestricted sampling: the chunk with the largest key log(weight) + Gumbel noise (the first one wins ties), and a
// token in it by the number `second`. The key is log(sum / E) + maximum * scale, where E = -log(uniform) has an
// exponential distribution. So the smallest E / weight wins, and most chunks need no logarithm: E >= 1 - uniform.
Winner sample_chunk(const SamplingParams& p, int position, const float* x, int begin, int n, int chunk,
                    const ShardSampler::Stats& stats) {
  const LogitKernels& kernels = logit_kernels();
  const float scale = 1.0f / p.temperature;
  const size_t chunks = chunk_count(n, chunk);
  if (!chunks) return {};
  const float top = *std::max_element(stats.maxima.begin(), stats.maxima.begin() + chunks);
  if (top == kBanned) return {};
  thread_local std::vector<float> heights;
  heights.resize(chunks);
  kernels.exp_values(stats.maxima.data(), static_cast<int>(chunks), top, scale, heights.data());
  constexpr double kSlack = 1.0001;  // far more than the error of the estimates
  Winner winner;
  size_t best = 0;
  double least = std::numeric_limits<double>::infinity();  // E / weight of the winner
  Uniforms pair{};
  const int first = begin / chunk;  // global index of the shard's first chunk
  for (size_t c = 0; c < chunks; ++c) {
    const int global = first + static_cast<int>(c);
    if (c == 0 || global % 2 == 0) pair = chunk_uniforms(p, position, global / 2);
    const double uniform = global % 2 ? pair.second : pair.first, weight = stats.sums[c] * heights[c];
    if (weight <= 0.0 || 1.0 - uniform > least * weight * kSlack)
      continue;  // weights of 0 are below e^-87: never sampled
    const double wait = -exact::log(uniform);
    const double key = exact::log(stats.sums[c] / wait) + static_cast<double>(stats.maxima[c]) * scale;
    if (winner.index < 0 || key > winner.key) winner = {0, key}, best = c;
    least = std::min(least, wait / weight);
  }
  const int from = static_cast<int>(best) * chunk, count = std::min(chunk, n - from);
  float values[kChunk];
  kernels.exp_values(x + from, count, stats.maxima[best], scale, values);
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

bool allows(const uint32_t* mask, int id) { return (mask[id / 32] >> (id % 32)) & 1u; }

// LogitKernels::mask_group_max for any first bit, because shards of small vocabularies may begin at any id.
void mask_logits(const float* x, const uint32_t* mask, int first, int n, float* out, float* groups) {
  if (first % kLanes == 0) return logit_kernels().mask_group_max(x, mask, first, n, out, groups);
  for (int i = 0; i < n; ++i) out[i] = allows(mask, first + i) ? x[i] : kBanned;
  logit_kernels().group_max(out, n, groups);
}

class Places {
 public:
  Places(float top, float scale) : top_(top), steps_(steps_of(scale)) {}

  uint64_t of(float x, int id) const {
    return (static_cast<uint64_t>(depth_of(x, top_, steps_)) << kIdBits) | static_cast<uint32_t>(id);
  }

  // A range of logits that contains all places in [first, last], slightly widened: one comparison skips most others.
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

// Sums the bins of a level over the tokens whose higher digits equal those of search.place. Bin kBins: banned tokens.
void fill_bins(const float* x, int begin, int n, float scale, const Search& search, std::vector<Bin>& bins) {
  const LogitKernels& kernels = logit_kernels();
  bins.assign(kBins + 1, Bin{});
  const auto add = [&](uint32_t index, uint64_t mass) {
    ++bins[index].count;
    bins[index].mass += mass;
  };
  if (search.level == 0) {  // level 0 depends on depths alone
    for (int from = 0; from < n; from += kChunk) {
      const int count = std::min(kChunk, n - from);
      uint32_t indices[kChunk];
      uint64_t masses[kChunk];
      kernels.weigh_bins(x + from, count, search.top, scale, indices, masses);
      for (int i = 0; i < count; ++i) add(indices[i], masses[i]);
    }
    return;
  }
  const Places places(search.top, scale);
  const int shift = shift_of(search.level);
  const uint64_t first = search.place >> shift >> kDigitBits << kDigitBits << shift;
  const uint64_t last = first | ((uint64_t{1} << (shift + kDigitBits)) - 1);
  const auto [low, high] = places.range(first, last);
  visit_between(x, n, low, high, [&](int i) {
    const uint64_t place = places.of(x[i], begin + i);
    if (place < first || place > last) return;
    uint32_t unused;
    uint64_t mass;
    kernels.weigh_bins(x + i, 1, search.top, scale, &unused, &mass);
    add(static_cast<uint32_t>((place >> shift) % kBins), mass);
  });
}

// Copies x without the tokens after search.place.
void keep_set(const float* x, int begin, int n, float scale, const Search& search, float* kept) {
  const Places places(search.top, scale);
  const auto [low, high] = places.range(search.place, search.place);
  for (int i = 0; i < n; ++i) kept[i] = x[i] >= low ? x[i] : kBanned;
  visit_between(x, n, low, high, [&](int i) {
    if (places.of(x[i], begin + i) > search.place) kept[i] = kBanned;
  });
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

void ShardSampler::begin(const SampleInput& input, int vocab_begin, int vocab_local, int vocab_size, int parts,
                         const Search* search) {
  check_shard(vocab_begin, vocab_local, vocab_size);
  if (parts < 1) throw std::invalid_argument("a shard is scanned in 1 or more parts, not " + std::to_string(parts));
  input_ = input;
  begin_ = vocab_begin;
  local_ = vocab_local;
  chunk_ = chunk_of(vocab_size);
  narrows_ = search != nullptr;
  if (search) search_ = *search;
  const size_t groups = group_count(local_), chunks = chunk_count(local_, chunk_);
  for (Stats* stats : {&raw_, &processed_}) {
    if (stats->groups.size() < groups) stats->groups.resize(groups);
    if (stats->maxima.size() < chunks) stats->maxima.resize(chunks), stats->sums.resize(chunks);
  }
  if (input_.mask && masked_.size() < static_cast<size_t>(local_)) masked_.resize(local_);
  if (samples_narrowed() && kept_.size() < static_cast<size_t>(local_)) kept_.resize(local_);
  parts_.resize(parts);
  const int units = chunk_count(local_, kChunk);
  for (int i = 0; i < parts; ++i) {
    Part& part = parts_[i];
    part.begin = static_cast<int>(static_cast<int64_t>(units) * i / parts) * kChunk;
    part.end = std::min(local_, static_cast<int>(static_cast<int64_t>(units) * (i + 1) / parts) * kChunk);
    part.not_finite = 0;
    part.raw_max = part.max = kBanned;
    part.changes.clear();
    part.bins.clear();
  }
}

void ShardSampler::scan(int index) {
  Part& part = parts_[index];
  const int from = part.begin, n = part.end - part.begin;
  if (n <= 0) return;
  const SamplingParams& p = *input_.params;
  const LogitKernels& kernels = logit_kernels();
  const float* raw = input_.logits + from;
  float* groups = raw_.groups.data() + group_count(from);
  const size_t first_chunk = chunk_count(from, chunk_);
  const auto weigh = [&](const float* x, float scale, Stats& stats) {
    weigh_chunks(x, n, chunk_, scale, stats.groups.data() + group_count(from), stats.maxima.data() + first_chunk,
                 stats.sums.data() + first_chunk);
  };
  part.not_finite = kernels.group_max(raw, n, groups);
  part.raw_max = max_of(groups, group_count(n));
  if (!narrows_ && p.logprobs()) weigh(raw, 1.0f, raw_);
  float* x = processed_logits() + from;
  float* current = processed_.groups.data() + group_count(from);
  if (input_.mask) mask_logits(raw, input_.mask, begin_ + from, n, x, current);
  else std::copy_n(groups, group_count(n), current);
  thread_local Occurrences seen;
  Processors(input_, begin_ + from, n, seen, ChangedLogits(x, part.changes)).run();
  for (const auto& change : part.changes) {
    // An overflowing penalty may have turned a banned -Inf into a number.
    if (input_.mask && !allows(input_.mask, begin_ + from + change.first)) x[change.first] = kBanned;
    refresh_group(x, n, change.first, current);
  }
  part.max = max_of(current, group_count(n));
  const float scale = 1.0f / p.temperature;
  if (samples_narrowed()) {
    keep_set(x, begin_ + from, n, scale, search_, kept_.data() + from);
    kernels.group_max(kept_.data() + from, n, current);
    weigh(kept_.data() + from, scale, processed_);
  } else if (narrows_) {
    fill_bins(x, begin_ + from, n, scale, search_, part.bins);
  } else {
    const SamplingKind kind = kind_of(p);
    if (kind == SamplingKind::all || (kind == SamplingKind::nucleus && p.top_p < 1.0f)) weigh(x, scale, processed_);
  }
}

int ShardSampler::first_of(const float* x, const Stats& stats, float Part::* most, float value) const {
  for (const Part& part : parts_) {
    if (part.*most != value) continue;
    const float* groups = stats.groups.data() + group_count(part.begin);
    return part.begin + first_of_value(x + part.begin, part.end - part.begin, groups, value);
  }
  return -1;
}

void ShardSampler::put_back() {
  if (input_.mask) return;
  for (const Part& part : parts_)
    for (auto it = part.changes.rbegin(); it != part.changes.rend(); ++it)
      input_.logits[part.begin + it->first] = it->second;
}

size_t ShardSampler::finish(std::vector<uint8_t>& blob) {
  return narrows_ ? finish_narrow(blob) : finish_candidates(blob);
}

size_t ShardSampler::finish_candidates(std::vector<uint8_t>& blob) {
  const SamplingParams& p = *input_.params;
  const size_t chunks = chunk_count(local_, chunk_);
  const float* raw = input_.logits;  // after put_back()
  Header head{};
  head.magic = kCandidatesMagic;
  head.vocab_begin = begin_;
  head.vocab_local = local_;
  head.argmax_id = head.allowed_id = head.eos_id = head.winner_id = -1;
  head.argmax_raw = head.allowed_raw = head.max = kBanned;
  head.raw_max = kBanned;
  for (const Part& part : parts_) {
    head.not_finite += part.not_finite;
    head.raw_max = std::max(head.raw_max, part.raw_max);
  }
  const bool numbers = head.not_finite == 0 && head.raw_max != kBanned;
  thread_local std::vector<Candidate> top, chosen;
  top.clear(), chosen.clear();
  if (numbers) {
    const float* x = processed_logits();
    const SamplingKind kind = kind_of(p);
    for (const Part& part : parts_) head.max = std::max(head.max, part.max);
    if (head.max == kBanned) {
      // Nothing to sample: rank 0 chooses the fallback.
    } else if (kind == SamplingKind::greedy) {
      chosen.push_back({begin_ + first_of(x, processed_, &Part::max, head.max), head.max, 0.0f});
    } else if (kind == SamplingKind::all) {
      const Winner winner = sample_chunk(p, input_.history_len, x, begin_, local_, chunk_, processed_);
      head.winner_id = begin_ + winner.index;
      head.winner_key = winner.key;
    } else {
      if (kind == SamplingKind::nucleus && p.top_p < 1.0f)
        head.sum = total_weight(processed_, chunks, head.max, 1.0f / p.temperature);
      const int want = kind == SamplingKind::top_k ? std::min(p.top_k, kCandidates) : kCandidates;
      head.truncated = select_top(x, local_, begin_, processed_.groups.data(), std::min(want, local_), chosen);
    }
  }
  put_back();
  if (!p.eos.empty() && p.eos[0] >= begin_ && p.eos[0] - begin_ < local_) {
    head.eos_id = p.eos[0];
    head.eos_raw = raw[p.eos[0] - begin_];
  }
  if (input_.target >= begin_ && input_.target - begin_ < local_) {
    head.target_here = true;
    head.target_raw = raw[input_.target - begin_];
  }
  if (numbers) {
    if (p.logprobs()) head.raw_sum = total_weight(raw_, chunks, head.raw_max, 1.0f);
    if (p.top_logprobs > 0) select_top(raw, local_, begin_, raw_.groups.data(), p.top_logprobs, top);
    head.argmax_id = begin_ + first_of(raw, raw_, &Part::raw_max, head.raw_max);
    head.argmax_raw = head.raw_max;
    if (input_.mask) {
      for (int i = 0; i < local_ && head.max == kBanned; ++i) {  // needed only if everything is banned
        if (!allows(input_.mask, begin_ + i) || !(raw[i] > head.allowed_raw)) continue;
        head.allowed_id = begin_ + i;
        head.allowed_raw = raw[i];
      }
    } else {
      head.allowed_id = head.argmax_id;
      head.allowed_raw = head.argmax_raw;
    }
    if (head.winner_id >= 0) head.winner_raw = raw[head.winner_id - begin_];
    for (Candidate& c : chosen) c.raw = raw[c.id - begin_];
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

size_t ShardSampler::finish_narrow(std::vector<uint8_t>& blob) {
  NarrowedHeader head{};
  head.magic = kNarrowedMagic;
  head.winner_id = -1;
  std::vector<Bin> bins;
  if (samples_narrowed()) {
    const Winner winner =
        sample_chunk(*input_.params, input_.history_len, kept_.data(), begin_, local_, chunk_, processed_);
    if (winner.index >= 0) head.winner_id = begin_ + winner.index;
    head.winner_key = winner.key;
  } else {
    for (int b = 0; b < kBins; ++b) {
      Bin sum{static_cast<uint32_t>(b), 0, 0};
      for (const Part& part : parts_) {
        if (part.bins.empty()) continue;
        sum.count += part.bins[b].count;
        sum.mass += part.bins[b].mass;
      }
      if (sum.count) bins.push_back(sum);
    }
  }
  put_back();
  if (head.winner_id >= 0) head.winner_raw = input_.logits[head.winner_id - begin_];
  head.n_bins = static_cast<int32_t>(bins.size());
  head.bytes = static_cast<uint32_t>(sizeof head + bins.size() * sizeof(Bin));
  put(blob, &head, 1);
  put(blob, bins.data(), bins.size());
  return head.bytes;
}

namespace {

size_t sample_alone(const SampleInput& input, int begin, int local, int vocab_size, const Search* search,
                    std::vector<uint8_t>& blob) {
  thread_local ShardSampler sampler;
  sampler.begin(input, begin, local, vocab_size, 1, search);
  sampler.scan(0);
  return sampler.finish(blob);
}

}  // namespace

size_t candidates(const SampleInput& input, int begin, int local, int vocab_size, std::vector<uint8_t>& blob) {
  return sample_alone(input, begin, local, vocab_size, nullptr, blob);
}

size_t narrow(const SampleInput& input, int begin, int local, int vocab_size, const Search& search,
              std::vector<uint8_t>& blob) {
  return sample_alone(input, begin, local, vocab_size, &search, blob);
}

namespace sampling {

static const LogitKernels* g_kernels = nullptr;  // set once at import, before any thread samples

const LogitKernels& logit_kernels() {
  static const LogitKernels baseline = logit_passes();
  return g_kernels ? *g_kernels : baseline;
}

}  // namespace sampling

void use_logit_kernels(const LogitKernels& kernels) { sampling::g_kernels = &kernels; }

}  // namespace as
