// Vocabulary-parallel sampling: logits processors, filters and sampling of one row at a time.
//
// Every rank holds the logits of a contiguous shard of the vocabulary. Sampling a token takes these calls:
//
//   every rank:  candidates(input, vocab_begin, vocab_local, vocab_size, blob)        -> blobs to rank 0
//   rank 0:      merge(params, position, blobs, search, out)                         -> true: out is final
//   while false (a nucleus or top_k wider than the candidates):
//   every rank:  narrow(input, vocab_begin, vocab_local, vocab_size, search, blob)    -> blobs to rank 0
//   rank 0:      merge_narrowed(params, blobs, search, out)                          -> true: out is final
//
// with position = history_len, the absolute index of the sampled token, and blobs in rank order. Rank 0 sends `search`
// to the other ranks before each narrow(). candidates() and narrow() modify the logits while they run and restore them
// before they return. A blob has at most 24 KB.
//
// If a set is wider than the candidates, a radix search over places (sampler_blob.h) finds its last token. In each
// round the ranks send the number and weight of the tokens in each of 1,024 bins. Rank 0 chooses the bin in which the
// set ends and requests the bins within it. Two or three rounds are usual. A last round samples among the tokens up to
// there.
//
// Processors apply in this order: repetition penalty (prompt and output; divides positive logits, multiplies others),
// presence and frequency penalty (output only), no_repeat_ngram_size and bad words (prompt and output), min_length,
// logit bias (does not undo a ban), mask. Then come temperature, top-k, top-p (of the tokens that top-k kept), min-p
// (of the remaining tokens, those at least min_p times as probable as the most probable one), renormalization and one
// sample. Greedy choice and every sort break ties towards the lowest id. Log probabilities are those of the model's
// unprocessed logits.
// Sets of up to 1,024 candidates are sampled by inverse CDF. Wider sets, and sampling without top-k and top-p, first
// choose the chunk of the vocabulary with the largest log(weight) + Gumbel noise, then a token in it by inverse CDF. So
// every rank can find its best chunk alone. Chunks are fixed (chunk_of), and shards must consist of whole chunks.
//
// If everything is banned, the token is the argmax of the unprocessed logits among the ids that the mask allows. If the
// mask allows none, it is the first end-of-sequence id or, without one, the argmax of the unprocessed logits.
// The same (parameters, history, logits, shard boundaries) give the same bits on every ISA: sums run in an order fixed
// by the shard's chunks, not by threads or other rows. Randomness comes only from Philox4x32-10 at (seed,
// sample_index, position, chunk). Any number of ranks samples the same token: weights are relative to a chunk's maximum
// or to that of all ranks, never a shard's. (The number of shards changes sums over shards in double by about 1e-16.
// That changes the end of a nucleus about once in 1e13 samples.)
// Thread safety: all functions are reentrant. Calls for different rows, including merge(), may run in parallel
// (blobs_of() locates each row's blobs). For few rows and many threads, ShardSampler divides candidates() and narrow()
// into parts.
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

// The content of a bin at one level of a search.
struct Bin {
  uint32_t index, count;
  uint64_t mass;  // sum of weights relative to the largest logit of all, in units of kMassUnit: exact in any order
};

}  // namespace sampling

// One request's sampling block (see parse). Defaults are neutral: unrestricted sampling at temperature 1.
struct SamplingParams {
  bool do_sample = true;
  bool want_logprobs = false;                      // otherwise SampleOutput::logprob is 0 (top_logprobs > 0 implies it)
  bool suppress_repetition_in_generation = false;  // repetition penalty over generated tokens only
  float temperature = 1.0f;                        // below 1e-5: greedy
  int32_t top_k = 0;                               // 0: off
  float top_p = 1.0f;                              // 1: off
  float repetition_penalty = 1.0f;
  float presence_penalty = 0.0f;
  float frequency_penalty = 0.0f;
  int32_t no_repeat_ngram_size = 0;  // 0: off
  int32_t min_length = 0;            // prompt and output; end-of-sequence ids are banned before it
  int32_t top_logprobs = 0;          // 0...20
  uint64_t seed = 0;
  int32_t sample_index = 0;
  int32_t prompt_len = 0;  // history[prompt_len...] was generated
  std::vector<int32_t> eos;
  std::vector<std::vector<int32_t>> bad_words;
  float min_p = 0.0f;  // 0: off
  std::vector<std::pair<int32_t, float>> logit_bias;

