// Products in bfloat16 by wgmma for many rows.
//
// A block of threads has a tile of 128 rows of activations and some columns (rows of the weights) at a time, and
// there are no more blocks than run at once: each computes one tile after the other. Four threads have blocks of both
// sides copied into shared memory, several stages ahead and on into the next tile while this one is written; two
// warpgroups multiply, each 64 rows with all columns. Sums of a piece of K (tiles.h) are added to those of the
// pieces before in registers. Blocks of threads that have adjacent tiles of rows and of columns are a cluster: each
// copies a part of what they share for all, as what the second-level cache delivers is the limit.
#include <cstdint>

#include "cuda/kernels/linear_wgmma.h"
#include "cuda/kernels/wgmma.cuh"

namespace as {
namespace cuda {
namespace {

constexpr int kMostShared = 226 << 10;
[[maybe_unused]] constexpr int kCopiers = 4;  // threads that copy, each of up to two parts of a tile
constexpr int kGroups = 2, kRows = kGroups * kBlock, kThreads = 128 * (1 + kGroups);  // warpgroups that multiply
// How many stages one warpgroup is ahead of the other: it writes while that one multiplies.
[[maybe_unused]] constexpr int kAhead = 2;
// How many rows' tiles are shared by blocks that are at work at the same time: they stay in the cache.
[[maybe_unused]] constexpr int kBandRows = 2048;

// A tile: kColumns columns. A cluster: kDown tiles of rows by kAcross of columns. kWhole: sums are of one piece of K,
// and need not be kept beside others.
template <int kColumns_, bool kWhole_, int kDown_, int kAcross_>
struct Shape {
  static constexpr int kColumns = kColumns_, kDown = kDown_, kAcross = kAcross_;
  [[maybe_unused]] static constexpr bool kWhole = kWhole_;
  static constexpr int kCluster = kDown * kAcross;
  static constexpr int kStageBytes = (kRows + kColumns) * kRowBytes, kStages = kMostShared / kStageBytes;
  static constexpr int kShared = kStages * kStageBytes;
  [[maybe_unused]] static constexpr int kBand = kBandRows / (kDown * kRows);
  // What each block of a cluster copies of what it shares: whole groups of eight rows.
  static_assert(kColumns % (8 * kDown) == 0 && kRows % (8 * kAcross) == 0);
};

// The tiles of a product, cluster by cluster.
struct Walk {
  int down, across;  // clusters' tiles

