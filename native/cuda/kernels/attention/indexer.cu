// Scores of an indexer. The sum over heads has a fixed order for each position: with tensor cores, each of four threads
// adds every fourth pair of heads in ascending order, and the four sums are added in pairs. So bits depend on the row
// and the position alone.
#include "cuda/kernels/attention/entries.cuh"
#include "cuda/kernels/attention/indexer.h"

namespace as::cuda {
namespace AS_DTYPE16 {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps, kWarpTokens = kIndexTokens / kWarps;
constexpr int kFeatures = 128, kWords = kFeatures / 32;  // most features of a head; 16-byte words of a thread
constexpr int kHeadBytes = 2 * kFeatures + 64;           // of a query in shared memory: no bank conflicts
constexpr int kTogether = 4;                             // rows of a prompt that share a CTA's keys
static_assert(kWarpTokens == 32);

int whole_eights(int heads) { return (heads + 7) / 8 * 8; }
size_t shared_bytes(int heads, int together) {
  return (size_t)together * whole_eights(heads) * (kHeadBytes + sizeof(float));
}

// The last position, or entry, that a row sees; -1: none.
__device__ int last_seen_by(const Indexer& p, int row) {
  return p.entries.rate ? (p.positions[row] + 1) / p.entries.rate - 1 : p.positions[row];
}

// A key's place in the cache.
__device__ const char* key_at(const Indexer& p, const int* table, int position) {
  if (p.entries.rate) return entry_row(p.entries, table, position);
  const int size = p.keys.span_size;
  return head_of(p.keys, table[position / size], 0) + position % size * p.keys.row_bytes();
}

// Keys are the first operand of mma.sync, heads of a query the second one. A thread has 16 bytes of a key and of a
// query at a time: four pairs of features, which are those of two steps. So the features of a step are not adjacent.
class Scorer {
 public:
  __device__ Scorer(const Indexer& p, char* shared, int together)
      : p_(p),
        eights_((p.heads + 7) / 8),
        queries_(shared_address(shared)),
        weights_(reinterpret_cast<float*>(shared + (size_t)together * eights_ * 8 * kHeadBytes)) {}

  // Converts the queries of a row to 16 bits, with zeros for features and heads that there are not.
  __device__ void read_queries(int row, int place) const {
    const int dim = p_.keys.head_dim, chunks = kFeatures / 8;
    for (int i = threadIdx.x; i < eights_ * 8 * chunks; i += kThreads) {
      const int head = i / chunks, column = i % chunks * 8;
      float x[8] = {};
      if (head < p_.heads && column < dim)
        read_eight(p_.queries + ((size_t)row * p_.heads + head) * dim, column, dim, x);
      const uint32_t to = queries_ + (place * eights_ * 8 + head) * kHeadBytes + column * 2;
      store_16(to, make_uint4(to_dtype16x2(x[0], x[1]), to_dtype16x2(x[2], x[3]), to_dtype16x2(x[4], x[5]),
                              to_dtype16x2(x[6], x[7])));
    }
    for (int head = threadIdx.x; head < eights_ * 8; head += kThreads)
      weights_[place * eights_ * 8 + head] = head < p_.heads ? p_.weights[(size_t)row * p_.heads + head] : 0.0f;
  }

  // Reads 32 keys, from position `begin` on; those beyond `last` are zero.
  __device__ void read_keys(const int* table, int begin, int last) {
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int position = begin + m * 16 + h * 8 + lane_ / 4;
        const char* key = position <= last ? key_at(p_, table, position) : nullptr;
#pragma unroll
        for (int j = 0; j < kWords; j++) {
          const int column = 32 * j + lane_ % 4 * 8;
          uint4 four = make_uint4(0, 0, 0, 0);
          if (key && column < p_.keys.padded_dim) four = *reinterpret_cast<const uint4*>(key + column * 2);
          keys_[m][2 * j][h] = four.x, keys_[m][2 * j][h + 2] = four.y;
          keys_[m][2 * j + 1][h] = four.z, keys_[m][2 * j + 1][h + 2] = four.w;
        }
      }
  }