  // Reads one block at p and advances p. Throws std::invalid_argument that names the field, its value and its range.
  static SamplingParams parse(const int32_t*& p, const int32_t* end);

  bool greedy() const { return !do_sample || top_k == 1 || temperature < 1e-5f; }
  bool logprobs() const { return want_logprobs || top_logprobs > 0; }
};

struct SampleInput {
  const SamplingParams* params = nullptr;
  const int32_t* history = nullptr;  // prompt, then generated ids
  int history_len = 0;
  float* logits = nullptr;  // [vocab_local]; unchanged on return
  const uint32_t* mask =
      nullptr;          // or one bit for each id of the whole vocabulary, id i at word i/32, bit i%32: 1 allows it
  int32_t target = -1;  // an id whose log probability is requested: score()
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
  SampleStatus status = SampleStatus::kOk;  // a bad row does not affect others: check before using token
};

// Ids in a chunk. Shards must begin and end at multiples of it, or at the vocabulary's end. Small vocabularies have
// small chunks so that every rank gets some.
inline int chunk_of(int vocab_size) { return vocab_size <= 1024 ? 1 : vocab_size <= 16384 ? 16 : 256; }

// State of rank 0's search for the last token of a set. Plain data that ranks exchange.
struct Search {
  uint64_t place;   // of the last token; digits before `level` are final, at the end all are
  uint64_t count;   // of tokens in bins before it
  uint64_t mass;    // of the same tokens
  double target;    // count or mass that the set must reach; negative: not known yet
  double log_norm;  // for log probabilities
  float top;        // the largest logit of all ranks, after the processors
  int32_t level;    // level of the requested bins; kLevels: sample
  int32_t by_count;
};
constexpr int kLevels = 6;

using Blobs = std::vector<std::pair<const uint8_t*, size_t>>;  // one of each rank, in rank order

// Throws std::invalid_argument unless [begin, begin + local) is a valid shard of the vocabulary.
void check_shard(int begin, int local, int vocab_size);

// Appends this shard's blob to `blob` and returns its size. vocab_begin: the shard's first global id.
size_t candidates(const SampleInput& input, int vocab_begin, int vocab_local, int vocab_size,
                  std::vector<uint8_t>& blob);
size_t narrow(const SampleInput& input, int vocab_begin, int vocab_local, int vocab_size, const Search& search,
              std::vector<uint8_t>& blob);

// candidates() or narrow() of a row by several threads. One thread calls begin(), any threads call scan() for every
// part in parallel, and one thread calls finish() after them. The blob does not depend on the number of parts. In
// between, the row's logits may be modified. Reuse the object for further rows: its buffers are as large as the shard.
class ShardSampler {
 public:
  // search: null for candidates(), else as for narrow(). Everything that `input` points to must stay valid until
  // finish() returns.
  void begin(const SampleInput& input, int vocab_begin, int vocab_local, int vocab_size, int parts,
             const Search* search = nullptr);
  void scan(int part);
  // Appends the blob and returns its size.
  size_t finish(std::vector<uint8_t>& blob);

  struct Stats {
    std::vector<float> groups;  // maxima (LogitKernels::group_max)
    std::vector<float> maxima;  // of chunks
    std::vector<double> sums;   // of the chunks' weights, relative to the maximum
  };

