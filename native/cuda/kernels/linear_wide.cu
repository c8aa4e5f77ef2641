// Products in bfloat16 by wgmma for many rows.
//
// A block of threads has a tile of 128 rows of activations and kColumns columns (rows of the weights) at a time, and
// there are no more blocks than run at once: each computes one tile after the other. One thread has blocks of both
// sides copied into shared memory, several stages ahead and on into the next tile while this one is written; two
// warpgroups multiply, each 64 rows with all columns. Sums of a piece of K (tiles.h) are added to those of the pieces
// before in registers. Four blocks of threads, which have two tiles of rows by two of columns, are a cluster: each
// copies half of what it shares for both, as what the second-level cache delivers is the limit.
#include <cstdint>

#include "cuda/kernels/linear_wgmma.h"
#include "cuda/kernels/wgmma.cuh"

namespace as {
namespace cuda {
namespace {

constexpr int kGroups = 2, kRows = kGroups * kBlock;  // warpgroups that multiply; rows of a tile
constexpr int kAcross = 2, kDown = 2;                 // a cluster's tiles: of columns, of rows
constexpr int kCluster = kAcross * kDown;
constexpr int kThreads = 128 * (1 + kGroups);
constexpr int kMostShared = 226 << 10;
// How many clusters' tiles of rows are shared by blocks that are at work at the same time: they stay in the cache.
[[maybe_unused]] constexpr int kBand = 8;
// How many stages one warpgroup is ahead of the other: it writes while the other multiplies.
[[maybe_unused]] constexpr int kAhead = 2;

template <int kColumns>
struct Shape {
  static constexpr int kStageBytes = (kRows + kColumns) * kRowBytes, kStages = kMostShared / kStageBytes;
  static constexpr int kShared = kStages * kStageBytes;
  // Bytes of weights that each of the blocks of a cluster that share them copies: whole groups of eight rows.
  static_assert(kColumns % (8 * kDown) == 0);
};

// The tiles of a product, cluster by cluster.
struct Walk {
  int down, across;  // clusters' tiles

