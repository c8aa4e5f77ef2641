// Vocabulary-parallel sampling: logits processors, filters and draws of one row at a time.
//
// Every rank holds the logits of a contiguous shard of the vocabulary. One draw takes these calls:
//
//   every rank:  candidates(input, vocab_begin, vocab_local, vocab_size, blob)        -> blobs to rank 0
//   rank 0:      merge(params, position, blobs, search, out)                         -> true: out is final
//   while false (a nucleus or top_k wider than the candidates):
//   every rank:  narrow(input, vocab_begin, vocab_local, vocab_size, search, blob)    -> blobs to rank 0
//   rank 0:      merge_narrowed(params, blobs, search, out)                          -> true: out is final
//
// with position = history_len, the absolute index of the token being drawn, and blobs in rank order; rank 0 sends
// `search` to the others before each narrow(). Logits hold what the model gave before each round: candidates() and
// narrow() change them while they run and put them back before they return. No blob has more than 24 KB.
//
// A set wider than the candidates is searched for its last token by a radix search over places (sampler_blob.h): ranks
// send how many tokens, and what weight, lie in each of 1,024 bins, rank 0 chooses the bin that the set ends in, and
// asks for that one's bins; as a rule two or three rounds. A last round draws among the tokens up to there.
//
// What is drawn: processors in this order: repetition penalty (prompt and output; positive logits are divided by it,
// others multiplied), presence and frequency penalty (output only), no_repeat_ngram_size and bad words (prompt and
// output), min_length, logit bias (nothing that is banned comes back), mask; then temperature, top-k, top-p (of what
// top-k left), min-p (of what those left: tokens at least min_p times as probable as the best), renormalization and one
// draw. Greedy choice and every sort break ties towards the lowest id. log probabilities are those of the model's own
// logits.
//
// How: sets of up to 1,024 candidates by inverse CDF. Without top-k and top-p, and for wider sets, first a chunk of the
// vocabulary, the one with the greatest log(weight) + Gumbel noise of its own, then by inverse CDF a token in it: every
// rank can find its best chunk alone. Chunks are fixed (chunk_of), and shards must be made of whole ones.
//
// If everything is banned, the token is the best of the model's own logits among the ids that the mask allows; if the
// mask allows none, the first end-of-sequence id; without one, the best of the model's own logits.
//
// Same bits for the same (parameters, history, logits, shard boundaries) on every ISA: sums run in an order fixed by
// the shard's chunks; threads and other rows have no part in it. The draw uses nothing but Philox4x32-10 at (seed,
// sample_index, position, chunk). The same token on any number of ranks: weights are relative to a chunk's maximum or
// that of all ranks, never a shard's. (What shards add up in double differs with their number by about 1e-16, which
// decides where a nucleus ends once in some 1e13 draws.)
//
// Thread safety: all functions are reentrant; calls on different rows may run at the same time, merge() too (blobs_of()
// says where each row's blobs are). Few rows and many threads: ShardSampler is candidates() and narrow() cut into
// parts.
//
// The sampling block, in 32-bit words (floats bit for bit): flags (1 do_sample, 2 logprobs, 4
// suppress_repetition_in_generation, 8: the extension follows at the end), temperature, top_k, top_p,
// repetition_penalty, presence_penalty, frequency_penalty, no_repeat_ngram_size, min_length, top_logprobs, seed (low,
// high), sample_index, prompt_len, number of end-of-sequence ids, number of bad words, those ids, each bad word
// (length, ids); the extension: min_p, number of logit biases, each bias (id, float).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace as {

constexpr int kMaxTopLogprobs = 20;

namespace sampling {

// What is in a bin of a level of a search.
struct Bin {
  uint32_t index, count;
  uint64_t mass;  // of weights relative to the best logit of all, in steps of kMassUnit: sums that have no order
};

}  // namespace sampling

