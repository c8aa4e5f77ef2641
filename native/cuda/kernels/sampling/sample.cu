// Sampling: logit processors, then sums of chunks on the whole GPU, then one CTA for each row, then a cluster of CTAs
// for each row whose set is wide.
//
// A CTA lists the greatest logits of its row: all above a threshold. It chooses the threshold by the maxima of groups,
// so that enough are listed. It sorts them and continues as native/sampling does with its candidates. It tries a short
// list first. If the list does not suffice, it leaves the row to the cluster (sample_wide.cuh).
#include "cuda/kernels/sampling/sample.h"

#include <cstring>

#include "cuda/kernels/sampling/sample_wide.cuh"
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
__device__ int sample_chunk(Shared& s, const SampleTask& task, const RowSample& sample, const Values& x,
                            const RowSums& row, float top) {
  const int winner = best_chunk(s, sample, row, top, 0, row.chunks).chunk;
  return token_of_chunk(s, task, sample, x, winner, row.maxima[winner]);
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

// Whether the best kCandidates tokens are certainly not the whole set, found without listing them: kCandidates weights,
// of which those from chunk i are at most maximum[i] each and sum[i] in all, add up to at most, for any `price`,
//   kCandidates * price + the sum over i of sum[i] * max(0, 1 - price / maximum[i]).
__device__ __noinline__ bool is_surely_wide(Shared& s, const RowSample& sample, const RowSums& row, float top) {
  const bool by_count = sample.kind == SamplingKind::top_k;
  if (by_count && sample.top_k <= kCandidates) return false;
  if (by_count || sample.deepest >= 0) {  // a group has at least one token
    const double steps = steps_of(sample.scale);
    int there = 0;
#pragma unroll 1
    for (int g = threadIdx.x; g < row.group_count; g += kThreads) {
      const float x = row.groups[g];
      there += x > -INFINITY && (by_count || depth_of(x, top, steps) <= sample.deepest);
    }
    if (block_sum(s.ids, there) <= kCandidates) return false;
    if (by_count) return true;
  }
  if (sample.top_p == 1.0f) return sample.deepest >= 0;
  constexpr double kSlack = 0.01;  // far more than sums and weights round
  double need = 0.0, price = 0.0;
#pragma unroll 1
  for (int pass = 0;; pass++) {
    double sum = 0.0;
#pragma unroll 1
    for (int c = threadIdx.x; c < row.chunks; c += kThreads) {
      const double maximum = exp_nonpositive((row.maxima[c] - top) * sample.scale);
      if (maximum > price) sum += row.sums[c] * (maximum - price);  // sums of chunks are relative to their maxima
    }
    sum = block_sum(s.keys, sum);
    if (pass == 1) return kCandidates * price + sum < (1.0 - kSlack) * need;
    need = sum * (double)sample.top_p, price = need / (2 * kCandidates);
  }
}

// top: becomes the greatest logit.
__device__ int sample_token(Shared& s, const SampleTask& task, const RowSample& sample, const Logits& x,
                            const RowSums& row, float& top) {
  top = block_max(s, row.maxima, row.chunks);
  if (top == -INFINITY) return kNothing;
  if (sample.kind == SamplingKind::greedy) return first_greatest(s, task, x, row, top);
  if (sample.kind == SamplingKind::all) return sample_chunk(s, task, sample, x, row, top);
  if (is_surely_wide(s, sample, row, top)) return kWider;
  const bool by_count = sample.kind == SamplingKind::top_k;
  const int most = by_count ? min(sample.top_k, kCandidates) : kCandidates;
  double need = INFINITY;
  if (!by_count && sample.top_p < 1.0f) need = total_weight(s, row, top, sample.scale) * (double)sample.top_p;
  for (int want = by_count ? most : kFew;; want = kCandidates) {
    Key limit = limit_of_groups(s, row, want);
    int count = list_greatest(s, task, x, row, limit, want + 1);
    if (want == kCandidates && count == most && limit != ~0ull)  // check for more
      limit = ~0ull, count = list_greatest(s, task, x, row, limit, want + 1);
    const bool whole = (by_count && sample.top_k <= kCandidates) || (limit == ~0ull && count <= most);
    int token = kWider;
    if (whole || !by_count) token = sample_listed(s, sample, min(count, most), top, need, whole);
    if (token != kWider || want == kCandidates) return token;
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

struct RowArgmax {
  int not_finite;
  float logit;

  __device__ bool numbers() const { return !not_finite && logit > -INFINITY; }
};

__device__ RowArgmax argmax_of(const SampleTask& task, const RowSample& sample) {
  static_assert(kArgmaxParts == 32, "a lane has a part");
  const Argmax& part = task.argmax[sample.output * kArgmaxParts + threadIdx.x % 32];
  const int bad = of_lanes(part.not_finite, [](int a, int b) { return a + b; });
  return {bad, of_lanes(part.token >= 0 ? part.logit : -INFINITY, [](float a, float b) { return greater(a, b); })};
}

// Puts the processors' changes back, and writes what was sampled.
__device__ void finish_row(Shared& s, const SampleTask& task, int j, const RowArgmax& best, int token) {
  const RowSample& sample = task.samples[j];
  float* logits = task.logits + (size_t)sample.row * task.width;
  const bool numbers = best.numbers();
  __syncthreads();
  const Edit* edits = task.edits + sample.first_edit;
  for (int i = threadIdx.x; i < sample.edits(); i += kThreads) logits[edits[i].id] = edits[i].before;
  __syncthreads();

  if (token == kNothing) token = fallback(s, task, sample, processed_of(task, sample));
  double log_norm = 0.0;
  int tops = 0;
  if (numbers && sample.top_logprobs >= 0) {
    const RowSums row = row_sums(task, sample.needs_both_sums() ? task.raw : task.processed, j);
    log_norm = best.logit + exact::log(total_weight(s, row, best.logit, 1.0f));
    if (sample.top_logprobs > 0) {
      Key limit = limit_of_groups(s, row, sample.top_logprobs);
      tops = min(list_greatest(s, task, {logits, nullptr}, row, limit, sample.top_logprobs), sample.top_logprobs);
    }
  }
  SampleOutput& to = task.outputs[j];
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

__global__ void __launch_bounds__(kThreads) sample_kernel(SampleTask task) {
  after_previous();
  __shared__ Shared s;
  if (threadIdx.x < 256) s.histogram[threadIdx.x] = 0;
  __syncthreads();
  const int j = blockIdx.x;
  const RowSample& sample = task.samples[j];
  const RowArgmax best = argmax_of(task, sample);
  int token = sample.target;
  float top = -INFINITY;
  if (token < 0 && best.numbers())
    token = sample_token(s, task, sample, processed_of(task, sample), row_sums(task, task.processed, j), top);
  if (threadIdx.x == 0) task.wide[j] = token == kWider ? top : -INFINITY;
  if (token != kWider) finish_row(s, task, j, best, token);
}

// blockIdx.y: the row; blockIdx.x: the CTA of its cluster.
__global__ void __launch_bounds__(kThreads) wide_kernel(SampleTask task) {
  after_previous();
  __shared__ Shared s;
  const int j = blockIdx.y;
  const float top = task.wide[j];
  if (top == -INFINITY) return;
  if (threadIdx.x < 256) s.histogram[threadIdx.x] = 0;
  const int token = WideSet(s, task, task.samples[j], top).sample();
  if (blockIdx.x == 0) finish_row(s, task, j, argmax_of(task, task.samples[j]), token);
}

// Several CTAs share a row where rows are too few for all SMs: as many as let all clusters run at once.
int ctas_of_wide(int samples, const Queue& queue) {
  static int at_once[kMostCtas + 1];
  if (queue.capability != 90) return 1;
  for (int ctas = kMostCtas; ctas > 1; ctas--) {
    if (!at_once[ctas]) at_once[ctas] = clusters_at_once(wide_kernel, ctas, kThreads, 0);
    if (samples <= at_once[ctas]) return ctas;
  }
  return 1;
}

}  // namespace

void sample_rows(const SampleTask& task, int samples, const SampleParts& parts, const Queue& queue) {
  const int each = task.chunk == kChunk ? kSumThreads / kLanes : kSumThreads;
  const dim3 blocks(ceil_div(task.chunks, each), samples);
  if (parts.both_sums) start(queue, sum_kernel<true>, blocks, kSumThreads, 0, task);
  if (parts.edits) start(queue, edit_kernel, dim3(samples), kEditThreads, 0, task);
  start(queue, sum_kernel<false>, blocks, kSumThreads, 0, task);
  start(queue, sample_kernel, dim3(samples), kThreads, 0, task);
  if (parts.wide) {
    const int ctas = ctas_of_wide(samples, queue);
    start_clusters(queue, wide_kernel, dim3(ctas, samples), dim3(ctas), kThreads, 0, task);
  }
}

}  // namespace as::cuda