  __host__ __device__ Walk(int rows, int columns, int tile_columns)
      : down((rows + kDown * kRows - 1) / (kDown * kRows)),
        across((columns + kAcross * tile_columns - 1) / (kAcross * tile_columns)) {}
  __host__ __device__ int count() const { return down * across; }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// The number, which the compiler takes as new: so what is made of it is not kept in registers through the products.
__device__ int afresh(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// A block's tile among a cluster's: in their order some tiles of rows take one of columns after the other.
struct TilePlace {
  int row, column;

  __device__ TilePlace(const Walk& walk, int tile, int down, int across) {
    const int first = tile / (kBand * walk.across) * kBand, there = min(kBand, walk.down - first);
    const int within = tile - first * walk.across;
    row = (first + within % there) * kDown + down, column = within / there * kAcross + across;
  }
};

template <int kStages>
struct Barriers {
  uint64_t full[kStages], empty[kStages];
};

// What a block of threads copies of its tile: its share of the weights' rows for the blocks below and above it, and of
// the blocks of activations for the ones beside it.
template <int kColumns>
class Copier {
 public:
  __device__ Copier(const Product& p, int rows, const Pieces& k, uint32_t stages, Barriers<Shape<kColumns>::kStages>& b)
      : p_(p), rows_(rows), k_(k), stages_(stages), barriers_(b) {}

  __device__ void begin_tile(const TilePlace& tile, int down, int across) {
    const int row = tile.row, first = tile.column * kColumns;
    const int there = max(0, min(kColumns, blocks_of(p_.w.n) * kBlock - first));
    const int blocks = max(0, min(kGroups, blocks_of(rows_) - row * kGroups));
    bytes_ = (there + blocks * kBlock) * kRowBytes;
    constexpr int kShare = kColumns / kDown;
    begin_ = first + min(there, down * kShare), end_ = first + min(there, (down + 1) * kShare), first_ = first;
    row_block_ = row * kGroups, first_block_ = across * kGroups / kAcross;
    end_block_ = min(blocks, (across + 1) * kGroups / kAcross);
    // The blocks that take part in a row of a cluster are adjacent.
    for_weights_ = 0, for_rows_ = ((1 << kAcross) - 1) << (down * kAcross);
    for (int i = 0; i < kDown; i++) for_weights_ |= 1 << (i * kAcross + across);
  }
  __device__ void weights(int block, int stage) {
    barrier_expect(&barriers_.full[stage], bytes_);
    const uint32_t to = stages_ + stage * Shape<kColumns>::kStageBytes + kRows * kRowBytes;
    const char* from = reinterpret_cast<const char*>(p_.w.tiles) + (size_t)block * kBlockBytes;
    for (int row = begin_, end; row < end_; row = end) {
      end = min(end_, (row / kBlock + 1) * kBlock);
      copy(to + (row - first_) * kRowBytes,
           from + (size_t)(row / kBlock) * k_.blocks * kBlockBytes + row % kBlock * kRowBytes, (end - row) * kRowBytes,
           stage, for_weights_, kDown);
    }
  }
  __device__ void rows(int block, int stage) {
    const uint32_t to = stages_ + stage * Shape<kColumns>::kStageBytes;
    const char* from = reinterpret_cast<const char*>(p_.x.tiles);
    for (int i = first_block_; i < end_block_; i++)
      copy(to + i * kBlockBytes, from + ((size_t)(row_block_ + i) * k_.blocks + block) * kBlockBytes, kBlockBytes,
           stage, for_rows_, kAcross);
  }

 private:
  __device__ void copy(uint32_t to, const char* from, int bytes, int stage, uint16_t blocks, int count) {
    if (count > 1) copy_bulk_to(to, from, bytes, &barriers_.full[stage], blocks);
    else copy_bulk(to, from, bytes, &barriers_.full[stage]);
  }

  const Product& p_;
  const int rows_;
  const Pieces& k_;
  const uint32_t stages_;
  Barriers<Shape<kColumns>::kStages>& barriers_;
  int bytes_, first_, begin_, end_, row_block_, first_block_, end_block_;
  uint16_t for_weights_, for_rows_;
};

// What sums are in the end.
template <bool kWhole, int kValues, int kTotals>
__device__ const auto& of_pieces(const float (&piece)[kValues], const float (&total)[kTotals]) {
  if constexpr (kWhole) return piece;
  else return total;
}

// A warpgroup's sums of 64 rows become gated values: a thread has gates and what they gate of the same columns, two
// adjacent ones of each eight; lanes exchange these, so that each has eight adjacent ones at a time.
template <int kColumns>
__device__ void write_gated(const Product& p, int rows, int first_row, int first_column,
                            const float (&sums)[kColumns / 2]) {
  constexpr int kEights = kColumns / 16;
  const int thread = afresh(threadIdx.x % 128), lane = thread % 32, quarter = lane % 4, width = p.y.width,
            blocks = blocks_of(width);
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int row = first_row + thread / 32 * 16 + lane / 4 + 8 * h;
#pragma unroll
    for (int first = 0; first < kEights; first += 4) {
      uint32_t words[4] = {};
#pragma unroll
      for (int i = 0; i < 4 && first + i < kEights; i++) {
        const float* gates = sums + (first + i) * 8 + 2 * h;
        const int column = first_column + (first + i) * 8 + 2 * quarter;
        float values[2];
#pragma unroll
        for (int j = 0; j < 2; j++) values[j] = column + j < width ? gated(p, column + j, gates[j], gates[4 + j]) : 0;
        words[i] = two_bf16(values[0], values[1]);
      }
      exchange(words);
      const int column = first_column + (first + quarter) * 8;
      if (row < rows && first + quarter < kEights && column < width)
        *reinterpret_cast<uint4*>(p.y.tiles + tile_offset(row, column, blocks)) =
            make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

__device__ float4 sum_of(const float4& a, const float4& b) {
  return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w));
}

// Likewise as they are, with a bias, or added to what is there. Lanes exchange two values of each 16 columns, so that
// each has four adjacent ones. All that is read comes before anything is written.
template <int kColumns>
__device__ void write_sums(const Product& p, int rows, int first_row, int first_column,
                           const float (&sums)[kColumns / 2]) {
  constexpr int kSixteens = kColumns / 16;
  const int thread = afresh(threadIdx.x % 128), lane = thread % 32, odd = lane % 2, stride = 2 * p.y.width;
  const int column = first_column + 8 * odd + lane % 4 / 2 * 4, row = first_row + thread / 32 * 16 + lane / 4;
  float4* to = reinterpret_cast<float4*>(p.y.values + (size_t)row * p.y.width + column);
  const float4* bias = reinterpret_cast<const float4*>(p.bias + column);
  const int end = row + 8 < rows ? 2 : row < rows;  // of this row and the one eight below it
  const auto there = [&](int h, int i) { return h < end && column + 16 * i < p.w.n; };
  float4 before[2][kSixteens];
  if (p.adds) {
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int i = 0; i < kSixteens; i++)
        if (there(h, i)) before[h][i] = to[(size_t)h * stride + 4 * i];
  }
#pragma unroll
  for (int h = 0; h < 2; h++)
#pragma unroll
    for (int i = 0; i < kSixteens; i++) {
      const float *low = sums + 8 * i + 2 * h, *high = low + 4;
      const float first = __shfl_xor_sync(0xffffffffu, odd ? low[0] : high[0], 1),
                  second = __shfl_xor_sync(0xffffffffu, odd ? low[1] : high[1], 1);
      if (!there(h, i)) continue;
      float4 values = odd ? make_float4(first, second, high[0], high[1]) : make_float4(low[0], low[1], first, second);
      if (p.bias) values = sum_of(values, bias[4 * i]);
      if (p.y.tiles) {
        *reinterpret_cast<uint2*>(p.y.tiles + tile_offset(row + 8 * h, column + 16 * i, blocks_of(p.y.width))) =
            make_uint2(two_bf16(values.x, values.y), two_bf16(values.z, values.w));
        continue;
      }
      if (p.adds) values = sum_of(before[h][i], values);
      to[(size_t)h * stride + 4 * i] = values;
    }
}
#endif

// kWhole: sums are of one piece of K, and need not be kept beside others.
template <int kColumns, bool kWhole>
__global__ void __launch_bounds__(kThreads, 1)
    linear_wide_kernel(const __grid_constant__ Product p, int rows, Pieces k, Walk walk) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = Shape<kColumns>;
  extern __shared__ __align__(1024) char shared[];
  __shared__ Barriers<S::kStages> barriers;
  const int rank = blockIdx.x % kCluster, down = rank / kAcross, across = rank % kAcross;
  const int first_tile = blockIdx.x / kCluster, step = gridDim.x / kCluster;
  const uint32_t stages = shared_address(shared);
  let_next_begin();
  if (threadIdx.x == 0) {
    // Of a stage: copied is what this block asked for; empty is it at all blocks of the cluster.
    for (int i = 0; i < S::kStages; i++)
      barrier_init(&barriers.full[i], 1), barrier_init(&barriers.empty[i], kCluster * kGroups);
    barriers_are_there();
  }
  __syncthreads();
  cluster_barrier();
  const int group = threadIdx.x / 128 - 1;
  Ring<S::kStages> ring;
  if (group < 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) {
      Copier<kColumns> copier(p, rows, k, stages, barriers);
      // Weights are on their way before the kernel before this one has made the rows.
      int ahead = min(S::kStages, k.blocks);
      copier.begin_tile(TilePlace(walk, first_tile, down, across), down, across);
      for (int b = 0; b < ahead; b++) copier.weights(b, b);
      await_previous();
      for (int tile = first_tile; tile < walk.count(); tile += step) {
        copier.begin_tile(TilePlace(walk, tile, down, across), down, across);
        for (int b = 0; b < k.blocks; b++, ring.next()) {
          if (ahead > 0) {
            ahead--;
          } else {
            barrier_wait(&barriers.empty[ring.stage], ring.parity ^ 1);
            copier.weights(b, ring.stage);
          }
          copier.rows(b, ring.stage);
        }
      }
    }
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    await_previous();
    float d[kColumns / 2], total[kWhole ? 1 : kColumns / 2];
    // All blocks of the cluster are told, by a thread each: if only those were that copy for this one, one with nothing
    // to wait for (a tile beyond the last) could tell twice what another has not told once.
    const int teller = threadIdx.x % 128;
    const auto release = [&](int stage) {
      if (teller < kCluster) barrier_arrive_at(&barriers.empty[stage], teller);
    };
    if (group == 1 && k.blocks > kAhead) asm volatile("bar.sync 1, 256;" ::: "memory");
    for (int tile = first_tile; tile < walk.count(); tile += step) {
      const TilePlace place(walk, tile, down, across);
      const int first_row = place.row * kRows + group * kBlock, first_column = place.column * kColumns;
      const bool there = first_row < rows && first_column < p.w.n;
      if constexpr (!kWhole) {
#pragma unroll
        for (int i = 0; i < kColumns / 2; i++) total[i] = -0.0f;  // with which a sum is what is added
      }
      for (int piece = 0, b = 0; piece < k.count; piece++) {
        const int first = b, end = min(b + k.length, k.blocks);
        int last = 0;
#pragma unroll 1
        for (; b < end; b++, ring.next()) {
          barrier_wait(&barriers.full[ring.stage], ring.parity);
          if (there) {
            const uint32_t stage = stages + ring.stage * S::kStageBytes, own = stage + group * kBlockBytes,
                           theirs = stage + kRows * kRowBytes;
            begin_products();
#pragma unroll
            for (int step = 0; step < 4; step++)
              Tile<kColumns>::multiply(d, descriptor(own + step * kStepBytes), descriptor(theirs + step * kStepBytes),
                                       step > 0 || b > first);
            commit_products();
            wait_products<1>();
          }
          if (b > first) release(last);
          last = ring.stage;
          if (group == 0 && b == kAhead && tile == first_tile) asm volatile("bar.arrive 1, 256;" ::: "memory");
        }
        wait_products<0>();
        release(last);
        settle(d);
        if constexpr (!kWhole) {
#pragma unroll
          for (int i = 0; i < kColumns / 2; i++) total[i] = __fadd_rn(total[i], d[i]);
        }
      }
      if (!there) continue;
      const float(&sums)[kColumns / 2] = of_pieces<kWhole>(d, total);
      if (p.gated) write_gated<kColumns>(p, rows, first_row, first_column / 2, sums);
      else write_sums<kColumns>(p, rows, first_row, first_column, sums);
    }
  }
  __syncwarp();
  cluster_barrier();  // other blocks may still tell this one's barriers
#endif
}

template <int kColumns, bool kWhole>
struct Kernel {
  static constexpr auto kFunction = linear_wide_kernel<kColumns, kWhole>;

