// Sampling: logit processors, then sums of chunks on the whole GPU, then one CTA for each row.
//
// A CTA lists the greatest logits of its row: all above a threshold. It chooses the threshold by the maxima of groups,
// so that enough are listed. It sorts them and continues as native/sampling does with its candidates. It tries a short
// list first. If the list does not suffice, it searches for the last token of the set in the rounds of native/sampling.
#include "cuda/kernels/sampling/sample.h"

#include <cstring>

#include "cuda/kernels/sampling/sample_listed.cuh"
#include "sampling/processors.h"

namespace as::cuda {
namespace {

constexpr int kEditThreads = 256, kSumThreads = 256;
constexpr int kFew = 128;  // candidates of a nucleus in the first try

// ---- processors

__global__ void __launch_bounds__(kEditThreads) edit_kernel(SampleTask task) {
  after_previous();
  const RowSample& sample = task.samples[blockIdx.x];
  float* x = task.logits + (size_t)sample.row * task.width;
  Edit* edits = task.edits + sample.first_edit;
  for (int i = threadIdx.x; i < sample.edits(); i += kEditThreads) edits[i].before = x[edits[i].id];
  __syncthreads();
  for (int i = threadIdx.x; i < sample.repeats; i += kEditThreads)
    x[edits[i].id] = repeated(x[edits[i].id], edits[i].by);
  __syncthreads();
  edits += sample.repeats;
  for (int i = threadIdx.x; i < sample.lowers; i += kEditThreads) x[edits[i].id] = lowered(x[edits[i].id], edits[i].by);
  __syncthreads();
  edits += sample.lowers;
  for (int i = threadIdx.x; i < sample.bans; i += kEditThreads) x[edits[i].id] = -INFINITY;
  __syncthreads();
  edits += sample.bans;
  for (int i = threadIdx.x; i < sample.biases; i += kEditThreads) {
    const int id = edits[i].id;
    if (x[id] == -INFINITY || (i && edits[i - 1].id == id)) continue;
    for (int k = i; k < sample.biases && edits[k].id == id; k++) x[id] = biased(x[id], edits[k].by);
  }
}

// kRaw: sums the unprocessed logits, for samples that need both sums (needs_both_sums()).
template <bool kRaw>
__global__ void __launch_bounds__(kSumThreads) sum_kernel(SampleTask task) {
  after_previous();
  const RowSample& sample = task.samples[blockIdx.y];
  if (kRaw && !sample.needs_both_sums()) return;
  Logits x = processed_of(task, sample);
  if (kRaw) x.mask = nullptr;
  const float scale = kRaw ? 1.0f : sample.scale;
  const ChunkSums& to = kRaw ? task.raw : task.processed;
  const size_t first = (size_t)blockIdx.y * task.chunks;
  if (task.chunk == kChunk) {
    const int c = blockIdx.x * (kSumThreads / kLanes) + threadIdx.x / kLanes;
    float top, group;
    double sum;
    sum_chunk(x, task.width, scale, c, kRaw || sample.weighs(), top, sum, group);
    if (c >= task.chunks) return;
    if (threadIdx.x % kLanes < kGroups) to.groups[(first + c) * kGroups + threadIdx.x % kLanes] = group;
    if (threadIdx.x % kLanes == 0) to.maxima[first + c] = top, to.sums[first + c] = sum;
    return;
  }
  const int c = blockIdx.x * kSumThreads + threadIdx.x;
  if (c >= task.chunks) return;
  float top;
  double sum;
  sum_small_chunk(x, c * task.chunk, min((c + 1) * task.chunk, task.width), scale, top, sum);
  to.groups[first + c] = to.maxima[first + c] = top, to.sums[first + c] = sum;
}

// ---- samples: a token's id, or
constexpr int kWider = -2;    // the set is wider than the list
constexpr int kNothing = -3;  // everything is banned

// A thread adds weights in order, kAtOnce at a time: each sum waits for the previous one, but loads from shared memory
// and comparisons need not wait for sums.
constexpr int kAtOnce = 8;
template <typename Sum>
__device__ void next_sums(const float* weights, int from, int count, double& sum, const Sum& sum_of,
                          float (&w)[kAtOnce], double (&before)[kAtOnce]) {
#pragma unroll
  for (int j = 0; j < kAtOnce; j++) w[j] = from + j < count ? weights[from + j] : 0.0f;
#pragma unroll
  for (int j = 0; j < kAtOnce; j++) before[j] = sum, sum = sum_of(sum, w[j]);
}

// The sum of the first `count` weights.
__device__ __noinline__ double sum_in_order(const float* weights, int count) {
  double sum = 0.0, before[kAtOnce];
  float w[kAtOnce];
  for (int from = 0; from < count; from += kAtOnce)
    next_sums(weights, from, count, sum, [](double sum, float w) { return sum + w; }, w, before);
  return sum;
}

// The number of first weights whose sum reaches `need`: at least one, at most `count`.
__device__ int count_to(const float* weights, int count, double need, double& sum) {
  double before[kAtOnce];
  float w[kAtOnce];
  sum = 0.0;
  for (int from = 0; from < count; from += kAtOnce) {
    next_sums(weights, from, count, sum, [](double sum, float w) { return sum + w; }, w, before);
#pragma unroll
    for (int j = 0; j < kAtOnce; j++)
      if (from + j && from + j < count && !(before[j] < need)) return sum = before[j], from + j;
  }
  return count;
}

// The index in `weights` where the running sum exceeds uniform * sum. One thread calls it.
__device__ __noinline__ int inverse_cdf(const float* weights, int count, double sum, double uniform) {
  double left = uniform * sum, before[kAtOnce];
  float w[kAtOnce];
  int pick = 0;
  for (int from = 0; from < count; from += kAtOnce) {
    next_sums(weights, from, count, left, [](double left, float w) { return left - w; }, w, before);
#pragma unroll
    for (int j = 0; j < kAtOnce; j++) {
      if (!(w[j] > 0.0f)) continue;
      pick = from + j;
      if (before[j] < w[j]) return pick;
    }
  }
  return pick;
}

__device__ __noinline__ int first_greatest(Shared& s, const SampleTask& task, const Logits& x, const RowSums& row,
                                           float top) {
  int found = INT_MAX;
  for (int c = threadIdx.x; c < row.chunks; c += kThreads)
    if (row.maxima[c] >= top) found = min(found, c);
  const int begin = block_min(s.ids, found) * task.chunk, i = begin + (int)threadIdx.x;
  return block_min(s.ids, (int)threadIdx.x < task.chunk && i < task.width && x(i) >= top ? i : INT_MAX);
}

// Without filters: picks the chunk with the greatest log(weight) plus noise, then one of its tokens.
template <typename Values>
__device__ __noinline__ int sample_chunk(Shared& s, const SampleTask& task, const RowSample& sample, const Values& x,
                                         const RowSums& row, float top) {
  double best = 0.0;
  int winner = INT_MAX;
  const auto take = [&](double key, int chunk) {
    if (chunk != INT_MAX && (winner == INT_MAX || key > best || (key == best && chunk < winner)))
      best = key, winner = chunk;
  };
  for (int c = threadIdx.x; c < row.chunks; c += kThreads) {
    const double weight = row.sums[c] * exp_nonpositive((row.maxima[c] - top) * sample.scale);
    if (!(weight > 0.0)) continue;
    const Uniforms pair = chunk_uniforms_of(sample.random, c / 2);
    const double wait = -exact::log(c % 2 ? pair.second : pair.first);
    take(exact::log(row.sums[c] / wait) + (double)row.maxima[c] * sample.scale, c);
  }
  const auto take_of_lanes = [&] {
#pragma unroll 1
    for (int step = 16; step; step /= 2) {
      const double key = __shfl_xor_sync(kAll, best, step);
      take(key, __shfl_xor_sync(kAll, winner, step));
    }
  };
  take_of_lanes();
  if (threadIdx.x % 32 == 0) s.keys[threadIdx.x / 32] = best, s.ids[threadIdx.x / 32] = winner;
  __syncthreads();
  best = s.keys[threadIdx.x % 32], winner = s.ids[threadIdx.x % 32];
  take_of_lanes();
  const int begin = winner * task.chunk, count = min(task.chunk, task.width - begin);
  if ((int)threadIdx.x < count)
    s.weights[threadIdx.x] = exp_nonpositive((x(begin + threadIdx.x) - row.maxima[winner]) * sample.scale);
  __syncthreads();
  if (threadIdx.x == 0) {
    const double sum = sum_in_order(s.weights, count);
    s.token = begin + inverse_cdf(s.weights, count, sum, uniforms_of(sample.random).second);
  }
  __syncthreads();
  return s.token;
}

// Samples among the best `size` listed tokens; kWider if these are not enough. need: the weight to reach (top_k with
// top_p computes its own). whole: the set has no other tokens.
__device__ __noinline__ int sample_listed(Shared& s, const RowSample& sample, int size, float top, double need,
                                          bool whole) {
  const double steps = steps_of(sample.scale);
  int behind = size;  // the first token that min_p excludes
  for (int i = threadIdx.x; i < size; i += kThreads) {
    const float logit = logit_of(s.list[i]);
    s.weights[i] = exp_nonpositive((logit - top) * sample.scale);
    if (sample.deepest >= 0 && depth_of(logit, top, steps) > sample.deepest) behind = min(behind, i);
  }
  behind = block_min(s.ids, behind);
  if (threadIdx.x == 0) {
    if (sample.kind == SamplingKind::top_k && sample.top_p < 1.0f)
      need = sum_in_order(s.weights, size) * (double)sample.top_p;
    double sum;
    const int kept = count_to(s.weights, behind, need, sum);
    s.token = kWider;
    if (kept < size || sum >= need || whole)
      s.token = id_of(s.list[inverse_cdf(s.weights, kept, sum, uniforms_of(sample.random).first)]);
  }
  __syncthreads();
  const int token = s.token;
  __syncthreads();
  return token;
}

// Logits up to a place (sampling::Search); later ones are -infinity.
struct Kept {
  Logits all;
  double top, steps;
  uint64_t last;

