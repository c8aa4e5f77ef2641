// The sampling kernels (native/cuda/kernels/sampling/sample.cu) on the CPU, against native/sampling, on the same
// logits: random cases, their number and seed being the arguments. Ends with 1, and says why, at the first difference.
#include <cstdio>
#include <cstdlib>
#include <random>

#include "cuda/kernels/sampling/sample.cu"
#include "cuda/step/sample_list.h"

namespace {

using namespace as;
using namespace as::cuda;

constexpr int kVocabularies[] = {7, 100, 700, 1024, 1025, 5003, 16384, 16385, 40000, 151936};

struct Case {
  int vocab;
  std::vector<float> logits;
  std::vector<Slot> slots;
  Batch batch;
  std::vector<int> mask_of;
  std::vector<uint32_t> masks;

  int words() const { return (vocab + 31) / 32; }
  float* row(int r) { return logits.data() + (size_t)r * vocab; }
  const uint32_t* mask(int r) const { return mask_of[r] < 0 ? nullptr : masks.data() + (size_t)mask_of[r] * words(); }
};

class Cases {
 public:
  explicit Cases(int seed) : random_(seed) {}

  Case next() {
    Case c;
    c.vocab = kVocabularies[below(std::size(kVocabularies))];
    const int rows = 1 + below(3);
    c.logits.resize((size_t)rows * c.vocab), c.slots.resize(rows), c.mask_of.assign(rows, -1);
    for (int r = 0; r < rows; r++) {
      fill_logits(c.row(r), c.vocab);
      fill_slot(c.slots[r], c.vocab);
      const int length = (int)c.slots[r].history.size();
      Output out{r, r, length - (length > 1 && one_of(2))};
      if (out.history < length && one_of(9)) out.wanted = Wanted::score;
      else if (one_of(4)) add_mask(c, r);
      c.batch.outputs.push_back(out);
    }
    return c;
  }

 private:
  int below(int n) { return (int)(random_() % n); }
  bool one_of(int n) { return below(n) == 0; }
  double uniform() { return (double)(random_() >> 11) * 0x1p-53; }

  void fill_logits(float* x, int n) {
    const float spread = (float)(one_of(3) ? 0.3 * uniform() : 1 + 3 * uniform());
    for (int i = 0; i < n; i++) x[i] = normal_(random_) * spread;
    if (one_of(3)) std::transform(x, x + n, x, [](float v) { return std::round(v); });  // ties
    if (one_of(4)) std::transform(x, x + n, x, [&](float v) { return uniform() < 0.02 ? -INFINITY : v; });
    if (one_of(4))
      for (int k = 0; k < 5; k++) x[below(n)] += 12;
    if (one_of(3)) std::sort(x, x + n, std::greater<float>());  // as if ids were in the order of frequency
    if (one_of(40)) x[below(n)] = one_of(2) ? NAN : INFINITY;
    if (one_of(60)) std::fill_n(x, n, -INFINITY);
  }

  void fill_slot(Slot& slot, int vocab) {
    const int length = 1 + below(60), different = one_of(2) ? vocab : std::min(vocab, 10);
    for (int i = 0; i < length; i++) slot.history.push_back(below(different));
    SamplingParams& p = slot.sampling;
    p.prompt_len = below(length + 1), p.seed = random_(), p.sample_index = below(4), p.do_sample = !one_of(8);
    if (one_of(2)) p.temperature = (float)(0.3 + 2 * uniform());
    if (one_of(3)) p.top_k = 1 + below(one_of(2) ? 60 : 2000);
    if (one_of(2)) p.top_p = one_of(8) ? 0.0f : (float)(0.3 + 0.69 * uniform());
    if (one_of(4)) p.min_p = (float)(uniform() * uniform());
    p.want_logprobs = one_of(2), p.top_logprobs = one_of(2) ? below(21) : 0;
    if (one_of(2)) return;
    if (one_of(3)) p.repetition_penalty = one_of(20) ? 1e38f : (float)(0.5 + 2 * uniform());
    if (one_of(3)) p.presence_penalty = (float)(2 * uniform() - 1);
    if (one_of(3)) p.frequency_penalty = (float)(2 * uniform() - 1);
    if (one_of(4)) p.no_repeat_ngram_size = 1 + below(3);
    if (one_of(4)) p.bad_words = {{below(vocab)}, {slot.history.back(), below(vocab)}};
    if (one_of(30) && vocab < 2000)
      for (int i = 0; i < vocab; i++) p.bad_words.push_back({i});
    p.eos = {below(vocab), below(vocab)}, p.min_length = below(100);
    p.suppress_repetition_in_generation = one_of(2);
    if (one_of(3))
      for (int k = 0; k < 6; k++) p.logit_bias.emplace_back(below(one_of(2) ? vocab : 3), (float)(20 * uniform() - 10));
  }