  // How many clusters run at once.
  static int clusters() {
    static const int count = [] {
      cudaLaunchAttribute attribute;
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim.x = kCluster, attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
      cudaLaunchConfig_t config = {};
      config.gridDim = dim3(kCluster), config.blockDim = dim3(kThreads);
      config.dynamicSmemBytes = Shape<kColumns>::kShared;
      config.attrs = &attribute, config.numAttrs = 1;
      int found = 0;
      allow_shared(kFunction, Shape<kColumns>::kShared);
      if (cudaOccupancyMaxActiveClusters(&found, kFunction, &config) != cudaSuccess) cudaGetLastError();
      return found > 0 ? found : processors() / kCluster;
    }();
    return count;
  }
  static void start(const Product& p, int rows, const Queue& queue) {
    const Walk walk(rows, p.w.n, kColumns);
    allow_shared(kFunction, Shape<kColumns>::kShared);
    const int blocks = kCluster * (walk.count() < clusters() ? walk.count() : clusters());
    start_clusters(queue, kFunction, dim3(blocks), dim3(kCluster), kThreads, Shape<kColumns>::kShared, p, rows,
                   Pieces(p.w.k, p.w.most_pieces), walk);
    launched("linear in bfloat16, many rows");
  }
};

struct Choice {
  int columns;
  void (*start)(const Product&, int, const Queue&);
};
template <int kColumns, bool kWhole>
constexpr Choice kChoice{kColumns, Kernel<kColumns, kWhole>::start};
constexpr Choice kByPieces[] = {kChoice<192, false>, kChoice<176, false>, kChoice<160, false>,
                                kChoice<144, false>, kChoice<128, false>, kChoice<112, false>};
constexpr Choice kByOne[] = {kChoice<256, true>, kChoice<240, true>, kChoice<224, true>, kChoice<192, true>,
                             kChoice<160, true>};

}  // namespace

void linear_wide(const Product& p, int rows, const Queue& queue) {
  // Rows are written whole pieces of 16 bytes at a time.
  if (p.gated ? !p.y.tiles : p.y.width % 4 || p.w.n % 4) return linear_bf16(p, rows, queue, By::split);
  // The tile with which all clusters are at work as much of the time as can be; wide ones read less for each value.
  const int clusters = Kernel<192, false>::clusters();
  const Choice* best = nullptr;
  int least = INT32_MAX;
  const auto consider = [&](const Choice& choice) {
    const int turns = (Walk(rows, p.w.n, choice.columns).count() + clusters - 1) / clusters;
    const int cost = turns * (choice.columns + 16);
    if (cost < least) best = &choice, least = cost;
  };
  if (Pieces(p.w.k, p.w.most_pieces).count == 1)
    for (const Choice& choice : kByOne) consider(choice);
  else
    for (const Choice& choice : kByPieces) consider(choice);
  best->start(p, rows, queue);
}

}  // namespace cuda
}  // namespace as