  __device__ uint64_t place(float value, int id) const {
    return (uint64_t)depth_of(value, top, steps) << kIdBits | (uint32_t)id;
  }
  __device__ float operator()(int id) const {
    const float value = all(id);
    return value > -INFINITY && place(value, id) <= last ? value : -INFINITY;
  }
};

// A weight of at most about 1 in units of kMassUnit, truncated. Conversion through double is slower.
__device__ uint64_t mass_of(float weight) {
  const uint32_t bits = float_to_bits(weight), fraction = (bits & 0x7fffffu) | 0x800000u;
  const int shift = (int)(bits >> 23) - (127 + 23 - 44);
  static_assert(kMassUnit == 1.0 / (1ull << 44));
  return shift >= 0 ? (uint64_t)fraction << shift : shift > -24 ? fraction >> -shift : 0;
}

// Sums the bins of one level of a search.
__device__ void fill_bins(Shared& s, const SampleTask& task, const RowSample& sample, const Kept& x, int level) {
  for (int b = threadIdx.x; b < kBins; b += kThreads) s.bins.counts[b] = s.bins.low[b] = s.bins.high[b] = 0;
  __syncthreads();
  const int shift = shift_of(level);
  const uint64_t digits = level ? x.last >> shift >> kDigitBits : 0;
  constexpr int kTogether = 8;  // loads of a thread in flight
  for (int from = threadIdx.x; from < task.width; from += kTogether * kThreads) {
    float values[kTogether];
#pragma unroll
    for (int k = 0; k < kTogether; k++)
      values[k] = from + k * kThreads < task.width ? x.all(from + k * kThreads) : -INFINITY;
#pragma unroll
    for (int k = 0; k < kTogether; k++) {
      if (values[k] == -INFINITY) continue;
      const uint64_t place = x.place(values[k], from + k * kThreads) >> shift;
      if (level && place >> kDigitBits != digits) continue;
      const int bin = (int)(place % kBins);
      const uint64_t mass = mass_of(exp_nonpositive((values[k] - (float)x.top) * sample.scale));
      atomicAdd(&s.bins.counts[bin], 1u);
      const uint32_t low = (uint32_t)mass, before = atomicAdd(&s.bins.low[bin], low);
      const uint32_t high = (uint32_t)(mass >> 32) + (before + low < before);
      if (high) atomicAdd(&s.bins.high[bin], high);
    }
  }
  __syncthreads();
}

// Samples from a set that is wider than the list: the rounds of merge_narrowed(), then the sample.
__device__ __noinline__ int sample_wide(Shared& s, const SampleTask& task, const RowSample& sample,
                                        const Logits& logits, float top) {
  static_assert(kBins == kThreads, "each thread has a bin");
  Kept x{logits, top, steps_of(sample.scale), 0};
  bool by_count = sample.kind == SamplingKind::top_k;
  double target = by_count ? sample.top_k : -1.0;
  uint64_t count = 0, mass = 0;  // of tokens in bins before x.last
  int level = 0;
  const auto end_search = [&](bool all, uint64_t up_to) {
    if (by_count && sample.top_p < 1.0f) {
      by_count = false, target = (double)up_to * (double)sample.top_p;
      x.last = count = mass = 0, level = 0;
      return;
    }
    if (all) x.last = ~0ull;
    if (sample.deepest >= 0) x.last = min((Key)x.last, (Key)sample.deepest << kIdBits | (((Key)1 << kIdBits) - 1));
    level = kLevels;
  };
  if (!by_count && sample.top_p == 1.0f) end_search(true, 0);
  while (level < kLevels) {
    fill_bins(s, task, sample, x, level);
    const int bin = threadIdx.x, own = (int)s.bins.counts[bin];
    const Key own_mass = (Key)s.bins.high[bin] << 32 | s.bins.low[bin];
    const Key up_to = block_scan(s.masses, own_mass);
    const int counted = block_scan(s.ids, own);
    if (target < 0.0) {
      if (bin == kBins - 1) s.mass = up_to;
      __syncthreads();
      target = (double)s.mass * (double)sample.top_p;
      __syncthreads();
    }
    const uint64_t reached = by_count ? count + counted : mass + up_to;
    const int found = block_min(s.ids, own && !((double)reached < target) ? bin : INT_MAX);
    if (bin == min(found, kBins - 1)) s.found = {up_to, own_mass, counted, own};
    __syncthreads();
    const FoundBin in = s.found;
    __syncthreads();
    const uint64_t end = mass + in.mass_up_to;  // the weight of tokens up to the found bin
    if (found == INT_MAX) {
      end_search(true, end);
      continue;
    }
    const int shift = shift_of(level);
    x.last |= (uint64_t)found << shift;
    count += in.count_up_to - in.count, mass = end - in.mass;
    if (in.count > 1 && level + 1 < kLevels) {
      level++;
    } else {
      x.last |= ((uint64_t)1 << shift) - 1;
      end_search(false, end);
    }
  }
  // Overwrites the sums that log probabilities do not need.
  const ChunkSums& to = sample.needs_both_sums() ? task.processed : task.raw;
  float* maxima = to.maxima + (size_t)blockIdx.x * task.chunks;
  double* sums = to.sums + (size_t)blockIdx.x * task.chunks;
  if (task.chunk == kChunk) {
    for (int from = 0; from < task.chunks; from += kThreads / kLanes) {
      const int c = from + threadIdx.x / kLanes;
      float most, group;
      double sum;
      sum_chunk(x, task.width, sample.scale, c, true, most, sum, group);
      if (c < task.chunks && threadIdx.x % kLanes == 0) maxima[c] = most, sums[c] = sum;
    }
  } else {
    for (int c = threadIdx.x; c < task.chunks; c += kThreads)
      sum_small_chunk(x, c * task.chunk, min((c + 1) * task.chunk, task.width), sample.scale, maxima[c], sums[c]);
  }
  __syncthreads();
  return sample_chunk(s, task, sample, x, row_sums(task, to, blockIdx.x), top);
}

__device__ int sample_token(Shared& s, const SampleTask& task, const RowSample& sample, const Logits& x,
                            const RowSums& row) {
  const float top = block_max(s, row.maxima, row.chunks);
  if (top == -INFINITY) return kNothing;
  if (sample.kind == SamplingKind::greedy) return first_greatest(s, task, x, row, top);
  if (sample.kind == SamplingKind::all) return sample_chunk(s, task, sample, x, row, top);
  const bool by_count = sample.kind == SamplingKind::top_k;
  const int most = by_count ? min(sample.top_k, kCandidates) : kCandidates;
  double need = INFINITY;
  if (!by_count && sample.top_p < 1.0f) need = total_weight(s, row, top, sample.scale) * (double)sample.top_p;
  // Weights are at most 1, up to rounding: kCandidates of them cannot reach `need`.
  if (need > kCandidates + 1 && need < INFINITY && sample.deepest < 0) return sample_wide(s, task, sample, x, top);
  for (int want = by_count ? most : kFew;; want = kCandidates) {
    Key limit = limit_of_groups(s, row, want);
    int count = list_greatest(s, task, x, row, limit, want + 1);
    if (want == kCandidates && count == most && limit != ~0ull)  // check for more
      limit = ~0ull, count = list_greatest(s, task, x, row, limit, want + 1);
    const bool whole = (by_count && sample.top_k <= kCandidates) || (limit == ~0ull && count <= most);
    int token = kWider;
    if (whole || !by_count) token = sample_listed(s, sample, min(count, most), top, need, whole);
    if (token == kWider && want == kCandidates) token = sample_wide(s, task, sample, x, top);
    if (token != kWider) return token;
  }
}

__device__ Key best_key(Shared& s, const SampleTask& task, const Logits& x) {
  Key best = ~0ull;
  for (int id = threadIdx.x; id < task.width; id += kThreads)
    if (const float value = x(id); value > -INFINITY) best = min(best, key_of(value, id));
  return block_min(s.masses, best);
}

// The best token that the mask allows. If there is none: the first end-of-sequence id, or else the best of all.
__device__ __noinline__ int fallback(Shared& s, const SampleTask& task, const RowSample& sample, const Logits& x) {
  const Key allowed = best_key(s, task, x);
  if (allowed != ~0ull) return id_of(allowed);
  return sample.end >= 0 ? sample.end : id_of(best_key(s, task, {x.values, nullptr}));
}

__global__ void __launch_bounds__(kThreads) sample_kernel(SampleTask task) {
  after_previous();
  __shared__ Shared s;
  if (threadIdx.x < 256) s.histogram[threadIdx.x] = 0;
  __syncthreads();
  const RowSample& sample = task.samples[blockIdx.x];
  float* logits = task.logits + (size_t)sample.row * task.width;
  static_assert(kArgmaxParts == 32, "a lane has a part");
  const Argmax& part = task.argmax[sample.output * kArgmaxParts + threadIdx.x % 32];
  const int bad = of_lanes(part.not_finite, [](int a, int b) { return a + b; });
  const float most = of_lanes(part.token >= 0 ? part.logit : -INFINITY, [](float a, float b) { return greater(a, b); });
  const bool numbers = !bad && most > -INFINITY;
  int token = sample.target;
  if (token < 0 && numbers)
    token = sample_token(s, task, sample, processed_of(task, sample), row_sums(task, task.processed, blockIdx.x));
  __syncthreads();
  const Edit* edits = task.edits + sample.first_edit;
  for (int i = threadIdx.x; i < sample.edits(); i += kThreads) logits[edits[i].id] = edits[i].before;
  __syncthreads();

  if (token == kNothing) token = fallback(s, task, sample, processed_of(task, sample));
  double log_norm = 0.0;
  int tops = 0;
  if (numbers && sample.top_logprobs >= 0) {
    const RowSums row = row_sums(task, sample.needs_both_sums() ? task.raw : task.processed, blockIdx.x);
    log_norm = most + exact::log(total_weight(s, row, most, 1.0f));
    if (sample.top_logprobs > 0) {
      Key limit = limit_of_groups(s, row, sample.top_logprobs);
      tops = min(list_greatest(s, task, {logits, nullptr}, row, limit, sample.top_logprobs), sample.top_logprobs);
    }
  }
  SampleOutput& to = task.outputs[blockIdx.x];
  if (threadIdx.x < kMaxTopLogprobs) {
    const bool there = (int)threadIdx.x < tops;
    const int id = there ? id_of(s.list[threadIdx.x]) : -1;
    to.top_ids[threadIdx.x] = id, to.top_logprobs[threadIdx.x] = there ? (float)(logits[id] - log_norm) : 0.0f;
  }
  if (threadIdx.x) return;
  // The next step reads sampled tokens where it reads argmax tokens.
  if (numbers && sample.target < 0) task.argmax[sample.output * kArgmaxParts] = {INFINITY, token, 0};
  to.token = numbers ? token : -1;
  to.logprob = numbers && sample.top_logprobs >= 0 ? (float)(logits[token] - log_norm) : 0.0f;
  to.status = numbers ? SampleStatus::kOk : SampleStatus::kNotFinite;
}

}  // namespace

void sample_rows(const SampleTask& task, int samples, bool edited, bool both_sums, const Queue& queue) {
  const int each = task.chunk == kChunk ? kSumThreads / kLanes : kSumThreads;
  const dim3 blocks(ceil_div(task.chunks, each), samples);
  if (both_sums) start(queue, sum_kernel<true>, blocks, kSumThreads, 0, task);
  if (edited) start(queue, edit_kernel, dim3(samples), kEditThreads, 0, task);
  start(queue, sum_kernel<false>, blocks, kSumThreads, 0, task);
  start(queue, sample_kernel, dim3(samples), kThreads, 0, task);
  launched("sample_rows");
}

}  // namespace as::cuda
