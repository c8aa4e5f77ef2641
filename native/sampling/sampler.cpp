// Rank 0's side of sampling: parameters, random numbers, and the merge of the shards' blobs.
#include "sampling/sampler.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "common/exact.h"
#include "sampling/sampler_blob.h"

namespace as {

namespace {

using namespace sampling;

// Reads consecutive words. Errors name the field.
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

// A blob's header. The candidates after it are read in place, aligned or not.
struct Part {
  Header head;
  const uint8_t* candidates;
  void append_candidates(std::vector<Candidate>& out) const { append(candidates, head.n_candidates, out); }
  // The tokens with the largest unprocessed logits; their .logit equals .raw.
  void append_top(std::vector<Candidate>& out) const {
    append(candidates + head.n_candidates * sizeof(Candidate), head.n_top, out);
  }

 private:
  static void append(const uint8_t* from, int32_t count, std::vector<Candidate>& out) {
    const size_t at = out.size();
    out.resize(at + count);
    if (count) std::memcpy(out.data() + at, from, count * sizeof(Candidate));
  }
};

Part open_blob(const std::pair<const uint8_t*, size_t>& blob) {
  Part part;
  if (blob.second < sizeof(Header)) {
    throw std::invalid_argument("sampling blob has " + std::to_string(blob.second) + " bytes; its header alone has " +
                                std::to_string(sizeof(Header)));
  }
  std::memcpy(&part.head, blob.first, sizeof(Header));
  part.candidates = blob.first + sizeof(Header);
  const Header& head = part.head;
  if (head.magic != kCandidatesMagic || head.bytes > blob.second || head.n_candidates < 0 || head.n_top < 0 ||
      head.vocab_local < 0) {
    throw std::invalid_argument("sampling blob is not one of this version's (magic " + std::to_string(head.magic) +
                                ", " + std::to_string(head.bytes) + " of " + std::to_string(blob.second) + " bytes)");
  }
  const size_t listed = static_cast<size_t>(head.n_candidates) + static_cast<size_t>(head.n_top);
  if (head.bytes != sizeof(Header) + listed * sizeof(Candidate)) {
    throw std::invalid_argument("sampling blob of " + std::to_string(head.bytes) +
                                " bytes does not fit its own header");
  }
  return part;
}

std::vector<Part> open_all(const Blobs& blobs) {
  if (blobs.empty()) throw std::invalid_argument("no sampling blobs to merge; one for each rank is needed");
  std::vector<Part> parts;
  parts.reserve(blobs.size());
  for (const auto& blob : blobs) parts.push_back(open_blob(blob));
  return parts;
}

// The `most` largest logits of all ranks, from as many of each rank. Sorted lazily, as far as they are read.
class Ranking {
 public:
  Ranking(const std::vector<Part>& parts, size_t most) {
    for (const Part& part : parts) {
      part.append_candidates(all_);
      whole_ = whole_ && !part.head.truncated;
    }
    whole_ = whole_ && all_.size() <= most;
    size_ = std::min(all_.size(), most);
  }
  size_t size() const { return size_; }
  bool whole() const { return whole_; }  // no other token can be sampled
  const Candidate& operator[](size_t i) {
    if (i >= sorted_) sort(i + 1);
    return all_[i];
  }