  void add_mask(Case& c, int r) {
    const double kept = one_of(3) ? 0.001 : one_of(2) ? 0.05 : 0.7;
    c.mask_of[r] = (int)(c.masks.size() / c.words());
    const size_t first = c.masks.size();
    c.masks.resize(first + c.words());
    for (int i = 0; i < c.vocab; i++)
      if (uniform() < kept) c.masks[first + i / 32] |= 1u << (i % 32);
  }

  std::mt19937_64 random_;
  std::normal_distribution<float> normal_;
};

// argmax()
std::vector<Argmax> best_of(Case& c, int rows) {
  std::vector<Argmax> found;
  for (int r = 0; r < rows; r++)
    for (int part = 0; part < kArgmaxParts; part++) {
      Argmax best{-INFINITY, -1, 0};
      const int end = (int)((int64_t)c.vocab * (part + 1) / kArgmaxParts);
      for (int i = (int)((int64_t)c.vocab * part / kArgmaxParts); i < end; i++) {
        const float x = c.row(r)[i];
        if (!(x <= FLT_MAX)) best.not_finite++;
        else if (x > best.logit) best.logit = x, best.token = i;
      }
      found.push_back(best);
    }
  return found;
}

SampleOutput expected(Case& c, int r) {
  const Output& out = c.batch.outputs[r];
  const Slot& slot = c.slots[r];
  SampleInput input{&slot.sampling, slot.history.data(), out.history, c.row(r), c.mask(r)};
  if (out.wanted == Wanted::score)
    input.params = &scoring_params(), input.history_len = 0, input.target = slot.history[out.history];
  std::vector<uint8_t> blob;
  candidates(input, 0, c.vocab, c.vocab, blob);
  const auto blobs = [&] { return Blobs{{blob.data(), blob.size()}}; };
  SampleOutput found;
  Search search{};
  if (out.wanted == Wanted::score) {
    score(input.target, blobs(), found);
    return found;
  }
  for (bool done = merge(slot.sampling, out.history, blobs(), search, found); !done;) {
    blob.clear();
    narrow(input, 0, c.vocab, c.vocab, search, blob);
    done = merge_narrowed(slot.sampling, blobs(), search, found);
  }
  return found;
}

bool same(const SampleOutput& a, const SampleOutput& b) {
  return a.token == b.token && a.status == b.status && !std::memcmp(&a.logprob, &b.logprob, sizeof a.logprob) &&
         !std::memcmp(a.top_ids, b.top_ids, sizeof a.top_ids) &&
         !std::memcmp(a.top_logprobs, b.top_logprobs, sizeof a.top_logprobs);
}

// Draws all rows at once; false, having said so, if any is not as expected.
bool check(Case& c, int number) {
  const int rows = (int)c.slots.size();
  c.batch.slots = &c.slots;
  SampleList list(c.vocab, 1 << 20);
  for (int r = 0; r < rows; r++)
    if (!list.add(c.batch, r, c.mask_of[r])) return false;
  const std::vector<float> before = c.logits;
  std::vector<Argmax> best = best_of(c, rows);
  std::vector<Edit> edits = list.edits();
  std::vector<SampleOutput> outputs(rows);
  SampleTask task;
  task.logits = c.logits.data(), task.width = c.vocab, task.chunk = chunk_of(c.vocab);
  task.chunks = (c.vocab + task.chunk - 1) / task.chunk;
  task.argmax = best.data(), task.masks = c.masks.data(), task.mask_words = c.words();
  std::vector<float> wide(rows);
  task.samples = list.samples().data(), task.edits = edits.data(), task.outputs = outputs.data();
  task.wide = wide.data();
  const size_t chunks = (size_t)rows * task.chunks;
  std::vector<float> maxima[2], groups[2];
  std::vector<double> sums[2];
  for (int i = 0; i < 2; i++) {
    maxima[i].resize(chunks), sums[i].resize(chunks), groups[i].resize(chunks * groups_of(task.chunk));
    (i ? task.raw : task.processed) = {maxima[i].data(), sums[i].data(), groups[i].data()};
  }
  Queue queue{};
  queue.capability = number % 2 ? 90 : 80;  // with clusters, or without
  sample_rows(task, rows, list.parts(), queue);
  if (std::memcmp(before.data(), c.logits.data(), before.size() * sizeof(float))) {
    std::printf("case %d: logits were changed\n", number);
    return false;
  }
  for (int r = 0; r < rows; r++) {
    const SampleOutput wanted = expected(c, r);
    if (same(outputs[r], wanted)) continue;
    std::printf("case %d, row %d of %d ids: token %d, not %d; log probability %.9g, not %.9g\n", number, r, c.vocab,
                outputs[r].token, wanted.token, outputs[r].logprob, wanted.logprob);
    return false;
  }
  return true;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) return 2;
  Cases cases(std::atoi(arguments[2]));
  for (int i = 0; i < std::atoi(arguments[1]); i++) {
    Case c = cases.next();
    if (!check(c, i)) return 1;
  }
  return 0;
}
