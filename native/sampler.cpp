// Rank 0's side of a draw: parameters, random numbers, and the merge of the shards' blobs.
#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "sampler_blob.h"

namespace as {

namespace {

using namespace sampling;

// ---- the sampling block
// ------------------------------------------------------------------------------------------------

// Reads words one after the other; every complaint names the field.
class Reader {
 public:
  Reader(const int32_t* p, const int32_t* end) : p_(p), end_(end) {}

  int32_t word(const char* field) {
    if (p_ == end_) throw std::invalid_argument(std::string("sampling block ends before ") + field);
    return *p_++;
  }

  int32_t integer(const char* field, int32_t low, int32_t high) {
    const int32_t value = word(field);
    if (value < low || value > high) complain(field, std::to_string(value), std::to_string(low), std::to_string(high));
    return value;
  }

  float real(const char* field, float low, float high) {
    const int32_t bits = word(field);
    float value;
    std::memcpy(&value, &bits, sizeof value);
    if (!(value >= low && value <= high))
      complain(field, std::to_string(value), std::to_string(low), std::to_string(high));
    return value;
  }

  std::vector<int32_t> ids(const char* field, int32_t count) {
    if (end_ - p_ < count) {
      throw std::invalid_argument(std::string("sampling block ends within ") + field + ": " + std::to_string(count) +
                                  " ids announced, " + std::to_string(end_ - p_) + " words left");
    }
    std::vector<int32_t> out(p_, p_ + count);
    p_ += count;
    return out;
  }

  const int32_t* at() const { return p_; }

 private:
  [[noreturn]] static void complain(const char* field, const std::string& value, const std::string& low,
                                    const std::string& high) {
    throw std::invalid_argument(std::string(field) + " is " + value + "; it must be between " + low + " and " + high);
  }

  const int32_t* p_;
  const int32_t* end_;
};

// ---- random numbers
// ----------------------------------------------------------------------------------------------------

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): counter becomes the output.
void philox4x32_10(uint32_t counter[4], uint32_t key[2]) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = static_cast<uint64_t>(0xD2511F53u) * counter[0];
    const uint64_t b = static_cast<uint64_t>(0xCD9E8D57u) * counter[2];
    const uint32_t next[4] = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(b),
                              static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(a)};
    std::copy(next, next + 4, counter);
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
}

// ---- blobs
// -------------------------------------------------------------------------------------------------------------

// A blob's parts, copied out so that its alignment does not matter.
struct Part {
  Header head;
  std::vector<Candidate> candidates;
  std::vector<Candidate> top;  // by raw logit; .logit is .raw
  const uint8_t* dense = nullptr;
};

Part open_blob(const std::pair<const uint8_t*, size_t>& blob, uint32_t magic, bool with_raw) {
  Part part;
  if (blob.second < sizeof(Header)) {
    throw std::invalid_argument("sampling blob has " + std::to_string(blob.second) + " bytes; its header alone has " +
                                std::to_string(sizeof(Header)));
  }
  std::memcpy(&part.head, blob.first, sizeof(Header));
  const Header& head = part.head;
  if (head.magic != magic || head.bytes > blob.second || head.n_candidates < 0 || head.n_top < 0 ||
      head.vocab_local < 0) {
    throw std::invalid_argument("sampling blob is not one of this version's (magic " + std::to_string(head.magic) +
                                ", " + std::to_string(head.bytes) + " of " + std::to_string(blob.second) + " bytes)");
  }
  const size_t listed = static_cast<size_t>(head.n_candidates) + static_cast<size_t>(head.n_top);
  const size_t dense =
      magic == kFullMagic ? static_cast<size_t>(head.vocab_local) * sizeof(float) * (with_raw ? 2 : 1) : 0;
  if (head.bytes != sizeof(Header) + listed * sizeof(Candidate) + dense) {
    throw std::invalid_argument("sampling blob of " + std::to_string(head.bytes) +
                                " bytes does not fit its own header");
  }
  const uint8_t* p = blob.first + sizeof(Header);
  part.candidates.resize(head.n_candidates);
  if (head.n_candidates) std::memcpy(part.candidates.data(), p, part.candidates.size() * sizeof(Candidate));
  p += part.candidates.size() * sizeof(Candidate);
  part.top.resize(head.n_top);
  if (head.n_top) std::memcpy(part.top.data(), p, part.top.size() * sizeof(Candidate));
  part.dense = p + part.top.size() * sizeof(Candidate);
  return part;
}