// One request's sampling block (see parse). Neutral by default: unrestricted sampling at temperature 1.
struct SamplingParams {
  bool do_sample = true;
  bool want_logprobs = false;                      // else SampleOutput::logprob is 0 (top_logprobs > 0 implies it)
  bool suppress_repetition_in_generation = false;  // repetition penalty over generated tokens only
  float temperature = 1.0f;                        // below 1e-5: greedy
  int32_t top_k = 0;                               // 0: off
  float top_p = 1.0f;                              // 1: off
  float repetition_penalty = 1.0f;
  float presence_penalty = 0.0f;
  float frequency_penalty = 0.0f;
  int32_t no_repeat_ngram_size = 0;  // 0: off
  int32_t min_length = 0;            // prompt and output; end-of-sequence ids are banned before
  int32_t top_logprobs = 0;          // 0...20
  uint64_t seed = 0;
  int32_t sample_index = 0;
  int32_t prompt_len = 0;  // history[prompt_len...] was generated
  std::vector<int32_t> eos;
  std::vector<std::vector<int32_t>> bad_words;
  float min_p = 0.0f;  // 0: off
  std::vector<std::pair<int32_t, float>> logit_bias;

  // Reads one block at p and moves p behind it. Throws std::invalid_argument that names the field, its value and its
  // range.
  static SamplingParams parse(const int32_t*& p, const int32_t* end);

  bool greedy() const { return !do_sample || top_k == 1 || temperature < 1e-5f; }
  bool logprobs() const { return want_logprobs || top_logprobs > 0; }
};

struct SampleInput {
  const SamplingParams* params = nullptr;
  const int32_t* history = nullptr;  // prompt, then what was generated
  int history_len = 0;
  float* logits = nullptr;  // [vocab_local]; unchanged on return
  const uint32_t* mask =
      nullptr;          // or one bit for each id of the whole vocabulary, id i at word i/32, bit i%32: 1 allows it
  int32_t target = -1;  // an id whose log probability is wanted: score()
};

enum class SampleStatus : int32_t {
  kOk = 0,
  kNotFinite = 1,  // a NaN or +Inf among the logits, or no logit above -Inf: token is -1
};

// Text of a status for error messages, e.g. "the model's logits hold a NaN or an infinity".
const char* describe(SampleStatus status);

struct SampleOutput {
  int32_t token = -1;
  float logprob = 0.0f;
  int32_t top_ids[kMaxTopLogprobs];         // -1 where unused
  float top_logprobs[kMaxTopLogprobs];      // 0 where unused
  SampleStatus status = SampleStatus::kOk;  // a bad row never harms others: check it before using token
};

// Ids in a chunk: shards must begin and end at multiples of it, or at the vocabulary's end. Small vocabularies have
// small chunks, so that every rank gets some.
inline int chunk_of(int vocab_size) { return vocab_size <= 1024 ? 1 : vocab_size <= 16384 ? 16 : 256; }

// Where rank 0 is in its search for the last token of a set; plain data that ranks send each other.
struct Search {
  uint64_t place;   // digits above `level` are the last token's; at last all
  uint64_t count;   // of tokens in bins before it
  uint64_t mass;    // of the same
  double target;    // count or mass that the set has to reach; negative: not known yet
  double log_norm;  // for log probabilities
  float top;        // the best logit of all ranks, after the processors
  int32_t level;    // whose bins are wanted; kLevels: the draw
  int32_t by_count;
};
constexpr int kLevels = 6;

using Blobs = std::vector<std::pair<const uint8_t*, size_t>>;  // one for each rank, in rank order

// Throws std::invalid_argument unless [begin, begin + local) can be a shard of the vocabulary.
void check_shard(int begin, int local, int vocab_size);

// Appends this shard's blob to `blob` and returns how many bytes that were. vocab_begin: the shard's first global id.
size_t candidates(const SampleInput& input, int vocab_begin, int vocab_local, int vocab_size,
                  std::vector<uint8_t>& blob);
size_t narrow(const SampleInput& input, int vocab_begin, int vocab_local, int vocab_size, const Search& search,
              std::vector<uint8_t>& blob);

// candidates() or narrow() of a row by several threads: begin() by one, then scan() of every part by any, at the same
// time, and when all are done finish() by one. The blob has the same bytes however many parts there are. In between,
// the row's logits may be changed. To be kept for further rows: what it allocates is of the vocabulary's size.
class ShardSampler {
 public:
  // search: null for candidates(), else narrow()'s. What `input` points to has to stay until finish() returns.
  void begin(const SampleInput& input, int vocab_begin, int vocab_local, int vocab_size, int parts,
             const Search* search = nullptr);
  void scan(int part);
  // Appends the blob and returns how many bytes that were.
  size_t finish(std::vector<uint8_t>& blob);

