// Exchange of argmaxes, logits and samples between the ranks' GPUs.
//
// Argmaxes: each 64-bit word has a value and the number of its step, so the reader sees by itself that it has come:
// one transfer over the link. Two sets of places are used in turn. A rank that writes the set of step s again, in step
// s + 2, has passed the sums of step s + 1; so all ranks have begun that one, and have read the set of step s.
//
// Logits and samples: flags. One set of places is enough. A rank pushes logits of the next round after it has received
// all samples of this one, which their owners pushed after they had read the logits. It pushes samples of the next
// round after it has received all logits of that round, which a rank pushes after it has read the samples of this one.
#include <algorithm>

#include "cuda/kernels/comm/peer_waits.cuh"
#include "cuda/kernels/comm/sample_ranks.h"
#include "cuda/kernels/sampling/argmax.cuh"

namespace as::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kExchangeThreads = 1024;
constexpr int kEach = 16 * kThreads;  // logits of a row that a CTA pushes
constexpr int kSampleWords = sizeof(SampleOutput) / sizeof(uint32_t);
static_assert(kMaxRanks <= kArgmaxParts && kArgmaxParts == 32, "a lane has a rank's argmax");

// ---- argmaxes

__device__ void put_word(uint2* to, uint32_t value, uint32_t tag) {
  asm volatile("st.relaxed.sys.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(value), "r"(tag) : "memory");
}
__device__ uint2 look_at(const uint2* from) {
  uint2 word;
  asm volatile("ld.relaxed.sys.global.v2.u32 {%0, %1}, [%2];" : "=r"(word.x), "=r"(word.y) : "l"(from) : "memory");
  return word;
}

// A warp's argmax of this rank's part of a row.
__device__ Argmax own_argmax(const RankSamples& ranks, const Argmax* parts) {
  Argmax best = merged_by_warp(parts);
  if (best.token >= 0) best.token += ranks.begin;
  return best;
}

// A warp has a row. A CTA pushes all its rows before it waits for any.
__global__ void __launch_bounds__(kThreads)
    agree_kernel(const __grid_constant__ RankSamples ranks, Argmax* best, int rows) {
  after_previous();
  const Peers& peers = ranks.peers;
  const uint32_t step = *peers.step, tag = step + 1;
  const int lane = threadIdx.x % 32, first = blockIdx.x * kWarps + threadIdx.x / 32, stride = gridDim.x * kWarps;
  const bool other = lane < peers.world && lane != peers.rank;
  for (int row = first; row < rows; row += stride) {
    const Argmax own = own_argmax(ranks, best + (size_t)row * kArgmaxParts);
    if (!other) continue;
    uint2* to = ranks.argmaxes(lane, peers.rank, step) + (size_t)row * RankSamples::kArgmaxWords;
    put_word(to, __float_as_uint(own.logit), tag), put_word(to + 1, own.token, tag),
        put_word(to + 2, own.not_finite, tag);
  }
  Wait wait(peers, PeerWait::argmax);
  for (int row = first; row < rows; row += stride) {
    Argmax* parts = best + (size_t)row * kArgmaxParts;
    Argmax found = own_argmax(ranks, parts);
    if (other) {
      const uint2* from = ranks.argmaxes(peers.rank, lane, step) + (size_t)row * RankSamples::kArgmaxWords;
      uint2 words[RankSamples::kArgmaxWords];
      bool come;
      do {
        come = true;
        for (int i = 0; i < RankSamples::kArgmaxWords; i++) words[i] = look_at(from + i), come &= words[i].y == tag;
      } while (!come && wait.goes_on(lane));
      found = {__uint_as_float(words[0].x), (int)words[1].x, come ? (int)words[2].x : 1};
    }
    if (lane >= peers.world) found = {-INFINITY, -1, 0};
    __syncwarp();
    parts[lane] = found;
  }
}

// ---- logits

// Copies `count` values; all threads of the CTA. kFour: both addresses and the count are multiples of four values.
template <bool kFour>
__device__ void copy_values(float* to, const float* from, int count) {
  if constexpr (kFour) {
    for (int i = threadIdx.x; i < count / 4; i += kThreads)
      reinterpret_cast<float4*>(to)[i] = reinterpret_cast<const float4*>(from)[i];
  } else {
    for (int i = threadIdx.x; i < count; i += kThreads) to[i] = from[i];
  }
}

// blockIdx.y: the sample; blockIdx.x: a part of its logits.
template <bool kFour>
__global__ void __launch_bounds__(kThreads)
    push_kernel(const __grid_constant__ RankSamples ranks, const float* logits, const uint32_t* masks,
                const DealtSample* samples, uint32_t round) {
  after_previous();
  const Peers& peers = ranks.peers;
  const int j = blockIdx.y, owner = ranks.owner(j), number = j / peers.world;
  const DealtSample sample = samples[j];
  const int first = blockIdx.x * kEach, count = min(kEach, ranks.width - first);
  if (count > 0)
    copy_values<kFour>(ranks.logits(owner) + (size_t)number * ranks.vocab + ranks.begin + first,
                       logits + (size_t)sample.row * ranks.width + first, count);
  if (peers.rank == 0 && sample.mask >= 0) {
    const int words = ranks.mask_words();
    for (int i = blockIdx.x * kThreads + threadIdx.x; i < words; i += gridDim.x * kThreads)
      ranks.masks(owner)[(size_t)number * words + i] = masks[(size_t)sample.mask * words + i];
  }
  __threadfence_system();
  __syncthreads();
  __shared__ bool last;
  if (threadIdx.x == 0) last = atomicAdd(ranks.pushed(), 1u) == gridDim.x * gridDim.y - 1;
  __syncthreads();
  if (!last) return;
  __threadfence_system();
  if (threadIdx.x == 0) *ranks.pushed() = 0;
  if ((int)threadIdx.x < peers.world) tell(ranks.arrived(threadIdx.x, PeerWait::logits) + peers.rank, round);
}

// Each thread waits for a rank. Returns whether all have come.
__device__ bool all_come(const RankSamples& ranks, PeerWait what, uint32_t round) {
  const int r = threadIdx.x;
  bool come = true;
  if (r < ranks.peers.world) {
    const uint32_t* flag = ranks.arrived(ranks.peers.rank, what) + r;
    Wait wait(ranks.peers, what);
    while (!(come = has_come(flag, round)) && wait.goes_on(r)) {}
  }
  return __syncthreads_and(come);
}

__global__ void __launch_bounds__(kThreads)
    await_kernel(const __grid_constant__ RankSamples ranks, const DealtSample* samples, int count, Argmax* argmax,
                 uint32_t round) {
  after_previous();
  if (all_come(ranks, PeerWait::logits, round)) return;
  for (int j = threadIdx.x; j < count; j += kThreads) argmax[(size_t)samples[j].row * kArgmaxParts].not_finite = 1;
}

// ---- samples

__global__ void __launch_bounds__(kExchangeThreads)
    exchange_kernel(const __grid_constant__ RankSamples ranks, const SampleOutput* own, const DealtSample* samples,
                    int count, Argmax* argmax, uint32_t round) {
  after_previous();
  const Peers& peers = ranks.peers;
  const uint32_t* from = reinterpret_cast<const uint32_t*>(own);
  for (int r = 0; r < peers.world; r++) {
    uint32_t* to = reinterpret_cast<uint32_t*>(ranks.samples(r));
    for (int i = threadIdx.x; i < ranks.own(count) * kSampleWords; i += kExchangeThreads) {
      const int j = i / kSampleWords * peers.world + peers.rank;
      to[(size_t)j * kSampleWords + i % kSampleWords] = from[i];
    }
  }
  __threadfence_system();
  __syncthreads();
  if ((int)threadIdx.x < peers.world) tell(ranks.arrived(threadIdx.x, PeerWait::samples) + peers.rank, round);
  if (!all_come(ranks, PeerWait::samples, round)) return;
  const SampleOutput* all = ranks.samples(peers.rank);
  for (int j = threadIdx.x; j < count; j += kExchangeThreads) {
    const SampleStatus status = static_cast<SampleStatus>(__ldcg(reinterpret_cast<const int32_t*>(&all[j].status)));
    // The next step reads sampled tokens where it reads argmax tokens.
    if (samples[j].samples && status == SampleStatus::kOk)
      argmax[(size_t)samples[j].row * kArgmaxParts] = {INFINITY, __ldcg(&all[j].token), 0};
  }
}

}  // namespace