  // The score of the lane's own key: the keys of lane 4 i + j are those with number 8 j + i.
  __device__ float score(int place) const {
    float sums[2][2] = {};
    const uint32_t from = queries_ + (place * eights_ * 8 + lane_ / 4) * kHeadBytes + lane_ % 4 * 16;
    const float* weights = weights_ + place * eights_ * 8 + lane_ % 4 * 2;
#pragma unroll 2
    for (int eight = 0; eight < eights_; eight++) {
      float products[2][4] = {};
#pragma unroll
      for (int j = 0; j < kWords; j++) {
        const uint4 query = load_16(from + eight * 8 * kHeadBytes + j * 64);
#pragma unroll
        for (int m = 0; m < 2; m++) {
          multiply_add(products[m], keys_[m][2 * j], query.x, query.y);
          multiply_add(products[m], keys_[m][2 * j + 1], query.z, query.w);
        }
      }
      const float2 weight = *reinterpret_cast<const float2*>(weights + eight * 8);
#pragma unroll
      for (int m = 0; m < 2; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          sums[m][h] = __fmaf_rn(weight.x, fmaxf(products[m][2 * h], 0.0f), sums[m][h]);
          sums[m][h] = __fmaf_rn(weight.y, fmaxf(products[m][2 * h + 1], 0.0f), sums[m][h]);
        }
    }
    float own = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float sum = sums[i / 2][i % 2];
      sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 1));
      sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 2));
      if (lane_ % 4 == i) own = sum;
    }
    return own;
  }

 private:
  const Indexer& p_;
  const int eights_, lane_ = threadIdx.x % 32;
  const uint32_t queries_;
  float* const weights_;
  uint32_t keys_[2][2 * kWords][4];  // of 16 positions each, by steps of 16 features
};

// A CTA has `together` rows, whose sequences it takes in turn. gridDim.y CTAs share the positions.
__global__ void __launch_bounds__(kThreads)
    score_kernel(const __grid_constant__ Indexer p, int first, int rows, int together) {
  extern __shared__ __align__(16) char shared[];
  after_previous();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, own = lane % 4 * 8 + lane / 4;
  const int end = min(first + rows, first + ((int)blockIdx.x + 1) * together);
  Scorer scorer(p, shared, together);
  for (int row = first + blockIdx.x * together, next; row < end; row = next) {
    int last = last_seen_by(p, row);
    for (next = row + 1; next < end && p.row_tables[next] == p.row_tables[row]; next++)
      last = max(last, last_seen_by(p, next));
    if (last < p.width) continue;
    __syncthreads();
    for (int r = row; r < next; r++)
      if (last_seen_by(p, r) >= p.width) scorer.read_queries(r, r - row);
    __syncthreads();
    const int* table = p.tables + p.row_tables[row];
    for (int begin = blockIdx.y * kIndexTokens + warp * kWarpTokens; begin <= last; begin += gridDim.y * kIndexTokens) {
      scorer.read_keys(table, begin, last);
      for (int r = row; r < next; r++)
        if (last_seen_by(p, r) >= p.width)
          p.scores[(size_t)(r - first) * p.stride + begin + own] = scorer.score(r - row);
    }
  }
}

// Without tensor cores: a warp for each position.
template <typename T>
__global__ void __launch_bounds__(kThreads) score_simt_kernel(const __grid_constant__ Indexer p, int first) {
  after_previous();
  const int row = first + blockIdx.x, position = last_seen_by(p, row), lane = threadIdx.x % 32, dim = p.keys.head_dim;
  if (position < p.width) return;
  const int* table = p.tables + p.row_tables[row];
  const float *queries = p.queries + (size_t)row * p.heads * dim, *weights = p.weights + (size_t)row * p.heads;
  for (int at = blockIdx.y * kWarps + threadIdx.x / 32; at <= position; at += gridDim.y * kWarps) {
    const T* key = reinterpret_cast<const T*>(key_at(p, table, at));
    float sum = 0;
    for (int head = 0; head < p.heads; head++) {
      float product = 0;
      for (int f = lane; f < dim; f += 32) {
        float x;
        if constexpr (sizeof(T) == 4) x = key[f];
        else x = from_dtype16(key[f]);
        product = __fmaf_rn(queries[head * dim + f], x, product);
      }
      sum = __fmaf_rn(weights[head], fmaxf(warp_sum(product), 0.0f), sum);
    }
    if (lane == 0) p.scores[(size_t)blockIdx.x * p.stride + at] = sum;
  }
}

template <bool kAll = kAllFormats>
auto score_simt_kernel_of(CacheType type) {
  if constexpr (kAll)
    if (type == CacheType::f32) return score_simt_kernel<float>;
  return score_simt_kernel<uint16_t>;
}

}  // namespace

void score_positions(const Indexer& p, int first, int rows, bool prompts, const Queue& queue) {
  const auto sharers = [&](int ctas) {
    return std::min(p.stride / kIndexTokens, std::max(1, ceil_div(2 * sm_count(), ctas)));
  };
  if (p.keys.type == CacheType::f32 || p.keys.head_dim > kFeatures || shared_bytes(p.heads, 1) > (size_t)max_shared())
    return start(queue, score_simt_kernel_of(p.keys.type), dim3(rows, sharers(rows)), kThreads, 0, p, first);
  const int most = (int)((size_t)max_shared() / shared_bytes(p.heads, 1));
  const int together = prompts ? std::min(kTogether, most) : 1, ctas = ceil_div(rows, together);
  start(queue, score_kernel, dim3(ctas, sharers(ctas)), kThreads, shared_bytes(p.heads, together), p, first, rows,
        together);
}

}  // namespace AS_DTYPE16
}  // namespace as::cuda