std::vector<Part> open_all(const SamplingParams& params, const Blobs& blobs, uint32_t magic) {
  if (blobs.empty()) throw std::invalid_argument("no sampling blobs to merge; one for each rank is needed");
  std::vector<Part> parts;
  parts.reserve(blobs.size());
  for (const auto& blob : blobs) parts.push_back(open_blob(blob, magic, params.logprobs()));
  return parts;
}

// ---- what all kinds of draw share
// --------------------------------------------------------------------------------------

// Fills in everything but the token; false if there is none to draw because the logits are not numbers.
bool begin_output(const SamplingParams& params, const std::vector<Part>& parts, double& log_norm, SampleOutput& out) {
  out = SampleOutput{};
  std::fill(out.top_ids, out.top_ids + kMaxTopLogprobs, -1);
  std::fill(out.top_logprobs, out.top_logprobs + kMaxTopLogprobs, 0.0f);
  float top = kBanned;
  bool finite = true;
  for (const Part& part : parts) {
    finite = finite && part.head.not_finite == 0;
    top = std::max(top, part.head.raw_max);
  }
  if (!finite || top == kBanned) {
    out.status = SampleStatus::kNotFinite;
    return false;
  }
  log_norm = 0.0;
  if (!params.logprobs()) return true;
  double sum = 0.0;
  for (const Part& part : parts) {
    if (part.head.raw_max != kBanned) sum += part.head.raw_sum * std::exp(static_cast<double>(part.head.raw_max) - top);
  }
  log_norm = top + std::log(sum);
  std::vector<Candidate> best;
  for (const Part& part : parts) best.insert(best.end(), part.top.begin(), part.top.end());
  std::sort(best.begin(), best.end(), better);
  const size_t count = std::min<size_t>(best.size(), params.top_logprobs);
  for (size_t i = 0; i < count; ++i) {
    out.top_ids[i] = best[i].id;
    out.top_logprobs[i] = static_cast<float>(best[i].raw - log_norm);
  }
  return true;
}

void choose(const SamplingParams& params, double log_norm, int32_t id, float raw, SampleOutput& out) {
  out.token = id;
  out.logprob = params.logprobs() ? static_cast<float>(raw - log_norm) : 0.0f;
}

// Every token is banned (see the header for what is taken then).
void choose_fallback(const SamplingParams& params, const std::vector<Part>& parts, double log_norm, SampleOutput& out) {
  const Header* best = nullptr;
  const Header* allowed = nullptr;
  for (const Part& part : parts) {
    const Header& head = part.head;
    if (head.best_id >= 0 && (!best || head.best_raw > best->best_raw)) best = &head;
    if (head.allowed_id >= 0 && (!allowed || head.allowed_raw > allowed->allowed_raw)) allowed = &head;
  }
  if (allowed) return choose(params, log_norm, allowed->allowed_id, allowed->allowed_raw, out);
  for (const Part& part : parts) {
    if (part.head.eos_id >= 0) return choose(params, log_norm, part.head.eos_id, part.head.eos_raw, out);
  }
  choose(params, log_norm, best->best_id, best->best_raw, out);
}

float highest(const std::vector<Part>& parts) {
  float top = kBanned;
  for (const Part& part : parts) top = std::max(top, part.head.max);
  return top;
}