void agree_argmaxes(const RankSamples& ranks, Argmax* best, int rows, const Queue& queue) {
  start(queue, agree_kernel, std::clamp(ceil_div(rows, kWarps), 1, sm_count()), kThreads, 0, ranks, best, rows);
}

void push_logits(const RankSamples& ranks, const float* logits, const uint32_t* masks, const DealtSample* samples,
                 int count, uint32_t round, const Queue& queue) {
  const bool four = ranks.vocab % 4 == 0 && ranks.begin % 4 == 0 && ranks.width % 4 == 0;
  const dim3 blocks(std::max(1, ceil_div(ranks.width, kEach)), count);
  start(queue, four ? push_kernel<true> : push_kernel<false>, blocks, kThreads, 0, ranks, logits, masks, samples,
        round);
}

void await_logits(const RankSamples& ranks, const DealtSample* samples, int count, Argmax* argmax, uint32_t round,
                  const Queue& queue) {
  start(queue, await_kernel, 1, kThreads, 0, ranks, samples, count, argmax, round);
}

void exchange_samples(const RankSamples& ranks, const SampleOutput* own, const DealtSample* samples, int count,
                      Argmax* argmax, uint32_t round, const Queue& queue) {
  start(queue, exchange_kernel, 1, kExchangeThreads, 0, ranks, own, samples, count, argmax, round);
}

}  // namespace as::cuda