  int count() const { return down * across; }
};
template <typename S>
Walk walk_of(int rows, int columns) {
  return {ceil_div(rows, S::kDown * kRows), ceil_div(columns, S::kAcross * S::kColumns)};
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// The number, which the compiler takes as new: so what is made of it is not kept in registers through the products.
__device__ int afresh(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// A block's tile among a cluster's: in their order some tiles of rows take one of columns after the other.
struct TilePlace {
  int row, column;

  template <typename S>
  __device__ static TilePlace of(const Walk& walk, int tile, int down, int across) {
    const int first = tile / (S::kBand * walk.across) * S::kBand, there = min(S::kBand, walk.down - first);
    const int within = tile - first * walk.across;
    return {((first + within % there) * S::kDown + down) * kRows, (within / there * S::kAcross + across) * S::kColumns};
  }
};

// What a block of threads shares beside stages. Where tiles are is said by who copies: it takes divisions, and nobody
// multiplies meanwhile. More tiles than these are never on their way: each has a stage at least.
template <int kStages>
struct Barriers {
  static constexpr int kPlaces = 16;
  static_assert(kPlaces >= kStages + 2);
  uint64_t full[kStages], empty[kStages];
  TilePlace places[kPlaces];
};

// What a block copies of rows that several of the cluster have in common.
struct Share {
  const uint16_t* tiles;
  int first, blocks;  // row; blocks of K
  int begin, end;     // this block's of the rows from that one on
  int bytes;          // of all blocks' shares, of a block of K

  // rows: that there are, of `most`; place: of this block among `count`.
  __device__ Share(const uint16_t* tiles, int first, int rows, int most, int blocks, int place, int count)
      : tiles(tiles), first(first), blocks(blocks) {
    const int there = max(0, min(most, blocks_of(rows) * kBlock - first)), each = most / count;
    begin = min(there, place * each), end = min(there, (place + 1) * each), bytes = there * kRowBytes;
  }
};

// A part of a share that lies in one piece, and where its first block of K goes in a stage.
struct Part {
  const char* from = nullptr;
  uint32_t to = 0;
  int bytes = 0;

  // Number n of a share's parts, if there are so many; else n becomes what is left of it.
  __device__ Part(const Share& share, int& n) {
    for (int row = share.begin, next; row < share.end; row = next) {
      const int at = share.first + row;
      next = min(share.end, row + kBlock - at % kBlock);
      if (n-- > 0) continue;
      from = reinterpret_cast<const char*>(share.tiles) + (size_t)(at / kBlock) * share.blocks * kBlockBytes +
             at % kBlock * kRowBytes;
      to = row * kRowBytes, bytes = (next - row) * kRowBytes;
      return;
    }
  }
};

// The next products begin anew: what is there need not be kept until then.
template <int kValues>
__device__ void forget(float (&d)[kValues]) {
#pragma unroll
  for (int i = 0; i < kValues; i++) asm volatile("" : "=f"(d[i]));
}

// What sums are in the end.
template <bool kWhole, int kValues, int kTotals>
__device__ const auto& of_pieces(const float (&piece)[kValues], const float (&total)[kTotals]) {
  if constexpr (kWhole) return piece;
  else return total;
}

// A warpgroup's sums of 64 rows become gated values: a thread has gates and what they gate of the same columns, two
// adjacent ones of each eight; lanes exchange these, so that each has eight adjacent ones at a time. Few instructions
// count here: nobody multiplies meanwhile, and they do not stay in the cache.
template <bool kBias, int kColumns>
__device__ void write_gated(const Product& p, int rows, int first_row, int first_column,
                            const float (&sums)[kColumns / 2]) {
  constexpr int kEights = kColumns / 16;
  const int thread = afresh(threadIdx.x % 128), lane = thread % 32, quarter = lane % 4, width = p.y.width,
            blocks = blocks_of(width);
  const auto gate_of = [&](int i, int j, const float* gates) {
    if constexpr (!kBias) return silu_times(gates[j], gates[4 + j]);
    const int column = first_column + i * 8 + 2 * quarter + j;
    const bool there = column < width;  // with -0 a sum is what is added
    return silu_times(__fadd_rn(gates[j], there ? p.bias[column] : -0.0f),
                      __fadd_rn(gates[4 + j], there ? p.bias[width + column] : -0.0f));
  };
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int row = first_row + thread / 32 * 16 + lane / 4 + 8 * h;
#pragma unroll
    for (int first = 0; first < kEights; first += 4) {
      uint32_t words[4] = {};
#pragma unroll
      for (int i = 0; i < 4 && first + i < kEights; i++) {
        const float* gates = sums + (first + i) * 8 + 2 * h;
        words[i] = two_bf16(gate_of(first + i, 0, gates), gate_of(first + i, 1, gates));
      }
      exchange(words);
      const int column = first_column + (first + quarter) * 8;
      if (row >= rows || first + quarter >= kEights || column >= width) continue;
      if (column + 8 > width) {  // columns from the width on are padding, which is zero
#pragma unroll
        for (int i = 0; i < 4; i++) words[i] &= column + 2 * i + 1 < width ? ~0u : column + 2 * i < width ? 0xffff : 0;
      }
      *reinterpret_cast<uint4*>(p.y.tiles + tile_offset(row, column, blocks)) =
          make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

// What a warpgroup's sums of 64 rows are added to is on its way into the second-level cache.
template <int kColumns>
__device__ void ask_for_added(const Product& p, int rows, int first_row, int first_column) {
  constexpr int kLine = 32;  // values
  const int count = min(kColumns, p.w.n - first_column), width = p.y.width;
  for (int i = threadIdx.x % 128; i < kBlock * (kColumns / kLine); i += 128) {
    const int row = first_row + i / (kColumns / kLine), column = i % (kColumns / kLine) * kLine;
    if (row < rows && column < count)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(p.y.values + (size_t)row * width + first_column + column));
  }
}

// Likewise as they are, with a bias, or added to what is there. Lanes exchange two values of each 16 columns, so that
// each has four adjacent ones. All that is read of a row comes before anything is written.
template <int kColumns>
__device__ void write_sums(const Product& p, int rows, int first_row, int first_column,
                           const float (&sums)[kColumns / 2]) {
  constexpr int kSixteens = kColumns / 16;
  const int thread = afresh(threadIdx.x % 128), lane = thread % 32, odd = lane % 2, width = p.y.width;
  const int column = first_column + 8 * odd + lane % 4 / 2 * 4, row = first_row + thread / 32 * 16 + lane / 4;
  const int left = p.w.n - column;  // of the columns that there are
#pragma unroll
  for (int h = 0; h < 2; h++) {
    float4 values[kSixteens];
#pragma unroll
    for (int i = 0; i < kSixteens; i++) {
      const float *low = sums + 8 * i + 2 * h, *high = low + 4;
      const float first = __shfl_xor_sync(0xffffffffu, odd ? low[0] : high[0], 1),
                  second = __shfl_xor_sync(0xffffffffu, odd ? low[1] : high[1], 1);
      values[i] = odd ? make_float4(first, second, high[0], high[1]) : make_float4(low[0], low[1], first, second);
    }
    if (row + 8 * h >= rows) continue;
    if (p.bias) {
#pragma unroll
      for (int i = 0; i < kSixteens; i++)
        if (16 * i < left) values[i] = sum_of(values[i], *reinterpret_cast<const float4*>(p.bias + column + 16 * i));
    }
    if (p.y.tiles) {
#pragma unroll
      for (int i = 0; i < kSixteens; i++)
        if (16 * i < left)
          *reinterpret_cast<uint2*>(p.y.tiles + tile_offset(row + 8 * h, column + 16 * i, blocks_of(width))) =
              make_uint2(two_bf16(values[i].x, values[i].y), two_bf16(values[i].z, values[i].w));
      continue;
    }
    float4* to = reinterpret_cast<float4*>(p.y.values + (size_t)(row + 8 * h) * width + column);
    if (p.adds) {
      float4 before[kSixteens];
#pragma unroll
      for (int i = 0; i < kSixteens; i++) before[i] = 16 * i < left ? to[4 * i] : make_float4(0, 0, 0, 0);
#pragma unroll
      for (int i = 0; i < kSixteens; i++) values[i] = sum_of(before[i], values[i]);
    }
#pragma unroll
    for (int i = 0; i < kSixteens; i++)
      if (16 * i < left) to[4 * i] = values[i];
  }
}
#endif

template <typename S, bool kGated>
__global__ void __launch_bounds__(kThreads, 1)
    linear_wide_kernel(const __grid_constant__ Product p, int rows, Pieces k, Walk walk) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kColumns = S::kColumns, kDown = S::kDown, kAcross = S::kAcross, kCluster = S::kCluster;
  constexpr bool kWhole = S::kWhole;
  extern __shared__ __align__(1024) char shared[];
  __shared__ Barriers<S::kStages> barriers;
  const int rank = blockIdx.x % kCluster, down = rank / kAcross, across = rank % kAcross;
  const int first_tile = blockIdx.x / kCluster, step = gridDim.x / kCluster, tiles = walk.down * walk.across;
  const uint32_t stages = shared_address(shared);
  let_next_begin();
  if (threadIdx.x == 0) {
    // Of a stage: full is it once all that copy have asked for their parts, and these are there; empty at all blocks
    // of the cluster.
    for (int i = 0; i < S::kStages; i++)
      barrier_init(&barriers.full[i], kCopiers), barrier_init(&barriers.empty[i], kCluster * kGroups);
    barriers_are_there();
  }
  __syncthreads();
  cluster_barrier();
  const int group = threadIdx.x / 128 - 1;
  Ring<S::kStages> ring;
  if (group < 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    // A thread of each warp copies some parts of a tile: one alone would take longer to ask for them than they take.
    if (threadIdx.x % 32 == 0) {
      const int warp = threadIdx.x / 32;
      // The blocks that take part in a row of a cluster are adjacent.
      const uint16_t beside = ((1 << kAcross) - 1) << (down * kAcross);
      uint16_t above = 0;
      for (int i = 0; i < kDown; i++) above |= 1 << (i * kAcross + across);
      for (int tile = first_tile; tile < tiles; tile += step) {
        const TilePlace at = TilePlace::of<S>(walk, tile, down, across);
        if (warp == 0) barriers.places[tile / step % barriers.kPlaces] = at;
        const Share weights(p.w.tiles, at.column, p.w.n, kColumns, k.blocks, down, kDown);
        const Share own(p.x.tiles, at.row, rows, kRows, k.blocks, across, kAcross);
        const auto part_of = [&](int n, bool& of_rows) {
          const Part part(weights, n);
          of_rows = n >= 0;
          return of_rows ? Part(own, n) : part;
        };
        bool of_rows[2];
        Part first = part_of(warp, of_rows[0]), second = part_of(warp + kCopiers, of_rows[1]);
        const auto copy = [&](Part& part, bool of_rows) {
          if (!part.bytes) return;
          uint64_t* barrier = &barriers.full[ring.stage];
          const uint32_t to = stages + ring.stage * S::kStageBytes + (of_rows ? 0 : kRows * kRowBytes) + part.to;
          const int sharers = of_rows ? kAcross : kDown;
          if (sharers > 1) copy_bulk_to(to, part.from, part.bytes, barrier, of_rows ? beside : above);
          else copy_bulk(to, part.from, part.bytes, barrier);
          part.from += kBlockBytes;
        };
        // Weights are on their way before the kernel before this one has made the rows.
        if (tile != first_tile || of_rows[0] || of_rows[1]) await_previous();
        for (int b = 0; b < k.blocks; b++, ring.next()) {
          barrier_wait(&barriers.empty[ring.stage], ring.parity ^ 1);
          // All of them are needed for a stage, whatever they copy: so none is ever a turn of the ring ahead or behind.
          if (warp == 0) barrier_expect(&barriers.full[ring.stage], weights.bytes + own.bytes);
          else barrier_arrive(&barriers.full[ring.stage]);
          copy(first, of_rows[0]), copy(second, of_rows[1]);
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
    int number = 0;
    for (int tile = first_tile; tile < tiles; tile += step, number++) {
      barrier_wait(&barriers.full[ring.stage], ring.parity);
      const TilePlace& place = barriers.places[number % barriers.kPlaces];
      const bool there = place.row + group * kBlock < rows && place.column < p.w.n;
      if (!kGated && p.adds && there) ask_for_added<kColumns>(p, rows, place.row + group * kBlock, place.column);
      if constexpr (!kWhole) {
#pragma unroll
        for (int i = 0; i < kColumns / 2; i++) total[i] = -0.0f;  // with which a sum is what is added
      }
      for (int piece = 0, b = 0; piece < k.count; piece++) {
        const int first = b, end = min(b + k.length, k.blocks);
        int last = 0;
        forget(d);
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
      const TilePlace end = barriers.places[afresh(number) % barriers.kPlaces];
      const int first_row = end.row + group * kBlock;
      if constexpr (kGated) {
        if (p.bias) write_gated<true, kColumns>(p, rows, first_row, end.column / 2, sums);
        else write_gated<false, kColumns>(p, rows, first_row, end.column / 2, sums);
      } else {
        write_sums<kColumns>(p, rows, first_row, end.column, sums);
      }
    }
  }
  __syncwarp();
  cluster_barrier();  // other blocks may still tell this one's barriers
#endif
}

template <typename S>
struct Kernel {
  // How many clusters run at once.
  static int clusters() {
    static const int count = [] {
      constexpr auto kFunction = linear_wide_kernel<S, false>;
      cudaLaunchAttribute attribute;
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim.x = S::kCluster, attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
      cudaLaunchConfig_t config = {};
      config.gridDim = dim3(S::kCluster), config.blockDim = dim3(kThreads);
      config.dynamicSmemBytes = S::kShared;
      config.attrs = &attribute, config.numAttrs = 1;
      int found = 0;
      allow_shared(kFunction, S::kShared);
      if (cudaOccupancyMaxActiveClusters(&found, kFunction, &config) != cudaSuccess) cudaGetLastError();
      return found > 0 ? found : processors() / S::kCluster;
    }();
    return count;
  }
  // How often all clusters have a tile.
  static int turns(int rows, int columns) { return ceil_div(walk_of<S>(rows, columns).count(), clusters()); }
  static void start(const Product& p, int rows, const Queue& queue) {
    const Walk walk = walk_of<S>(rows, p.w.n);
    const auto kernel = p.gated ? linear_wide_kernel<S, true> : linear_wide_kernel<S, false>;
    allow_shared(kernel, S::kShared);
    const int blocks = S::kCluster * (walk.count() < clusters() ? walk.count() : clusters());
    start_clusters(queue, kernel, dim3(blocks), dim3(S::kCluster), kThreads, S::kShared, p, rows,
                   Pieces(p.w.k, p.w.most_pieces), walk);
    launched("linear in bfloat16, many rows");
  }
};

// A tile of so many columns, and the nanoseconds that it takes for a block of K on an H200: reckoned from
// what tensor cores and shared memory can do, not measured one by one.
struct Choice {
  int columns, down, across, nanoseconds;
  int (*turns)(int rows, int columns);
  void (*start)(const Product&, int, const Queue&);
};
template <int kColumns, bool kWhole, int kDown, int kAcross>
constexpr Choice choice(int nanoseconds) {
  using K = Kernel<Shape<kColumns, kWhole, kDown, kAcross>>;
  return {kColumns, kDown, kAcross, nanoseconds, K::turns, K::start};
}
constexpr Choice kByPieces[] = {choice<192, false, 2, 2>(540), choice<160, false, 2, 2>(460),
                                choice<128, false, 2, 2>(375), choice<112, false, 2, 2>(335)};
constexpr Choice kByOne[] = {choice<256, true, 4, 2>(660), choice<256, true, 2, 2>(720), choice<192, true, 2, 2>(540)};
constexpr int kEnd = 2500;  // nanoseconds that the end of a tile takes

}  // namespace

void linear_wide(const Product& p, int rows, const Queue& queue) {
  // Rows are written whole pieces of 16 bytes at a time.
  if (p.gated ? !p.y.tiles : p.y.width % 4 || p.w.n % 4) return linear_bf16(p, rows, queue, By::split);
  const Pieces k(p.w.k, p.w.most_pieces);
  const Choice* best = nullptr;
  int64_t least = INT64_MAX;
  const auto consider = [&](const Choice& choice) {
    const int64_t cost = choice.turns(rows, p.w.n) * ((int64_t)k.blocks * choice.nanoseconds + kEnd);
    if (cost < least) best = &choice, least = cost;
  };
  if (k.count == 1)
    for (const Choice& choice : kByOne) consider(choice);
  else
    for (const Choice& choice : kByPieces) consider(choice);
  best->start(p, rows, queue);
}

}  // namespace cuda
}  // namespace as
