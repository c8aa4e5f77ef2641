// Samples from a set that is wider than the list: a radix search over places (sampling/sampler_blob.h) finds the set's
// last token, as the rounds of merge_narrowed() do. Then a chunk and one of its tokens are chosen.
//
// A cluster has a row, and each of its CTAs a part of the row's chunks. Masses are integers, so the sums of bins do not
// depend on the number of CTAs. Every CTA adds the bins of all and finds the same place. The first pass weighs all
// logits; the second one also lists those in the bin in which the set ends. Later passes read only these.
#pragma once
#include "cuda/kernels/common/cluster.cuh"
#include "cuda/kernels/sampling/sample_chunks.cuh"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace {

// Logits from `least` to `most` may have a depth in [from, to] steps below `top`; all others certainly have not.
struct DepthRange {
  float least, most;

  __device__ DepthRange(double top, double steps, double from, double to) {
    constexpr double kSlack = 1.0 / 1024;  // of a step, far more than depth_of() rounds
    most = nextafterf((float)(top - (from - kSlack) / steps), INFINITY);
    least = to < kDeepest ? nextafterf((float)(top - (to + 1 + kSlack) / steps), -INFINITY) : -INFINITY;
  }
};

// Logits up to a place; later ones are -infinity.
struct Kept {
  Logits all;
  double top, steps;
  uint64_t last;
  DepthRange end;  // of the last depth

  __device__ Kept(const Logits& all, double top, double steps, uint64_t last)
      : all(all), top(top), steps(steps), last(last), end(top, steps, last >> kIdBits, last >> kIdBits) {}
  __device__ float operator()(int id) const {
    const float value = all(id);
    if (value > end.most || value < end.least) return value > end.most ? value : -INFINITY;
    return value > -INFINITY && place_of(value, id, top, steps) <= last ? value : -INFINITY;
  }
  __device__ static uint64_t place_of(float value, int id, double top, double steps) {
    return (uint64_t)depth_of(value, top, steps) << kIdBits | (uint32_t)id;
  }
};

// A weight of at most about 1 in units of kMassUnit, truncated. Conversion through double is slower.
__device__ inline uint64_t mass_of(float weight) {
  const uint32_t bits = float_to_bits(weight), fraction = (bits & 0x7fffffu) | 0x800000u;
  const int shift = (int)(bits >> 23) - (127 + 23 - 44);
  static_assert(kMassUnit == 1.0 / (1ull << 44));
  return shift >= 0 ? (uint64_t)fraction << shift : shift > -24 ? fraction >> -shift : 0;
}

constexpr int kMostCtas = 8;  // of a row

class WideSet {
 public:
  __device__ WideSet(Shared& s, const SampleTask& task, const RowSample& sample, float top)
      : s_(s),
        task_(task),
        sample_(sample),
        logits_(processed_of(task, sample)),
        top_(top),
        steps_(steps_of(sample.scale)),
        first_((int)((int64_t)task.chunks * blockIdx.x / gridDim.x)),
        end_((int)((int64_t)task.chunks * (blockIdx.x + 1) / gridDim.x)) {}

  // The cluster's first CTA gets the token; others have then read all that they need.
  __device__ int sample() {
    find_last();
    const Kept kept(logits_, top_, steps_, last_);
    // Overwrites the sums that log probabilities do not need.
    const ChunkSums& to = sample_.needs_both_sums() ? task_.processed : task_.raw;
    sum_chunks(kept, to);
    const BestChunk own = best_chunk(s_, sample_, row_sums(task_, to, blockIdx.y), top_, first_, end_);
    if (threadIdx.x == 0) s_.best_key = own.key, s_.best_chunk = own.chunk, s_.best_top = own.top;
    meet_cluster();
    BestChunk best{0.0, INT_MAX, -INFINITY};
    for (unsigned cta = 0; cta < gridDim.x; cta++)
      best.take({in_cta(s_.best_key, cta), in_cta(s_.best_chunk, cta), in_cta(s_.best_top, cta)});
    meet_cluster();  // a CTA may end now
    if (blockIdx.x > 0) return -1;
    return token_of_chunk(s_, task_, sample_, kept, best.chunk, best.top);
  }