 private:
  void sort(size_t count) {
    const size_t end = std::min(size_, std::max({count, 4 * sorted_, size_t{32}}));
    const auto first = all_.begin() + sorted_, last = all_.begin() + end;
    if (end < all_.size()) std::nth_element(first, last, all_.end(), better);
    std::sort(first, last, better);
    sorted_ = end;
  }
  std::vector<Candidate> all_;
  size_t size_ = 0, sorted_ = 0;
  bool whole_ = true;
};

// Fills in everything but the token. Returns false if no token can be sampled because the logits are not finite.
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
    if (part.head.raw_max != kBanned)
      sum += part.head.raw_sum * exact::exp(static_cast<double>(part.head.raw_max) - top);
  }
  log_norm = top + exact::log(sum);
  std::vector<Candidate> best;
  for (const Part& part : parts) part.append_top(best);
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

// Every token is banned: see sampler.h for the fallback.
void choose_fallback(const SamplingParams& params, const std::vector<Part>& parts, double log_norm, SampleOutput& out) {
  const Header* best = nullptr;
  const Header* allowed = nullptr;
  for (const Part& part : parts) {
    const Header& head = part.head;
    if (head.argmax_id >= 0 && (!best || head.argmax_raw > best->argmax_raw)) best = &head;
    if (head.allowed_id >= 0 && (!allowed || head.allowed_raw > allowed->allowed_raw)) allowed = &head;
  }
  if (allowed) return choose(params, log_norm, allowed->allowed_id, allowed->allowed_raw, out);
  for (const Part& part : parts) {
    if (part.head.eos_id >= 0) return choose(params, log_norm, part.head.eos_id, part.head.eos_raw, out);
  }
  choose(params, log_norm, best->argmax_id, best->argmax_raw, out);
}

float highest(const std::vector<Part>& parts) {
  float top = kBanned;
  for (const Part& part : parts) top = std::max(top, part.head.max);
  return top;
}

// The index in `weights` where the running sum exceeds uniform * (sum of the first `kept`).
size_t inverse_cdf(const std::vector<float>& weights, size_t kept, double sum, double uniform) {
  double left = uniform * sum;
  size_t pick = 0;
  for (size_t i = 0; i < kept; ++i) {
    if (weights[i] <= 0.0f) continue;
    pick = i;
    if (left < weights[i]) break;
    left -= weights[i];
  }
  return pick;
}

// The largest key among the ranks' winners. The lowest rank wins ties, as the lowest chunk does within a rank.
template <class Head, class HeadOf>
const Head* max_winner(size_t count, HeadOf head_of) {
  const Head* best = nullptr;
  for (size_t r = 0; r < count; ++r) {
    const Head& head = head_of(r);
    if (head.winner_id >= 0 && (!best || head.winner_key > best->winner_key)) best = &head;
  }
  if (!best) throw std::invalid_argument("no rank has a token to sample");
  return best;
}

// Called when the place is found or (`all`) the set has every token. Sets the next target from the mass up to there.
void end_search(const SamplingParams& params, bool all, uint64_t mass, Search& search) {
  if (search.by_count && params.top_p < 1.0f) {
    search.by_count = false;
    search.target = static_cast<double>(mass) * static_cast<double>(params.top_p);
    search.place = search.count = search.mass = 0;
    search.level = 0;
    return;
  }
  if (all) search.place = std::numeric_limits<uint64_t>::max();
  if (params.min_p > 0.0f) {
    const uint64_t last = (static_cast<uint64_t>(min_p_depth(params)) << kIdBits) | ((uint64_t{1} << kIdBits) - 1);
    search.place = std::min(search.place, last);
  }
  search.level = kLevels;
}

// Starts the search for the last token of a set: by count first if there is a top_k, then by weight if there is a
// top_p.
void begin_search(const SamplingParams& params, float top, double log_norm, Search& search) {
  search = Search{};
  search.top = top;
  search.log_norm = log_norm;
  search.by_count = params.top_k > 0;
  search.target = search.by_count ? params.top_k : -1.0;
  if (!search.by_count && params.top_p == 1.0f) end_search(params, true, 0, search);
}

}  // namespace

Uniforms sampling::uniforms(const SamplingParams& params, int position) {
  return uniforms_of({params.seed, params.sample_index, position});
}

Uniforms sampling::chunk_uniforms(const SamplingParams& params, int position, int pair) {
  return chunk_uniforms_of({params.seed, params.sample_index, position}, pair);
}

int32_t sampling::min_p_depth(const SamplingParams& params) {
  if (params.min_p <= 0.0f) return kDeepest;
  const double depth = -exact::log(static_cast<double>(params.min_p)) * (1 << 24);
  return static_cast<int32_t>(std::min<double>(depth, kDeepest));
}