// The position in `weights` where their running sum passes uniform * (sum of the first `kept`).
size_t inverse_cdf(const std::vector<double>& weights, size_t kept, double sum, double uniform) {
  double left = uniform * sum;
  size_t pick = 0;
  for (size_t i = 0; i < kept; ++i) {
    if (weights[i] <= 0.0) continue;
    pick = i;
    if (left < weights[i]) break;
    left -= weights[i];
  }
  return pick;
}

void draw_unrestricted(const SamplingParams& params, int position, const std::vector<Part>& parts, float top,
                       double log_norm, SampleOutput& out) {
  std::vector<double> weights;
  double sum = 0.0;
  for (const Part& part : parts) {
    const bool some = part.head.winner_id >= 0;
    weights.push_back(some ? part.head.sum * std::exp((static_cast<double>(part.head.max) - top) / params.temperature)
                           : 0.0);
    sum += weights.back();
  }
  const Header& head = parts[inverse_cdf(weights, weights.size(), sum, uniforms(params, position).first)].head;
  choose(params, log_norm, head.winner_id, head.winner_raw, out);
}

// How many of the sorted candidates are surely the best of the whole vocabulary: beyond a truncated rank's last one,
// logits that it has not sent may come first.
size_t safe_prefix(const std::vector<Part>& parts, const std::vector<Candidate>& sorted) {
  size_t safe = sorted.size();
  for (const Part& part : parts) {
    if (!part.head.truncated) continue;
    const auto end = std::upper_bound(sorted.begin(), sorted.end(), part.candidates.back(), better);
    safe = std::min(safe, static_cast<size_t>(end - sorted.begin()));
  }
  return safe;
}

// Bins of equal width below the best logit: they keep the order between bins, so that only two ever need sorting.
constexpr int kBins = 4096;
constexpr float kBinsPerUnit = 64.0f;  // of (top - logit) / temperature; the last bin takes all weights below e^-64

// One rank's whole shard in the second round, with weights relative to the best logit of all.
class BinnedShard {
 public:
  void load(const Part& part, float top, float scale) {
    const int count = part.head.vocab_local;
    begin_ = part.head.vocab_begin;
    logits_.resize(count);
    weights_.resize(count);
    bins_.resize(count);
    if (count) std::memcpy(logits_.data(), part.dense, logits_.size() * sizeof(float));
    raw_ = part.dense + logits_.size() * sizeof(float);
    logit_kernels().exp_values(logits_.data(), count, top, scale, weights_.data());
    const float per_logit = scale * kBinsPerUnit;
    for (int i = 0; i < count; ++i) {
      const float depth = (top - logits_[i]) * per_logit;
      bins_[i] = static_cast<int32_t>(depth < kBins - 1 ? depth : kBins - 1.0f);
    }
  }

  void add_mass(std::vector<double>& mass) const {
    for (size_t i = 0; i < weights_.size(); ++i) mass[bins_[i]] += weights_[i];
  }

  // Appends the bin's tokens; .raw is their weight.
  void collect(int bin, std::vector<Candidate>& out) const {
    for (size_t i = 0; i < bins_.size(); ++i) {
      if (bins_[i] == bin && weights_[i] > 0.0f)
        out.push_back({begin_ + static_cast<int32_t>(i), logits_[i], weights_[i]});
    }
  }

  bool holds(int32_t id) const { return id >= begin_ && static_cast<size_t>(id - begin_) < logits_.size(); }

  float raw(int32_t id) const {
    float value;
    std::memcpy(&value, raw_ + static_cast<size_t>(id - begin_) * sizeof(float), sizeof value);
    return value;
  }

 private:
  int32_t begin_ = 0;
  std::vector<float> logits_, weights_;
  std::vector<int32_t> bins_;
  const uint8_t* raw_ = nullptr;  // the model's own logits, if logprobs are wanted
};

}  // namespace