 private:
  // Finds the place of the set's last token.
  __device__ void find_last() {
    static_assert(kBins == kThreads, "each thread has a bin");
    by_count_ = sample_.kind == SamplingKind::top_k;
    double target = by_count_ ? sample_.top_k : -1.0;
    uint64_t count = 0, mass = 0;  // of tokens in bins before last_
    const auto end_search = [&](bool all, uint64_t up_to) {
      if (by_count_ && sample_.top_p < 1.0f) {
        by_count_ = false, target = (double)up_to * (double)sample_.top_p;
        last_ = count = mass = 0, level_ = 0;
        return;
      }
      if (all) last_ = ~0ull;
      if (sample_.deepest >= 0) last_ = min((Key)last_, (Key)sample_.deepest << kIdBits | (((Key)1 << kIdBits) - 1));
      level_ = kLevels;
    };
    if (!by_count_ && sample_.top_p == 1.0f) end_search(true, 0);
    while (level_ < kLevels) {
      const FoundBin own = bin_of_all();
      const Key up_to = block_scan(s_.masses, own.mass);
      const int counted = block_scan(s_.ids, own.count);
      if (target < 0.0) {
        if (threadIdx.x == kBins - 1) s_.mass = up_to;
        __syncthreads();
        target = (double)s_.mass * (double)sample_.top_p;
        __syncthreads();
      }
      const uint64_t reached = by_count_ ? count + counted : mass + up_to;
      const int bin = threadIdx.x;
      const int found = block_min(s_.ids, own.count && !((double)reached < target) ? bin : INT_MAX);
      if (bin == min(found, kBins - 1)) s_.found = {up_to, own.mass, counted, own.count};
      __syncthreads();
      const FoundBin in = s_.found;
      __syncthreads();
      const uint64_t end = mass + in.mass_up_to;  // the weight of tokens up to the found bin
      if (found == INT_MAX) {
        end_search(true, end);
        continue;
      }
      const int shift = shift_of(level_);
      last_ |= (uint64_t)found << shift;
      count += in.count_up_to - in.count, mass = end - in.mass;
      if (in.count > 1 && level_ + 1 < kLevels) {
        level_++;
      } else {
        last_ |= ((uint64_t)1 << shift) - 1;
        end_search(false, end);
      }
    }
  }

  // The first level of a search by mass does without counts: an occupied bin counts as several tokens. There the bin
  // that is found has a mass, because the greatest logit has one.
  __device__ bool counts() const { return by_count_ || level_ > 0; }

  // Fills this CTA's bins of the level, and returns this thread's bin of all CTAs.
  __device__ FoundBin bin_of_all() {
    // The CTAs meet once a level: two sets of bins, so that one is filled while others still read the other one.
    BinSums& bins = s_.search.bins[turn_];
    turn_ = 1 - turn_;
    bins.counts[threadIdx.x] = bins.low[threadIdx.x] = bins.high[threadIdx.x] = 0;
    if (threadIdx.x == 0 && level_ < 2) s_.search.listed = 0;
    __syncthreads();
    if (level_ == 0) fill_bins(bins);
    else if (level_ > 1 && s_.search.listed <= kSearched) fill_bins_from_list(bins);
    else fill_bins_at_end(bins);
    meet_cluster();
    FoundBin all{0, 0, 0, 0};
    for (unsigned cta = 0; cta < gridDim.x; cta++) {
      all.mass += ((Key)in_cta(bins.high[threadIdx.x], cta) << 32) + in_cta(bins.low[threadIdx.x], cta);
      all.count += (int)in_cta(bins.counts[threadIdx.x], cta);
    }
    if (!counts()) all.count = all.mass ? 2 : 0;
    return all;
  }

