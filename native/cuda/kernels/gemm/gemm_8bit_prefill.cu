// Prefill GEMMs of 8-bit weights and 8-bit activations: floats (gemm_float8.h), and integers with one group
// (gemm_integer.h). gemm_prefill.cu is the 16-bit counterpart.
//
// A CTA computes one tile at a time: 128 rows of activations and some columns (rows of the weights). Four threads copy
// both operands to shared memory, in steps of 128 along K. They run several steps ahead, and on into the next tile
// while the current one is written. Two warpgroups multiply, each 64 rows with all columns. CTAs with adjacent tiles
// form a cluster: each copies a part of the shared operands for all. A CTA computes split-K parts (tiles.h) one after
// the other and adds them in registers, for wide tiles partly in shared memory. If there are too few tiles for all SMs,
// each CTA of a cluster computes one part, and the CTAs add the parts from each other's shared memory. Clusters share
// the tiles left for the end (tile_scheduler.cuh).
//
// Tiles of up to 192 columns are bound by shared memory bandwidth, 128 bytes per cycle: wider tiles need fewer bytes
// per multiply-add.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cuda/kernels/common/cluster.cuh"
#include "cuda/kernels/gemm/gemm_8bit_prefill.cuh"

namespace as::cuda {
namespace {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Epilogue of a tile whose split-K parts lie in the shared memory of a cluster's CTAs. The last kAdders threads of
// these CTAs take turns over groups of four columns.
template <typename S, bool kGated>
__device__ void add_beside(const GemmArgs& p, int rows, const TilePart& at, uint32_t sums, int k_part, int k_parts,
                           int first_rank) {
  constexpr int kColumns = S::kColumns;
  const int fours = (kGated ? kColumns / 2 : kColumns) / 4, first_column = kGated ? at.column / 2 : at.column;
  const int width = kGated ? p.y.width : p.w.n;
  const int count = min(kRows, rows - at.row) * fours;
  const float* scales = reinterpret_cast<const float*>(p.w.quants.scales);
  // Sums of four columns, starting at `column` of the tile. All split-K parts are loaded before they are added.
  const auto total = [&](int row, int column) {
    const uint32_t from = sums + (row * sums_stride(S::kColumns) + column) * 4;
    float4 of[kMaxSplitK];
#pragma unroll
    for (int i = 0; i < kMaxSplitK; i++)
      if (i < k_parts) of[i] = read_at(from, first_rank + i);
    const float* of_columns = scales + scale_of(at.column + column, 0, 1);
    const float of_row = S::kScaled ? 1 : p.bytes.scales[at.row + row];
    float four[4];
#pragma unroll
    for (int i = 0; i < 4; i++) four[i] = S::kFloats && !S::kScaled ? of_columns[2 * i] : 1;
#pragma unroll
    for (int i = 1; i < kMaxSplitK; i++)
      if (i < k_parts) of[0] = sum_of(of[0], of[i]);
    return make_float4(__fmul_rn(__fmul_rn(of[0].x, four[0]), of_row), __fmul_rn(__fmul_rn(of[0].y, four[1]), of_row),
                       __fmul_rn(__fmul_rn(of[0].z, four[2]), of_row), __fmul_rn(__fmul_rn(of[0].w, four[3]), of_row));
  };
#pragma unroll 2
  for (int i = k_part * S::kAdders + (int)threadIdx.x - (kThreads - S::kAdders); i < count; i += k_parts * S::kAdders) {
    const int row = i / fours, c = i % fours * 4, column = first_column + c;
    if (column >= width) continue;
    if constexpr (!kGated) {
      const Added added = read_added(p, at.row + row, column);
      finish_four(p, at.row + row, column, total(row, c), added);
      continue;
    }
    const int place = c / 8 * 16 + c % 8;
    const float4 gates = total(row, place), ups = total(row, place + 8);
    const auto value = [&](int j, float gate, float up) {
      return column + j < width ? gated(p, column + j, gate, up) : 0;
    };
    put_four(p.y, at.row + row, column, width,
             make_float4(value(0, gates.x, ups.x), value(1, gates.y, ups.y), value(2, gates.z, ups.z),
                         value(3, gates.w, ups.w)));
  }
}
#endif

template <typename S, bool kGated>
__global__ void __launch_bounds__(kThreads, 1)
    gemm_prefill_kernel(const __grid_constant__ GemmArgs p, int rows, SplitK k, const __grid_constant__ Walk walk,
                        bool late, Scratch scratch) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kColumns = S::kColumns, kDown = S::kDown, kAcross = S::kAcross, kSharers = S::kSharers,
                kStages = S::kStages;
  extern __shared__ __align__(1024) char shared[];
  __shared__ uint64_t full[kStages], empty[kStages];
  // Positions of tiles. A copying thread computes them: the divisions would delay the warpgroups that multiply.
  __shared__ TilePart places[kPlaces];
  static_assert(kPlaces >= kStages + 2);  // each tile in flight has at least one stage
  // Order of the CTAs of a cluster: those of one tile are adjacent, then those of one row of tiles.
  const int k_parts = S::kBeside ? k.count : 1, cluster = kSharers * k_parts;
  const int rank = blockIdx.x % cluster, k_part = rank % k_parts, down = rank / k_parts / kAcross,
            across = rank / k_parts % kAcross;
  const TileScheduler<S, true> parts(walk, k.blocks, blockIdx.x / cluster, gridDim.x / cluster, down, across);
  const int count = parts.count();
  // Blocks of K of the split-K parts that this CTA computes.
  const int first_block = k_part * k.length, end_block = S::kBeside ? min(first_block + k.length, k.blocks) : k.blocks;
  uint32_t stages = shared_address(shared);
  asm volatile("" : "+r"(stages));  // keeps it: the compiler would compute it again in every step
  if (!late) let_next_begin();
  if (threadIdx.x == 0) {
    // A stage is full once all copying threads have issued their copies and the data has arrived. It is empty once the
    // warpgroups of all CTAs that share operands have read it.
    for (int i = 0; i < kStages; i++)
      barrier_init(&full[i], kCopiers), barrier_init(&empty[i], kSharers * kGroups * S::kTellers);
    barriers_are_there();
  }
  __syncthreads();
  if (kSharers > 1) cluster_barrier();
  const int group = warpgroup() - 1;
  Pipeline<kStages> ring;
  if (group < 0) {
    if constexpr (S::kShifts) asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    // A thread of each warp issues some copies: a single thread would take longer to issue all than they take.
    if (elected()) {
      constexpr int kCopies = (Own<S>::kCopies + kCopiers - 1) / kCopiers;  // per thread
      const int warp = threadIdx.x / 32;
      uint16_t beside = 0, above = 0;  // CTAs that share rows, and columns
      for (int i = 0; i < kAcross; i++) beside |= 1 << ((down * kAcross + i) * k_parts + k_part);
      for (int i = 0; i < kDown; i++) above |= 1 << ((i * kAcross + across) * k_parts + k_part);
      bool waited = false;
      for (int number = 0; number < count; number++) {
        TilePart at = parts[number];
        if (S::kBeside) at.begin = first_block, at.end = end_block;
        if (warp == 0) places[number % kPlaces] = at;
        const int columns = max(0, min(kColumns, blocks_of(p.w.n) * kBlock - at.column));
        const int there = max(0, min(kRows, blocks_of(rows) * kBlock - at.row)) + columns;
        Copy copies[kCopies];
#pragma unroll
        for (int i = 0; i < kCopies; i++) {
          const int n = warp + i * kCopiers;
          if (n < Own<S>::kCopies) copies[i] = copy_of<S>(p, rows, at, k.blocks, at.begin, down, across, n);
          // Copies of weights start before the previous kernel has computed the activations.
          if (!waited && (copies[i].of_rows || number > 0)) await_previous(), waited = true;
        }
        for (int b = at.begin; b < at.end; b += kStep, ring.next()) {
          const int now = min(kStep, at.end - b);
          uint64_t* barrier = &full[ring.stage];
          barrier_wait(&empty[ring.stage], ring.parity ^ 1);
          // Each copying thread arrives at all stages, even without copies: none gets a full ring ahead or behind.
          if (warp == 0) barrier_expect(barrier, now * there * kByteRow + (S::kScaled ? columns * 4 : 0));
          else barrier_arrive(barrier);
#pragma unroll
          for (int i = 0; i < kCopies; i++) {
            Copy& copy = copies[i];
            if (!copy.bytes || copy.first >= now) continue;
            const uint32_t to = stages + ring.stage * S::kStageBytes + copy.to;
            const int bytes = copy.of_rows ? now * copy.bytes : copy.bytes;
            if (copy.of_rows ? kAcross > 1 : kDown > 1)
              copy_bulk_to(to, copy.from, bytes, barrier, copy.of_rows ? beside : above);
            else copy_bulk(to, copy.from, bytes, barrier);
            copy.from += copy.advance;
          }
        }
      }
      if (late && warp == 0) let_next_begin();
    }
    __syncwarp();
    if (S::kBeside) await_previous();
  } else {
    if constexpr (S::kShifts) asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    await_previous();
    constexpr bool kChained = S::kSums == Sums::chained;
    typename S::Sum d[kColumns / 2];
    float scaled[S::kScaled ? kColumns / 2 : 1];  // with groups, the sums of the split-K part
    const auto& sums = scaled_or<S::kScaled>(scaled, d);
    Totals<S> total(stages + S::kStagesBytes + S::kEndBytes + (threadIdx.x - 128) * 4);
    // A stage is released to all sharing CTAs, by one thread each. If only the CTAs that copy for this one got it, a
    // CTA that waits for nothing (a tile beyond the last) could arrive twice before another arrives once.
    const int teller = threadIdx.x % (128 / S::kTellers);
    const uint32_t empty_there =
        kSharers > 1 && teller < kSharers ? address_at(&empty[0], teller * k_parts + k_part) : shared_address(empty);
    const auto release = [&](int stage) {
      if (teller >= kSharers) return;
      if (kSharers == 1) barrier_arrive(empty_there + stage * 8);
      else barrier_arrive_at(empty_there + stage * 8);
    };
    // Descriptors of the first stage's operands: few instructions may lie between a step's products.
    const uint64_t own_rows = byte_descriptor(stages + group * kStep * kByteBlock),
                   columns = byte_descriptor(stages + S::kRowBytes);
    barrier_wait(&full[0], 0);
    const int begun = places[0].begin, steps = (places[0].end - begun) / kStep;
    const bool apart = !S::kBeside && steps > S::kAhead;
    if (group == 1 && apart) asm volatile("bar.sync 1, 256;" ::: "memory");
    for (int number = 0; number < count; number++) {
      barrier_wait(&full[ring.stage], ring.parity);
      const TilePart at = places[number % kPlaces];
      const bool there = at.row + group * kBlock < rows && at.column < p.w.n;
      const uint32_t end_now = stages + S::kStagesBytes + (group * 2 + number % 2) * S::kEndWords * 4;
      if (S::kEndWords > 0 && there)
        ask_for_end<S>(p, rows, at.row + group * kBlock, at.column, k, first_block, end_now);
      if (!kGated && !S::kBeside && p.adds && there && at.end == k.blocks)
        ask_for_added<kColumns>(p, rows, at.row + group * kBlock, at.column);
      if constexpr (kChained) {
        if (at.begin > 0 && there) {
          go_on_from(scratch, blockIdx.x - cluster, group, 2 + group, total);
        } else {
#pragma unroll
          for (int i = 0; i < kColumns / 2; i++) total.set(i, -0.0f);  // adding x to -0 gives x, even if x is -0
        }
      }
      for (int b = at.begin; b < at.end;) {
        const int first = b, end = min(b + k.length, at.end);
        int last = 0;
        // Multiplies one block of a stage. There must be no branch between wgmma instructions in flight.
        const auto multiply_block = [&](int block, bool adds) {
          const int stage = ring.stage * S::kStageBytes;
          const uint64_t own = further(own_rows, stage), theirs = further(columns, stage);
#pragma unroll
          for (int i = 0; i < 2; i++)
            multiply<kColumns>(d, further(own, block * kByteBlock + i * kStepBytes),
                               further(theirs, block * kColumns * kByteRow + i * kStepBytes), i > 0 || adds);
        };
        if constexpr (S::kScaled) {
          const int row = at.row + group * kBlock + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
          const size_t stride = (size_t)blocks_of(rows) * kBlock;
          const float* from = p.bytes.sums + (b + kStep - 1) * stride + (there ? row : 0);
          float of_rows[2] = {from[0], from[8]};
          forget(d), forget(scaled);
          constexpr bool kBlocks = S::kForm == Form::float_blocks;
          barrier_wait(&full[ring.stage], ring.parity);
#pragma unroll 1
          while (b < end) {
            const int stage = ring.stage;
            const bool tells = group == 0 && b == begun + S::kAhead * kStep && number == 0 && apart;
            // The next step's scales, which may come late.
            if (b + kStep < end) from += kStep * stride;
            const float next[2] = {from[0], from[8]};
            const auto go_on = [&] {
              b += kStep, ring.next();
              if (b < end) barrier_wait(&full[ring.stage], ring.parity);
            };
            const auto tell = [&] {
              release(stage);
              if (tells) asm volatile("bar.arrive 1, 256;" ::: "memory");
            };
            if (there) {
              begin_wgmma();
              multiply_block(0, false), multiply_block(1, true);
              commit_wgmma();
              // All that needs no sums is done while they are computed: a warpgroup has little more time between two
              // steps' products than the other one's products take.
              const GroupScales<kBlocks, kColumns> scales(stages + stage * S::kStageBytes + S::kScalesAt, of_rows);
              go_on();
              wait_wgmma<0>();
              settle(d);
              if constexpr (kBlocks) tell();
              scales.add(d, scaled);
              if constexpr (!kBlocks) tell();
            } else {
              go_on(), tell();
            }
            of_rows[0] = next[0], of_rows[1] = next[1];
          }
          if constexpr (kChained)
#pragma unroll
            for (int i = 0; i < kColumns / 2; i++) total.add(i, scaled[i]);
          continue;
        }
        forget(d);
#pragma unroll 1
        for (; b + 1 < end; b += kStep, ring.next()) {
          barrier_wait(&full[ring.stage], ring.parity);
          if (there) {
            begin_wgmma();
            multiply_block(0, b > first), multiply_block(1, true);
            commit_wgmma();
            wait_wgmma<1>();
          } else {  // one thread releases for all: a warp that still writes the previous tile must not miss a phase
            warps_meet(group);
          }
          if (b > first) release(last);
          last = ring.stage;
          if (group == 0 && b == begun + S::kAhead * kStep && number == 0 && apart)
            asm volatile("bar.arrive 1, 256;" ::: "memory");
        }
        wait_wgmma<0>();
        settle(d);
        if (b > first) release(last);
        if (b < end) {
          barrier_wait(&full[ring.stage], ring.parity);
          begin_wgmma();
          multiply_block(0, b > first);
          commit_wgmma();
          wait_wgmma<0>();
          settle(d);
          release(ring.stage);
          b++, ring.next();
        }
        if constexpr (kChained) {
          if constexpr (S::kFloats) {
#pragma unroll
            for (int i = 0; i < kColumns / 2; i++) total.add(i, d[i]);
          } else {
            if (first == at.begin) await_end(group);
            float of_rows[2];
            read_of_rows<S>(end_now, 1 + first / k.length, of_rows);
#pragma unroll
            for (int c = 0; c < kColumns; c += 16) {
              float part[8];
              sums_of_integers(end_now, c, d + c / 2, of_rows, part);
#pragma unroll
              for (int i = 0; i < 8; i++) total.add(c / 2 + i, part[i]);
            }
          }
        }
      }
      if constexpr (S::kBeside) {
        asm volatile("bar.sync 1, 256;" ::: "memory");  // all warps have read the stages
        const int lane = threadIdx.x % 32, row = group * kBlock + threadIdx.x % 128 / 32 * 16 + lane / 4;
        float* place = reinterpret_cast<float*>(shared) + row * sums_stride(kColumns) + lane % 4 * 2;
        float of_rows[2];
        if constexpr (!S::kFloats) await_end(group), read_of_rows<S>(end_now, 1, of_rows);
#pragma unroll
        for (int c = 0; c < kColumns; c += 16) {
          float part[8];
          if constexpr (S::kFloats) {
#pragma unroll
            for (int i = 0; i < 8; i++) part[i] = sums[c / 2 + i];
          } else {
            sums_of_integers(end_now, c, d + c / 2, of_rows, part);
          }
#pragma unroll
          for (int i = 0; i < 8; i += 4) {
            float* to = place + c + i * 2;
            *reinterpret_cast<float2*>(to) = make_float2(part[i], part[i + 1]);
            *reinterpret_cast<float2*>(to + 8 * sums_stride(kColumns)) = make_float2(part[i + 2], part[i + 3]);
          }
        }
      } else {
        if (!there) continue;
        if constexpr (kChained) {
          if (places[afresh(number) % kPlaces].end < k.blocks) {
            hand_over(scratch, group, 2 + group, total);
            continue;
          }
        }
        constexpr int kAsked = kChained ? kColumns == 128 ? 8 : 6 : 4;  // as many as registers allow
        const TilePart end = places[afresh(number) % kPlaces];
        const int first_row = end.row + group * kBlock;
        if constexpr (S::kFloats || !kChained) await_end(group);
        const auto& all = of_parts<kChained>(total, sums);
        const Results<S, std::decay_t<decltype(all)>> results(all, end_now);
        if constexpr (!kGated)
          epilogue_rows<kColumns, kAsked, true>(p, rows, first_row, end.column, results, end_now + kColumns * 4);
        else if (p.bias) write_gated<true, kColumns>(p, rows, first_row, end.column / 2, results);
        else write_gated<false, kColumns>(p, rows, first_row, end.column / 2, results);
      }
    }
  }
  __syncwarp();
  if constexpr (S::kBeside) {
    cluster_barrier();
    if (S::kAdders == kThreads || group >= 0)
      add_beside<S, kGated>(p, rows, parts[0], stages, k_part, k_parts, rank - k_part);
  }
  // Other CTAs may still arrive at this one's barriers, or read its sums.
  if (kSharers > 1 || S::kBeside) cluster_barrier();
#endif
}

bool tells_late[3] = {false, false, true};

template <typename S>
struct Kernel {
  // How many clusters run at once. k_parts: split-K parts that a cluster computes in parallel.
  static int clusters(int k_parts) {
    static int counts[kMaxSplitK + 1] = {};
    int& count = counts[k_parts];
    if (!count) count = clusters_at_once(gemm_prefill_kernel<S, false>, S::kSharers * k_parts, kThreads, S::kShared);
    return count;
  }
  static int k_parts_of(const Matrix& w) { return S::kBeside ? SplitK(w.k, w.max_split_k).count : 1; }
  // nanoseconds: of one step. Clusters share tiles only if these have several split-K parts.
  static int64_t plan(const Matrix& w, int rows, int nanoseconds, Walk* walk) {
    const SplitK k(w.k, w.max_split_k);
    *walk = walk_of<S>(rows, k, w.n);
    const int most = clusters(k_parts_of(w));
    const auto steps = [&](int blocks) { return (int64_t)ceil_div(blocks, kStep) * nanoseconds; };
    return plan_walk(*walk, k.blocks, most,
                     {steps(S::kBeside ? k.length : k.blocks) + S::kEnd, steps(walk->unit), S::kEnd},
                     S::kSums == Sums::chained && most * S::kSharers <= kScratchCtas, false);
  }
  static int64_t cost(const Matrix& w, int rows, int nanoseconds) {
    Walk walk;
    return plan(w, rows, nanoseconds, &walk);
  }
  static void start(const GemmArgs& p, int rows, int nanoseconds, const Queue& queue) {
    Walk walk;
    plan(p.w, rows, nanoseconds, &walk);
    const int k_parts = k_parts_of(p.w), cluster = S::kSharers * k_parts;
    const auto kernel = p.gated ? gemm_prefill_kernel<S, true> : gemm_prefill_kernel<S, false>;
    const int count = S::kBeside ? walk.count() : std::min(walk.count(), clusters(k_parts));
    start_clusters(queue, kernel, dim3(count * cluster), dim3(cluster), kThreads, S::kShared, p, rows,
                   SplitK(p.w.k, p.w.max_split_k), walk, tells_late[(int)S::kSums], queue.scratch);
  }
};

// Nanoseconds of a step on an H200. Of float blocks they are measured (docs/decisions/cuda-gemms.md); the others are
// estimated from cycles of 0.67 ns, the clock that the power limit allows: of tensor cores, of shared memory (128 bytes
// per cycle), and of the L2 cache (38 bytes per cycle for each SM).
template <Form kForm, int kColumns, Sums kSums, int kDown, int kAcross>
constexpr Choice choice() {
  using S = Shape<kForm, kColumns, kSums, kDown, kAcross>;
  constexpr int kOwn = kStep * kGroups * kByteBlock * (kColumns > 256 ? 2 : 1), kTheirs = kStep * kColumns * kByteRow;
  constexpr int kCycles[] = {kStep * 2 * kColumns, (kOwn + kGroups * kTheirs + S::kStageBytes) / 128,
                             (S::kRowBytes / kAcross + kTheirs / kDown) / 38};
  constexpr int kMost = std::max({kCycles[0], kCycles[1], kCycles[2]});
  constexpr int kOfBlocks = kColumns == 64 ? 394 : kColumns == 128 ? 452 : 610;
  constexpr int kNanoseconds = kForm == Form::float_blocks ? kOfBlocks : kMost * 67 / 100;
  return {kColumns, kSums, kDown, kAcross, kNanoseconds, Kernel<S>::cost, Kernel<S>::start};
}
constexpr Choice kOfFloats[] = {
    choice<Form::floats, 256, Sums::whole, 2, 1>(),   choice<Form::floats, 192, Sums::whole, 2, 1>(),
    choice<Form::floats, 288, Sums::whole, 1, 1>(),   choice<Form::floats, 224, Sums::chained, 2, 1>(),
    choice<Form::floats, 192, Sums::chained, 2, 1>(), choice<Form::floats, 128, Sums::chained, 2, 1>(),
    choice<Form::floats, 144, Sums::beside, 1, 1>(),  choice<Form::floats, 160, Sums::beside, 1, 1>(),
    choice<Form::floats, 144, Sums::beside, 2, 1>(),  choice<Form::floats, 224, Sums::whole, 2, 1>(),
    choice<Form::floats, 224, Sums::whole, 1, 1>(),   choice<Form::floats, 192, Sums::beside, 1, 1>(),
    choice<Form::floats, 160, Sums::chained, 2, 1>(), choice<Form::floats, 80, Sums::chained, 2, 1>(),
    choice<Form::floats, 64, Sums::chained, 1, 2>(),
};
// Sums of products and of a split-K part take registers, so that tiles are narrower.
constexpr Choice kOfFloatGroups[] = {
    choice<Form::float_groups, 192, Sums::whole, 2, 1>(),
    choice<Form::float_groups, 128, Sums::whole, 2, 1>(),
    choice<Form::float_groups, 128, Sums::chained, 2, 1>(),
    choice<Form::float_groups, 128, Sums::beside, 1, 1>(),
};
constexpr Choice kOfFloatBlocks[] = {
    choice<Form::float_blocks, 192, Sums::whole, 2, 1>(),   choice<Form::float_blocks, 128, Sums::whole, 2, 1>(),
    choice<Form::float_blocks, 192, Sums::chained, 2, 1>(), choice<Form::float_blocks, 128, Sums::chained, 2, 1>(),
    choice<Form::float_blocks, 64, Sums::chained, 2, 1>(),  choice<Form::float_blocks, 192, Sums::beside, 1, 1>(),
    choice<Form::float_blocks, 128, Sums::beside, 1, 1>(),
};
constexpr Choice kOfIntegers[] = {
    choice<Form::integers, 256, Sums::whole, 2, 1>(),   choice<Form::integers, 192, Sums::whole, 2, 1>(),
    choice<Form::integers, 224, Sums::chained, 2, 1>(), choice<Form::integers, 192, Sums::chained, 2, 1>(),
    choice<Form::integers, 128, Sums::chained, 2, 1>(), choice<Form::integers, 144, Sums::beside, 1, 1>(),
    choice<Form::integers, 192, Sums::beside, 1, 1>(),
};

}  // namespace

void gemm_float8_prefill(const GemmArgs& p, int rows, const Queue& queue) {
  if (p.w.quants.in_blocks) start_best(kOfFloatBlocks, p, rows, queue);
  else if (p.w.has_float_groups()) start_best(kOfFloatGroups, p, rows, queue);
  else start_best(kOfFloats, p, rows, queue);
}
void gemm_integer_prefill(const GemmArgs& p, int rows, const Queue& queue) { start_best(kOfIntegers, p, rows, queue); }

}  // namespace as::cuda