Uniforms sampling::uniforms(const SamplingParams& params, int position) {
  uint32_t counter[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(params.sample_index), 0, 0};
  uint32_t key[2] = {static_cast<uint32_t>(params.seed), static_cast<uint32_t>(params.seed >> 32)};
  philox4x32_10(counter, key);
  const auto unit = [](uint32_t high, uint32_t low) {
    return static_cast<double>(((static_cast<uint64_t>(high) << 32) | low) >> 11) * (1.0 / 9007199254740992.0);
  };
  return {unit(counter[0], counter[1]), unit(counter[2], counter[3])};
}

const char* describe(SampleStatus status) {
  return status == SampleStatus::kOk
             ? "ok"
             : "the model's logits hold a NaN or +Inf, or nothing above -Inf: no token can be drawn";
}

size_t blob_bytes(const uint8_t* blob) {
  uint32_t bytes;
  std::memcpy(&bytes, blob, sizeof bytes);
  return bytes;
}

SamplingParams SamplingParams::parse(const int32_t*& p, const int32_t* end) {
  constexpr int32_t kLargest = std::numeric_limits<int32_t>::max();
  constexpr float kLargestReal = std::numeric_limits<float>::max();
  Reader in(p, end);
  SamplingParams out;
  const int32_t flags = in.integer("sampling flags", 0, 7);
  out.do_sample = flags & 1;
  out.want_logprobs = flags & 2;
  out.suppress_repetition_in_generation = flags & 4;
  out.temperature = in.real("temperature", 0.0f, kLargestReal);
  out.top_k = in.integer("top_k", 0, kLargest);
  out.top_p = in.real("top_p", 0.0f, 1.0f);
  out.repetition_penalty = in.real("repetition_penalty", std::numeric_limits<float>::min(), kLargestReal);
  out.presence_penalty = in.real("presence_penalty", -kLargestReal, kLargestReal);
  out.frequency_penalty = in.real("frequency_penalty", -kLargestReal, kLargestReal);
  out.no_repeat_ngram_size = in.integer("no_repeat_ngram_size", 0, kLargest);
  out.min_length = in.integer("min_length", 0, kLargest);
  out.top_logprobs = in.integer("top_logprobs", 0, kMaxTopLogprobs);
  const uint32_t seed_low = static_cast<uint32_t>(in.word("seed"));
  const uint32_t seed_high = static_cast<uint32_t>(in.word("seed"));
  out.seed = (static_cast<uint64_t>(seed_high) << 32) | seed_low;
  out.sample_index = in.integer("sample_index", 0, kLargest);
  out.prompt_len = in.integer("prompt_len", 0, kLargest);
  const int32_t n_eos = in.integer("number of end-of-sequence ids", 0, kLargest);
  const int32_t n_bad_words = in.integer("number of bad words", 0, kLargest);
  out.eos = in.ids("the end-of-sequence ids", n_eos);
  for (int32_t i = 0; i < n_bad_words; ++i) {
    const int32_t length = in.integer("length of a bad word", 1, kLargest);
    out.bad_words.push_back(in.ids("a bad word", length));
  }
  p = in.at();
  return out;
}