  // Calls visit(id, logit) for this CTA's logits, each in any one of the threads.
  template <typename Visit>
  __device__ void visit(const Visit& visit) const {
    constexpr int kTogether = 8;  // loads of a thread in flight
    const int begin = first_ * task_.chunk, end = min(end_ * task_.chunk, task_.width);
    for (int from = begin + threadIdx.x; from < end; from += kTogether * kThreads) {
      float values[kTogether];
#pragma unroll
      for (int k = 0; k < kTogether; k++)
        values[k] = from + k * kThreads < end ? logits_(from + k * kThreads) : -INFINITY;
#pragma unroll
      for (int k = 0; k < kTogether; k++) visit(from + k * kThreads, values[k]);
    }
  }

  __device__ void add_to(BinSums& bins, int bin, float value) const {
    if (counts()) atomicAdd(&bins.counts[bin], 1u);
    const uint64_t mass = mass_of(exp_nonpositive((value - top_) * sample_.scale));
    const uint32_t low = (uint32_t)mass, before = atomicAdd(&bins.low[bin], low);
    const uint32_t high = (uint32_t)(mass >> 32) + (before + low < before);
    if (high) atomicAdd(&bins.high[bin], high);
  }

  __device__ void fill_bins(BinSums& bins) const {
    visit([&](int, float value) {
      if (value > -INFINITY) add_to(bins, depth_of(value, top_, steps_) >> (kDepthBits - kDigitBits), value);
    });
    __syncthreads();
  }

  // Adds a token if its digits before the level are those of last_. Returns whether they are.
  __device__ bool add_at_end(BinSums& bins, int id, float value) const {
    const int shift = shift_of(level_);
    const uint64_t place = Kept::place_of(value, id, top_, steps_) >> shift;
    if (place >> kDigitBits != last_ >> shift >> kDigitBits) return false;
    add_to(bins, (int)(place % kBins), value);
    return true;
  }

  // Lists the tokens, too, if there is room for all.
  __device__ void fill_bins_at_end(BinSums& bins) const {
    constexpr int kRest = kDepthBits - kDigitBits;  // bits of the depth behind the first digit
    const uint64_t digit = last_ >> shift_of(0);
    const DepthRange range(top_, steps_, (double)(digit << kRest), (double)(((digit + 1) << kRest) - 1));
    visit([&](int id, float value) {
      if (value > range.most || value < range.least || value == -INFINITY) return;
      if (!add_at_end(bins, id, value) || level_ > 1) return;
      const int at = atomicAdd(&s_.search.listed, 1);
      if (at < kSearched) s_.search.ids[at] = id;
    });
    __syncthreads();
  }
  __device__ void fill_bins_from_list(BinSums& bins) const {
    for (int i = threadIdx.x; i < s_.search.listed; i += kThreads)
      add_at_end(bins, s_.search.ids[i], logits_(s_.search.ids[i]));
    __syncthreads();
  }

  __device__ void sum_chunks(const Kept& x, const ChunkSums& to) const {
    float* maxima = to.maxima + (size_t)blockIdx.y * task_.chunks;
    double* sums = to.sums + (size_t)blockIdx.y * task_.chunks;
    if (task_.chunk == kChunk) {
      for (int from = first_; from < end_; from += kThreads / kLanes) {
        const int c = from + threadIdx.x / kLanes;
        float most, group;
        double sum;
        sum_chunk(x, c < end_ ? task_.width : 0, sample_.scale, c, true, most, sum, group);
        if (c < end_ && threadIdx.x % kLanes == 0) maxima[c] = most, sums[c] = sum;
      }
    } else {
      for (int c = first_ + threadIdx.x; c < end_; c += kThreads)
        sum_small_chunk(x, c * task_.chunk, min((c + 1) * task_.chunk, task_.width), sample_.scale, maxima[c], sums[c]);
    }
    __syncthreads();
  }

  Shared& s_;
  const SampleTask& task_;
  const RowSample& sample_;
  const Logits logits_;
  const float top_;
  const double steps_;
  const int first_, end_;  // chunks of this CTA
  bool by_count_ = false;
  int level_ = 0, turn_ = 0;
  uint64_t last_ = 0;
};

}  // namespace
}  // namespace AS_DTYPE16
}  // namespace as::cuda