const char* describe(SampleStatus status) {
  return status == SampleStatus::kOk
             ? "ok"
             : "the model's logits hold a NaN or +Inf, or nothing above -Inf: no token can be sampled";
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
  const int32_t flags = in.integer("sampling flags", 0, 15);
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
  if (flags & 8) {
    out.min_p = in.real("min_p", 0.0f, 1.0f);
    const int32_t n_biases = in.integer("number of logit biases", 0, kLargest);
    for (int32_t i = 0; i < n_biases; ++i) {
      const int32_t id = in.integer("id of a logit bias", 0, kLargest);
      out.logit_bias.emplace_back(id, in.real("logit bias", -kLargestReal, kLargestReal));
    }
  }
  p = in.at();
  return out;
}

bool may_narrow(const SamplingParams& params) {
  const SamplingKind kind = kind_of(params);
  return kind == SamplingKind::nucleus || (kind == SamplingKind::top_k && params.top_k > kCandidates);
}

const SamplingParams& scoring_params() {
  static const SamplingParams params = [] {
    SamplingParams p;
    p.do_sample = false, p.want_logprobs = true, p.top_logprobs = kMaxTopLogprobs;
    return p;
  }();
  return params;
}

void score(int32_t target, const Blobs& blobs, SampleOutput& out) {
  const std::vector<Part> parts = open_all(blobs);
  double log_norm;
  if (!begin_output(scoring_params(), parts, log_norm, out)) return;
  for (const Part& part : parts)
    if (part.head.target_here) return choose(scoring_params(), log_norm, target, part.head.target_raw, out);
  throw std::invalid_argument("id " + std::to_string(target) + " is in no rank's part of the vocabulary");
}

bool merge(const SamplingParams& params, int position, const Blobs& blobs, Search& search, SampleOutput& out) {
  const std::vector<Part> parts = open_all(blobs);
  double log_norm;
  if (!begin_output(params, parts, log_norm, out)) return true;
  const float top = highest(parts);
  if (top == kBanned) {
    choose_fallback(params, parts, log_norm, out);
    return true;
  }
  const SamplingKind kind = kind_of(params);
  if (kind == SamplingKind::all) {
    const Header* head = max_winner<Header>(parts.size(), [&](size_t r) -> const Header& { return parts[r].head; });
    choose(params, log_norm, head->winner_id, head->winner_raw, out);
    return true;
  }
  Ranking ranking(parts, kind == SamplingKind::top_k ? std::min(params.top_k, kCandidates) : kCandidates);
  if (kind == SamplingKind::greedy) {
    choose(params, log_norm, ranking[0].id, ranking[0].raw, out);
    return true;
  }
  bool whole = ranking.whole();
  if (kind == SamplingKind::top_k && params.top_k <= kCandidates) whole = true;
  if (kind == SamplingKind::top_k && !whole) {
    begin_search(params, top, log_norm, search);
    return false;
  }

  const float scale = 1.0f / params.temperature;
  const double steps = steps_of(scale);
  const int32_t deepest = min_p_depth(params);
  const auto behind_min_p = [&](size_t i) {
    return params.min_p > 0.0f && depth_of(ranking[i].logit, top, steps) > deepest;
  };
  std::vector<float> weights;
  const auto weight = [&](size_t i) {
    for (size_t from = weights.size(); from <= i; from = weights.size()) {  // 64 at a time
      float logits[64];
      const size_t count = std::min<size_t>(64, ranking.size() - from);
      for (size_t k = 0; k < count; ++k) logits[k] = ranking[from + k].logit;
      weights.resize(from + count);
      logit_kernels().exp_values(logits, static_cast<int>(count), top, scale, weights.data() + from);
    }
    return weights[i];
  };
  double need = std::numeric_limits<double>::infinity();
  if (params.top_p < 1.0f) {
    double mass = 0.0;  // top_p is a fraction of it
    if (kind == SamplingKind::nucleus) {
      for (const Part& part : parts) {
        if (part.head.max != kBanned)
          mass += part.head.sum * exact::exp((static_cast<double>(part.head.max) - top) * scale);
      }
    } else {
      for (size_t i = 0; i < ranking.size(); ++i) mass += weight(i);
    }
    need = mass * static_cast<double>(params.top_p);
  }
  double sum = 0.0;
  size_t kept = 0;
  for (; kept < ranking.size() && (kept == 0 || sum < need) && !behind_min_p(kept); ++kept) sum += weight(kept);
  if (kept == ranking.size() && sum < need && !whole) {
    begin_search(params, top, log_norm, search);
    return false;
  }
  const size_t pick = inverse_cdf(weights, kept, sum, uniforms(params, position).first);
  choose(params, log_norm, ranking[pick].id, ranking[pick].raw, out);
  return true;
}