  struct Stats {
    std::vector<float> groups;  // maxima (LogitKernels::group_max)
    std::vector<float> maxima;  // of chunks
    std::vector<double> sums;   // of chunks' weights, relative to the maximum
  };

 private:
  // Whole chunks: ids [begin, end) of the shard.
  struct Part {
    int begin, end, not_finite;
    float raw_max, max;                              // of the model's logits, and of what is drawn from
    std::vector<std::pair<int32_t, float>> changes;  // of processors: place in the part, what was there before
    std::vector<sampling::Bin> bins;
  };
  bool samples_narrowed() const { return narrows_ && search_.level == kLevels; }
  float* processed_logits() { return input_.mask ? masked_.data() : input_.logits; }
  // The first of x that is `value`, the greatest of all parts' `most`.
  int first_of(const float* x, const Stats& stats, float Part::* most, float value) const;
  void put_back();
  size_t finish_candidates(std::vector<uint8_t>& blob);
  size_t finish_narrow(std::vector<uint8_t>& blob);

  SampleInput input_;
  Search search_{};
  bool narrows_ = false;
  int begin_ = 0, local_ = 0, chunk_ = 1;
  Stats raw_, processed_;      // of the model's logits, and of what is drawn from
  std::vector<float> masked_;  // logits under a mask
  std::vector<float> kept_;    // those of the set that is drawn from
  std::vector<Part> parts_;
};

// Blobs start with their own length, so that blobs of several rows can follow one another in one message.
size_t blob_bytes(const uint8_t* blob);

// messages: each rank's, the blobs of `rows` rows one after the other. Returns each row's blobs. Throws
// std::invalid_argument unless they are just that.
std::vector<Blobs> blobs_of(const std::vector<std::string>& messages, size_t rows);

// Whether merge() may return false.
bool may_narrow(const SamplingParams& params);

// False: another round, as `search` says. Both throw std::invalid_argument on a blob that is not one of this version's.
bool merge(const SamplingParams& params, int position, const Blobs& blobs, Search& search, SampleOutput& out);
bool merge_narrowed(const SamplingParams& params, const Blobs& blobs, Search& search, SampleOutput& out);

// The log probability of a given id, and the likeliest ids with theirs, instead of a draw: candidates() with
// scoring_params(), without a history, of the target; then rank 0's score(), whose token is that id.
const SamplingParams& scoring_params();
void score(int32_t target, const Blobs& blobs, SampleOutput& out);

// The passes over all logits. sampler.cpp has them compiled for the baseline; native/cpu/kernels/logits.cpp is the same
// code for each ISA: `as::AS_ISA::logit_kernels()` returns the table to hand to use_logit_kernels() before the first
// draw.
struct LogitKernels {
  // Maxima of groups: in each chunk of 256 logits, 16 groups with a stride of 16 (group 16 * chunk + i % 16). Groups
  // has 16 * ceil(n / 256) entries; empty groups are -Inf. Returns the number of NaN and +Inf found.
  int (*group_max)(const float* x, int n, float* groups);
  // out[i] = x[i] where bit (first + i) of the mask (32 to a word) is 1, -Inf elsewhere; and the maxima of out's
  // groups. first: a multiple of 16, or n less than 16.
  void (*mask_group_max)(const float* x, const uint32_t* mask, int first, int n, float* out, float* groups);
  // Of each chunk of 256: its maximum, from its groups', and the sum of exp((x[i] - maximum) * scale), 0 if all are
  // -Inf. Both have ceil(n / 256) entries.
  void (*chunk_sum_exp)(const float* x, int n, const float* groups, float scale, float* maxima, double* sums);
  // out[i] = exp((x[i] - shift) * scale), where x[i] <= shift; 0 below e^-87.
  void (*exp_values)(const float* x, int n, float shift, float scale, float* out);
  // Of up to 256 logits: the bin of a search's first level (sampler_blob.h), kBins if the logit is -Inf, and the mass.
  void (*weigh_bins)(const float* x, int n, float top, float scale, uint32_t* bins, uint64_t* masses);
  // Lists which of up to 256 logits are in [low, high], in ascending order, and returns how many.
  int (*find_between)(const float* x, int n, float low, float high, int* found);
};
void use_logit_kernels(const LogitKernels& kernels);

}  // namespace as