bool merge(const SamplingParams& params, int position, const Blobs& blobs, SampleOutput& out) {
  const std::vector<Part> parts = open_all(params, blobs, kCandidatesMagic);
  double log_norm;
  if (!begin_output(params, parts, log_norm, out)) return true;
  const float top = highest(parts);
  if (top == kBanned) {
    choose_fallback(params, parts, log_norm, out);
    return true;
  }
  const Draw kind = kind_of(params);
  if (kind == Draw::all) {
    draw_unrestricted(params, position, parts, top, log_norm, out);
    return true;
  }
  std::vector<Candidate> sorted;
  for (const Part& part : parts) {
    const auto middle = static_cast<std::ptrdiff_t>(sorted.size());
    sorted.insert(sorted.end(), part.candidates.begin(), part.candidates.end());
    std::inplace_merge(sorted.begin(), sorted.begin() + middle, sorted.end(), better);
  }
  if (kind == Draw::greedy) {
    choose(params, log_norm, sorted[0].id, sorted[0].raw, out);
    return true;
  }

  size_t safe = sorted.size();
  double mass = 0.0;   // that top_p is a part of
  bool whole = false;  // the candidates are all there is: mass is their sum
  if (kind == Draw::top_k) {
    safe = std::min(safe, static_cast<size_t>(params.top_k));
    whole = true;
  } else {
    safe = safe_prefix(parts, sorted);
    whole = true;
    for (const Part& part : parts) {
      whole = whole && !part.head.truncated;
      if (part.head.max != kBanned)
        mass += part.head.sum * std::exp((static_cast<double>(part.head.max) - top) / params.temperature);
    }
  }
  std::vector<double> weights(safe);
  double sum = 0.0;
  for (size_t i = 0; i < safe; ++i) {
    weights[i] = std::exp((static_cast<double>(sorted[i].logit) - top) / params.temperature);
    sum += weights[i];
  }
  if (whole) mass = sum;
  size_t kept = safe;
  if (params.top_p < 1.0f) {
    const double need = mass * static_cast<double>(params.top_p);
    sum = 0.0;
    for (kept = 0; kept < safe && (kept == 0 || sum < need); ++kept) sum += weights[kept];
    if (sum < need && !whole) return false;
  }
  const size_t pick = inverse_cdf(weights, kept, sum, uniforms(params, position).first);
  choose(params, log_norm, sorted[pick].id, sorted[pick].raw, out);
  return true;
}

void merge_full(const SamplingParams& params, int position, const Blobs& blobs, SampleOutput& out) {
  if (kind_of(params) != Draw::nucleus)
    throw std::invalid_argument("a second round is only for a nucleus: top_k 0, top_p < 1");
  const std::vector<Part> parts = open_all(params, blobs, kFullMagic);
  double log_norm;
  if (!begin_output(params, parts, log_norm, out)) return;
  const float top = highest(parts);
  if (top == kBanned) return choose_fallback(params, parts, log_norm, out);

  const float scale = 1.0f / params.temperature;
  thread_local std::vector<BinnedShard>
      shards;  // kept: most of a second round's time would be the kernel's, for new pages
  shards.resize(parts.size());
  std::vector<double> mass(kBins, 0.0);
  for (size_t r = 0; r < parts.size(); ++r) {
    shards[r].load(parts[r], top, scale);
    shards[r].add_mass(mass);
  }
  const auto sorted_bin = [&](int bin) {
    std::vector<Candidate> entries;
    for (const BinnedShard& shard : shards) shard.collect(bin, entries);
    std::sort(entries.begin(), entries.end(), better);
    return entries;
  };

  double need = 0.0;
  for (double m : mass) need += m;
  need *= static_cast<double>(params.top_p);
  int last = -1;  // the bin that the nucleus ends in
  double before = 0.0;
  for (int b = 0; b < kBins; ++b) {
    if (mass[b] <= 0.0) continue;
    if (last >= 0) before += mass[last];
    last = b;
    if (before + mass[b] >= need) break;
  }
  const std::vector<Candidate> tail = sorted_bin(last);
  size_t kept = 0;
  double sum = before;
  for (; kept < tail.size() && (kept == 0 || sum < need); ++kept) sum += tail[kept].raw;

  double left = uniforms(params, position).first * sum;
  int bin = last;
  for (int b = 0; b < last; ++b) {
    if (mass[b] <= 0.0) continue;
    if (left < mass[b]) {
      bin = b;
      break;
    }
    left -= mass[b];
  }
  const std::vector<Candidate> entries =
      bin == last ? std::vector<Candidate>(tail.begin(), tail.begin() + kept) : sorted_bin(bin);
  size_t pick = 0;
  for (; pick + 1 < entries.size() && left >= entries[pick].raw; ++pick) left -= entries[pick].raw;
  const int32_t id = entries[pick].id;
  float raw = 0.0f;
  for (const BinnedShard& shard : shards) {
    if (params.logprobs() && shard.holds(id)) raw = shard.raw(id);
  }
  choose(params, log_norm, id, raw, out);
}

}  // namespace as