 private:
  // Whole chunks: ids [begin, end) of the shard.
  struct Part {
    int begin, end, not_finite;
    float raw_max, max;                              // of the unprocessed logits, and of the processed ones
    std::vector<std::pair<int32_t, float>> changes;  // by processors: offset in the part, previous value
    std::vector<sampling::Bin> bins;
  };
  bool samples_narrowed() const { return narrows_ && search_.level == kLevels; }
  float* processed_logits() { return input_.mask ? masked_.data() : input_.logits; }
  // The first index of `value` in x, where `value` is the maximum of all parts' `most`.
  int first_of(const float* x, const Stats& stats, float Part::* most, float value) const;
  void put_back();
  size_t finish_candidates(std::vector<uint8_t>& blob);
  size_t finish_narrow(std::vector<uint8_t>& blob);

  SampleInput input_;
  Search search_{};
  bool narrows_ = false;
  int begin_ = 0, local_ = 0, chunk_ = 1;
  Stats raw_, processed_;      // of the unprocessed logits, and of the processed ones
  std::vector<float> masked_;  // logits under a mask
  std::vector<float> kept_;    // logits of the set to sample from
  std::vector<Part> parts_;
};

// Blobs start with their own length, so blobs of several rows can be concatenated in one message.
size_t blob_bytes(const uint8_t* blob);

// messages: of each rank, the concatenated blobs of `rows` rows. Returns each row's blobs. Throws std::invalid_argument
// if a message does not consist of exactly `rows` blobs.
std::vector<Blobs> blobs_of(const std::vector<std::string>& messages, size_t rows);

// Returns whether merge() may return false.
bool may_narrow(const SamplingParams& params);

// Return false if another round is needed, and describe it in `search`. Throw std::invalid_argument for a malformed
// blob.
bool merge(const SamplingParams& params, int position, const Blobs& blobs, Search& search, SampleOutput& out);
bool merge_narrowed(const SamplingParams& params, const Blobs& blobs, Search& search, SampleOutput& out);

// The log probability of a given id, and the most probable ids with theirs, in place of a sample. Ranks call
// candidates() with scoring_params(), without a history and with a target; then rank 0 calls score().
const SamplingParams& scoring_params();
void score(int32_t target, const Blobs& blobs, SampleOutput& out);

// The passes over all logits. sampler.cpp compiles them for the baseline and native/cpu/kernels/logits.cpp for each
// ISA. `as::AS_ISA::logit_kernels()` returns the table for use_logit_kernels(), to be called before the first sample.
struct LogitKernels {
  // Maxima of groups. A chunk of 256 logits has 16 groups with a stride of 16 (group 16 * chunk + i % 16). groups has
  // 16 * ceil(n / 256) entries; empty groups are -Inf. Returns the number of NaN and +Inf found.
  int (*group_max)(const float* x, int n, float* groups);
  // out[i] = x[i] where bit (first + i) of the mask (32 to a word) is 1, else -Inf; and the maxima of out's groups.
  // first: a multiple of 16, unless n is less than 16.
  void (*mask_group_max)(const float* x, const uint32_t* mask, int first, int n, float* out, float* groups);
  // For each chunk of 256: its maximum, from its groups' maxima, and the sum of exp((x[i] - maximum) * scale), or 0 if
  // all are -Inf. Both have ceil(n / 256) entries.
  void (*chunk_sum_exp)(const float* x, int n, const float* groups, float scale, float* maxima, double* sums);
  // out[i] = exp((x[i] - shift) * scale), where x[i] <= shift; 0 below e^-87.
  void (*exp_values)(const float* x, int n, float shift, float scale, float* out);
  // Up to 256 logits: their bins in a search's first level (sampler_blob.h), kBins for -Inf, and their masses.
  void (*weigh_bins)(const float* x, int n, float top, float scale, uint32_t* bins, uint64_t* masses);
  // Lists the indices of the logits in [low, high], of up to 256, in ascending order. Returns how many.
  int (*find_between)(const float* x, int n, float low, float high, int* found);
};
void use_logit_kernels(const LogitKernels& kernels);

}  // namespace as