std::vector<Blobs> blobs_of(const std::vector<std::string>& messages, size_t rows) {
  std::vector<Blobs> all(rows);
  for (size_t rank = 0; rank < messages.size(); ++rank) {
    const auto* data = reinterpret_cast<const uint8_t*>(messages[rank].data());
    size_t at = 0;
    for (Blobs& row : all) {
      const size_t left = messages[rank].size() - at;
      const size_t bytes = left < sizeof(uint32_t) ? 0 : blob_bytes(data + at);
      if (bytes < sizeof(uint32_t) || bytes > left)
        throw std::invalid_argument("candidates of rank " + std::to_string(rank) + " end early");
      row.emplace_back(data + at, bytes);
      at += bytes;
    }
    if (at != messages[rank].size())
      throw std::invalid_argument("rank " + std::to_string(rank) + " sent candidates of more rows than there are");
  }
  return all;
}

bool merge_narrowed(const SamplingParams& params, const Blobs& blobs, Search& search, SampleOutput& out) {
  std::vector<NarrowedHeader> heads;
  std::vector<Bin> bins(kBins, Bin{});
  for (const auto& blob : blobs) {
    NarrowedHeader head{};
    if (blob.second >= sizeof head) std::memcpy(&head, blob.first, sizeof head);
    if (head.magic != kNarrowedMagic || head.n_bins < 0 || head.n_bins > kBins || head.bytes > blob.second ||
        head.bytes != sizeof head + head.n_bins * sizeof(Bin))
      throw std::invalid_argument("sampling blob of " + std::to_string(blob.second) +
                                  " bytes does not belong to a search");
    for (int i = 0; i < head.n_bins; ++i) {
      Bin bin;
      std::memcpy(&bin, blob.first + sizeof head + i * sizeof bin, sizeof bin);
      if (bin.index >= static_cast<uint32_t>(kBins)) throw std::invalid_argument("sampling blob names an invalid bin");
      bins[bin.index].count += bin.count;
      bins[bin.index].mass += bin.mass;
    }
    heads.push_back(head);
  }
  if (search.level == kLevels) {
    const auto* head =
        max_winner<NarrowedHeader>(heads.size(), [&](size_t r) -> const NarrowedHeader& { return heads[r]; });
    choose(params, search.log_norm, head->winner_id, head->winner_raw, out);
    return true;
  }
  uint64_t total = 0;
  for (const Bin& bin : bins) total += bin.mass;
  if (search.target < 0.0) search.target = static_cast<double>(total) * static_cast<double>(params.top_p);
  const int shift = shift_of(search.level);
  for (int b = 0; b < kBins; ++b) {
    if (!bins[b].count) continue;
    const uint64_t reached = search.by_count ? search.count + bins[b].count : search.mass + bins[b].mass;
    if (static_cast<double>(reached) < search.target) {
      search.count += bins[b].count;
      search.mass += bins[b].mass;
      continue;
    }
    search.place |= static_cast<uint64_t>(b) << shift;
    if (bins[b].count > 1 && search.level + 1 < kLevels) {
      ++search.level;
    } else {
      search.place |= (uint64_t{1} << shift) - 1;  // a single token, so the remaining digits do not matter
      end_search(params, false, search.mass + bins[b].mass, search);
    }
    return false;
  }
  end_search(params, true, search.mass, search);
  return false;
}

}  // namespace as
