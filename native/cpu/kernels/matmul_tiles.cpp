// y = x w^T + bias on AMX tiles: bfloat16 weights and activations, and integers per channel; also silu(gate) * up of a
// matrix that holds both. (Integers in groups: matmul_tile_groups.cpp.)
//
// The 16-bit activations of int8 and int4 are two planes of int8 (matmul_integer.cpp). Their second tile of rows is the
// low plane of the first one.
//
// bfloat16 and integers have the same sizes in bytes. A step is 64 bytes of a row of activations (32 bfloat16 or 64
// int8) against 16 x 128 bytes of a panel: two tiles of 16 features, whose lanes hold the 2 or 4 k that one product
// combines.
//
// Recipe, for any number of rows: steps in ascending order, each one tile product. A row's result does not depend on
// the other rows of its tile. With bfloat16 one row uses tiles, too, because no other instruction sums in the same
// order. Dividing K only spills the fp32 (int32) accumulators, without rounding.
//
// A 2 x 2 block of accumulators loads 4 tiles (64 lines) for 4 products (64 cycles). The second-level cache delivers
// 0.73 lines a cycle, so products with all operands from there run at 0.67 of their peak. Spilling accumulators costs
// 120 cycles (220 to the second level), so K stays undivided where possible. The first kNear steps of the operand that
// the next blocks reuse stay in the first-level cache. All other loads bypass it, which gives 0.84 to 0.87 of the peak.
// The epilogue runs row by row between the products of the following block.
//
// Traffic with the third-level cache is minimal. With K undivided, the rows stay in the second level and each panel is
// read once. With K split, a split-K part of some rows and of a group of panels stays there.
#include "cpu/kernels/tables.h"

#if defined(AS_ISA_AMX)
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "cpu/kernels/amx.h"
#include "cpu/kernels/finish_sums.h"
#include "cpu/kernels/tile.h"
#include "cpu/simd.h"

namespace as {
namespace AS_ISA {
namespace {

constexpr int kStepBytes = 64;                // of a row of activations
constexpr int kPanelStepBytes = 16 * NR * 4;  // of a panel
constexpr int kPair = 2 * kAmxRows;           // rows of a block of accumulators
constexpr int kNear = 12;                     // steps: 24 KB of one operand, half of the first level,
constexpr int kNearBlocks = 6;                // and if sums stay there, too
constexpr int kStay = 384;  // rows, or planes of rows, that stay in the second level (shared by two threads of a core),
constexpr size_t kStayBytes = 1 << 20;       // at most
constexpr int kWhole = 96, kCut = 32;        // steps up to which K is undivided, and of a split-K part otherwise
constexpr int kCutRows = 256;                // rows of a block, if K is split
constexpr size_t kGroupBytes = 320 << 10;    // of panels that a pass of the rows uses: a third of a thread's half
constexpr size_t kWidenedBytes = 768 << 10;  // of panels of 4-bit weights, widened
constexpr int kPrefetch = 4096;              // bytes ahead, if weights come from memory
static_assert(NR == 2 * kAmxRows);

// The number of split-K parts, the longest of them, and how many panels' parts make a group.
constexpr int cuts_of(int steps) { return steps <= kWhole ? 1 : (steps + kCut - 1) / kCut; }
constexpr int longest_of(int steps) { return (steps + cuts_of(steps) - 1) / cuts_of(steps); }
constexpr int panels_of_group(int steps) { return (int)(kGroupBytes / ((size_t)longest_of(steps) * kPanelStepBytes)); }
// The maximum over all K. Parts have a minimum length that grows with their number, so a few numbers cover all.
constexpr int max_panels() {
  int most = 0;
  for (int steps = kWhole + 1; steps <= 8 * kCut; steps++) most = std::max(most, panels_of_group(steps));
  return most;
}
constexpr int kGroup = max_panels();

struct TileBFloat {
  static constexpr int kStep = 32;  // k of a step
  static constexpr int kPlanes = 1;
  static constexpr bool kByBlocks = false;  // Gemm::by_blocks()
  template <int C, int A, int B>
  static AS_INLINE void dot() {
    tile_dot_bf16<C, A, B>();
  }
};
template <int Planes>
struct TileBytes {
  static constexpr int kStep = 64;
  static constexpr int kPlanes = Planes;
  static constexpr bool kByBlocks = Planes == 1;
  template <int C, int A, int B>
  static AS_INLINE void dot() {
    tile_dot_s8u8<C, A, B>();
  }
};

// Tiles 0 to 3 accumulate rows [0, 16) and [16, 32), tiles 4 and 5 hold their activations, tiles 6 and 7 weights.
class Tiles {
 public:
  ~Tiles() { tile_release(); }
  void configure(int rows, int planes = 1) {
    if (rows == rows_) return;
    TileConfig config;
    const int first = std::min(rows, kAmxRows), second = planes == 2 ? rows : rows - first;
    const int counts[8] = {first, first, second, second, first, second, kAmxRows, kAmxRows};
    for (int t = 0; t < 8; t++) config.rows[t] = (uint8_t)counts[t], config.row_bytes[t] = counts[t] ? 64 : 0;
    tile_configure(config);
    rows_ = rows;
  }

 private:
  int rows_ = 0;
};

// What a block prefetches in each step: `lines` cache lines of another part of a panel, from line `first` of the step
// on, and one line of each of `rows` rows of the following activations.
struct Ahead {
  const char* panel = nullptr;
  int first = 0, lines = 0;
  const char* activations = nullptr;
  int rows = 0;
};

// c [R tiles of rows][32 columns of 4 bytes] = (load ? c : 0) + `steps` steps. second: bytes from the first tile of
// activations to the second. kPanelStays: the weights are used again soon, otherwise the activations; the first `Near`
// steps of these stay in the first-level cache. Calls between() once a step.
template <typename F, int R, bool kPanelStays, int Near, typename Between>
AS_INLINE void block(const char* a, int64_t lda, int64_t second, const char* b, int steps, char* c, bool load,
                     const Ahead& ahead, Between&& between) {
  constexpr int64_t ldc = NR * 4;
  if (load) {
    tile_load<0>(c, ldc), tile_load<1>(c + 64, ldc);
    if (R == 2) tile_load<2>(c + kAmxRows * ldc, ldc), tile_load<3>(c + kAmxRows * ldc + 64, ldc);
  } else {
    tile_zero<0>(), tile_zero<1>();
    if (R == 2) tile_zero<2>(), tile_zero<3>();
  }
  const auto load_weights = [&](auto far, auto tile, int s) __attribute__((always_inline)) {
    const char* bs = b + (int64_t)s * kPanelStepBytes + (tile - 6) * 64;
    if (far || !kPanelStays) tile_load_far<tile>(bs, NR * 4);
    else tile_load<tile>(bs, NR * 4);
  };
  const auto load_rows = [&](auto far, auto tile, int s) __attribute__((always_inline)) {
    const char* as = a + (int64_t)s * kStepBytes + (tile - 4) * second;
    if (far || kPanelStays) tile_load_far<tile>(as, lda);
    else tile_load<tile>(as, lda);
  };
  constexpr std::integral_constant<int, 4> kRows0;
  constexpr std::integral_constant<int, 5> kRows1;
  constexpr std::integral_constant<int, 6> kWeights0;
  constexpr std::integral_constant<int, 7> kWeights1;
  // An operand is cleared after its last use (amx.h).
  auto range = [&](auto far, int begin, int end) __attribute__((always_inline)) {
    for (int s = begin; s < end; s++) {
      load_rows(far, kRows0, s), load_weights(far, kWeights0, s);
      F::template dot<0, 4, 6>();
      load_weights(far, kWeights1, s);
      F::template dot<1, 4, 7>();
      tile_zero<4>();
      if (R == 2) {
        load_rows(far, kRows1, s);
        F::template dot<2, 5, 6>();
      }
      tile_zero<6>();
      if (R == 2) {
        F::template dot<3, 5, 7>();
        tile_zero<5>();
      }
      tile_zero<7>();
      for (int i = 0; i < ahead.lines; i++)
        __builtin_prefetch(ahead.panel + (int64_t)s * kPanelStepBytes + (ahead.first + i) * 64, 0, 2);
      for (int i = 0; i < ahead.rows; i++)
        __builtin_prefetch(ahead.activations + i * lda + (int64_t)s * kStepBytes, 0, 2);
      between();
    }
  };
  range(std::false_type{}, 0, std::min(Near, steps));
  range(std::true_type{}, std::min(Near, steps), steps);
  tile_store<0>(c, ldc), tile_store<1>(c + 64, ldc);
  if (R == 2) tile_store<2>(c + kAmxRows * ldc, ldc), tile_store<3>(c + kAmxRows * ldc + 64, ldc);
}

// Few rows: weights are read once, from memory.
template <typename F, int R>
void stream(const char* a, int64_t lda, int64_t second, const char* b, int steps, char* c) {
  constexpr int64_t ldc = NR * 4;
  tile_zero<0>(), tile_zero<1>();
  if (R == 2) tile_zero<2>(), tile_zero<3>();
  for (int s = 0; s < steps; s++, a += kStepBytes, b += kPanelStepBytes) {
    for (int line = 0; line < kPanelStepBytes; line += 64) __builtin_prefetch(b + kPrefetch + line);
    tile_load<6>(b, NR * 4);
    tile_load<4>(a, lda);
    tile_load<7>(b + 64, NR * 4);
    F::template dot<0, 4, 6>();
    F::template dot<1, 4, 7>();
    if (R == 2) {
      tile_load<5>(a + second, lda);
      F::template dot<2, 5, 6>();
      F::template dot<3, 5, 7>();
      tile_zero<5>();
    }
    tile_zero<4>(), tile_zero<6>(), tile_zero<7>();
  }
  tile_store<0>(c, ldc), tile_store<1>(c + 64, ldc);
  if (R == 2) tile_store<2>(c + kAmxRows * ldc, ldc), tile_store<3>(c + kAmxRows * ldc + 64, ldc);
}

// Rows of accumulators: kCutRows for each panel of a group, or kStay tile rows (or a block) for two pairs of panels.
constexpr int kKept = std::max(kGroup * kCutRows, 4 * std::max(kStay, kPair));
alignas(64) thread_local float kept_sums[(size_t)kKept * NR];

// How many rows ahead the output is prefetched. Each row is in other cache lines. A store that waits for its line
// occupies one of the 16 miss buffers that tile loads need. With 4 bytes an output and K = 896, this took half of the
// time with one thread, and a fifth with 16 threads.
constexpr int kRowsAhead = 16;

// Finished sums that wait for their epilogue: `rows` rows from `row` on, of one panel or a pair of panels.
template <int Parts, typename Finish>
class Waiting {
 public:
  // steps: the fewest of a block. All sums are processed before a block ends, so its results may overwrite them.
  Waiting(Finish& finish, int steps) : finish_(finish), total_(steps) {}
  // Rows [first, end) of these sums; `row` is the index of the first one.
  void put(int unit, int row, int first, int end, float* const (&sums)[Parts]) {
    flush();
    finish_.begin(unit);
    row_ = row + first, rows_ = end - first, done_ = credit_ = 0;
    for (int i = 0; i < Parts; i++) sums_[i] = sums[i] + first * NR;
  }
  // Called in each step of the following block, over whose steps the rows are spread.
  AS_INLINE void step() {
    for (credit_ += rows_; credit_ >= total_; credit_ -= total_)
      if (done_ < rows_) next();
  }
  void flush() {
    while (done_ < rows_) next();
  }

 private:
  AS_INLINE void next() {
    finish_.fetch(row_ + done_ + kRowsAhead);
    if constexpr (Parts == 1) finish_.row(row_ + done_, sums_[0] + done_ * NR);
    else finish_.row(row_ + done_, sums_[0] + done_ * NR, sums_[1] + done_ * NR);
    done_++;
  }
  Finish& finish_;
  const int total_;
  int row_ = 0, rows_ = 0, done_ = 0, credit_ = 0;
  float* sums_[Parts];
};

// The rows and panels of one GEMM, in blocks of up to 32 tile rows.
template <typename F, int Parts, typename Weights, typename Finish>
class Gemm {
 public:
  static constexpr int kHeight = kPair / F::kPlanes;  // rows of a block

  // Units [u0, u1): panel u or, with Parts = 2, panels u and u + w.panels() / 2. weights(p): the weights of panel p.
  // Calls finish.begin(unit), then finish.row(row, sums...) for each row.
  Gemm(const Packed& w, const Activations& a, const ConvertedLayout& at, int m, int u0, int u1, Weights& weights,
       Finish& finish)
      : a_(a),
        values_at_(at.values_at),
        second_(F::kPlanes == 2 ? (int64_t)at.plane_bytes : kAmxRows * (int64_t)a.stride),
        m_(m),
        u0_(u0),
        u1_(u1),
        half_(w.panels() / 2),
        steps_((w.k + F::kStep - 1) / F::kStep),
        parts_of_k_(cuts_of(steps_)),
        weights_(weights),
        waiting_(finish, steps_ / parts_of_k_) {}

  void run() {
    if (parts_of_k_ > 1) split_k();
    else if constexpr (F::kByBlocks) by_blocks();
    else rows_stay();
    waiting_.flush();
  }

 private:
  const char* panel(int u, int part, int step) { return weights_(u + part * half_) + (size_t)step * kPanelStepBytes; }

  template <bool kPanelStays, int Near = kNear>
  AS_INLINE void multiply(int r, const char* b, int begin, int end, float* c, const Ahead& ahead) {
    const int rows = std::min(kHeight, m_ - r);
    tiles_.configure(rows, F::kPlanes);
    const char* x = a_.converted + r * a_.stride + values_at_ + (size_t)begin * kStepBytes;
    auto between = [&]() __attribute__((always_inline)) { waiting_.step(); };
    if (F::kPlanes == 2 || rows > kAmxRows)
      block<F, 2, kPanelStays, Near>(x, (int64_t)a_.stride, second_, b, end - begin, (char*)c, begin > 0, ahead,
                                     between);
    else
      block<F, 1, kPanelStays, Near>(x, (int64_t)a_.stride, second_, b, end - begin, (char*)c, begin > 0, ahead,
                                     between);
  }

  // Pass `pass` of `passes` prefetches its share of the next part of a panel.
  static Ahead part_of(const char* next, int pass, int passes) {
    Ahead ahead;
    constexpr int kLines = kPanelStepBytes / 64;
    ahead.panel = next, ahead.lines = (kLines + passes - 1) / passes;
    ahead.first = std::min(pass * ahead.lines, kLines - ahead.lines);
    return ahead;
  }

  // As many rows as stay in the second level: whole blocks, in parts of equal height.
  int height_that_stays() const {
    const int stay = std::min<int>(kStay / F::kPlanes, kStayBytes / a_.stride),
              most = std::max(kHeight, stay / kHeight * kHeight);
    const int blocks = (m_ + most - 1) / most;
    return ((m_ + blocks - 1) / blocks + kHeight - 1) / kHeight * kHeight;
  }

  // K undivided. Multiplies each row block with both panels of a pair. Meanwhile the epilogue of the previous block
  // runs, whose sums are still in the first level. (Where the epilogue is a smaller part of the time, rows_stay() is
  // faster.)
  void by_blocks() {
    const int height = height_that_stays();
    for (int m0 = 0; m0 < m_; m0 += height) {
      const int m1 = std::min(m_, m0 + height), passes = (m1 - m0 + kHeight - 1) / kHeight;
      int turn = 0, unit = -1, row = 0, rows = 0;  // turn: whose sums are computed; others: of the previous block
      auto put = [&](int part, int parts) {
        if (unit < 0) return;
        float* sums[Parts];
        for (int i = 0; i < Parts; i++) sums[i] = kept_sums + (size_t)((turn ^ 1) * Parts + i) * kPair * NR;
        waiting_.put(unit, row, rows * part / parts, rows * (part + 1) / parts, sums);
      };
      for (int u = u0_; u < u1_; u++)
        for (int pass = 0; pass < passes; pass++) {
          for (int part = 0; part < Parts; part++) {
            const char* b = panel(u, part, 0);
            Ahead ahead;
            if (u == u0_ && pass == 0) ahead.panel = b + kPrefetch, ahead.lines = kPanelStepBytes / 64;
            else if (u + 1 < u1_) ahead = part_of(panel(u + 1, part, 0), pass, passes);
            put(part, Parts);
            multiply<true, kNearBlocks>(m0 + pass * kHeight, b, 0, steps_,
                                        kept_sums + (size_t)(turn * Parts + part) * kPair * NR, ahead);
          }
          turn ^= 1, unit = u, row = m0 + pass * kHeight, rows = std::min(kHeight, m1 - row);
        }
      put(0, 1);
      waiting_.flush();
    }
  }

  // K undivided. Multiplies all row blocks with the first panel of a pair, then with the second. Meanwhile the epilogue
  // of the previous pair runs, for half of each row block with either panel.
  void rows_stay() {
    const int height = height_that_stays();
    for (int m0 = 0; m0 < m_; m0 += height) {
      const int m1 = std::min(m_, m0 + height), passes = (m1 - m0 + kHeight - 1) / kHeight;
      auto put = [&](int u, int pass, int part, int parts) {
        float* sums[Parts];
        for (int i = 0; i < Parts; i++)
          sums[i] = kept_sums + (size_t)(((u & 1) * Parts + i) * passes + pass) * kPair * NR;
        const int row = m0 + pass * kHeight, rows = std::min(kHeight, m1 - row);
        waiting_.put(u, row, rows * part / parts, rows * (part + 1) / parts, sums);
      };
      for (int u = u0_; u < u1_; u++)
        for (int part = 0; part < Parts; part++) {
          const char* b = panel(u, part, 0);
          const bool last = part + 1 == Parts, end = last && u + 1 == u1_;
          const char* next = !last ? panel(u, part + 1, 0) : panel(end ? u0_ : u + 1, 0, 0);
          for (int pass = 0; pass < passes; pass++) {
            Ahead ahead;
            if (u == u0_ && part == 0 && pass == 0) ahead.panel = b + kPrefetch, ahead.lines = kPanelStepBytes / 64;
            else if (!end) ahead = part_of(next, pass, passes);
            if (u > u0_) put(u - 1, pass, part, Parts);
            multiply<true>(m0 + pass * kHeight, b, 0, steps_,
                           kept_sums + (size_t)(((u & 1) * Parts + part) * passes + pass) * kPair * NR, ahead);
          }
        }
      for (int pass = 0; pass < passes; pass++) put(u1_ - 1, pass, 0, 1);
      waiting_.flush();
    }
  }

  // K split: keeps the accumulators of some rows and a group of panels.
  void split_k() {
    static_assert(Parts <= kGroup && kCutRows % kPair == 0);
    const int most = std::max(1, panels_of_group(steps_) / Parts);
    const int groups = (u1_ - u0_ + most - 1) / most, height = std::min(m_, kCutRows / F::kPlanes);
    for (int m0 = 0; m0 < m_; m0 += height) {
      const int m1 = std::min(m_, m0 + height), passes = (m1 - m0 + kHeight - 1) / kHeight;
      for (int g = 0; g < groups; g++) {
        const int g0 = u0_ + (int)((int64_t)(u1_ - u0_) * g / groups),
                  g1 = u0_ + (int)((int64_t)(u1_ - u0_) * (g + 1) / groups), units = g1 - g0;
        for (int i = 0; i < parts_of_k_; i++) {
          const int begin = (int)((int64_t)steps_ * i / parts_of_k_),
                    end = (int)((int64_t)steps_ * (i + 1) / parts_of_k_);
          const bool over = i + 1 == parts_of_k_, more = !over || g + 1 < groups || m1 < m_;
          const int next_begin = over ? 0 : end, next_u = over ? (g + 1 < groups ? g1 : u0_) : g0;
          for (int r = m0, pass = 0; r < m1; r += kHeight, pass++) {
            const int next_rows = r + kHeight < m1 ? std::min(kHeight, m1 - r - kHeight) : 0;
            const char* x = a_.converted + r * a_.stride + values_at_ + (size_t)begin * kStepBytes;
            for (int u = g0; u < g1; u++) {
              float* sums[Parts];
              for (int part = 0; part < Parts; part++) {
                const int place = (u - g0) * Parts + part;
                sums[part] = kept_sums + ((size_t)place * passes + pass) * kPair * NR;
                const char* b = panel(u, part, begin);
                Ahead ahead;
                if (m0 == 0 && g == 0 && i == 0 && pass == 0)
                  ahead.panel = b + kPrefetch, ahead.lines = kPanelStepBytes / 64;
                else if (more)
                  ahead = part_of(panel(std::min(next_u + u - g0, u1_ - 1), part, next_begin), pass, passes);
                const int first = next_rows * place / (units * Parts);
                ahead.activations = x + (kHeight + first) * a_.stride,
                ahead.rows = next_rows * (place + 1) / (units * Parts) - first;
                multiply<false>(r, b, begin, end, sums[part], ahead);
              }
              waiting_.flush();
              if (over) waiting_.put(u, r, 0, std::min(kHeight, m_ - r), sums);
            }
          }
        }
      }
    }
  }

  const Activations& a_;
  const size_t values_at_;
  const int64_t second_;
  const int m_, u0_, u1_, half_, steps_, parts_of_k_;
  Weights& weights_;
  Waiting<Parts, Finish> waiting_;
  Tiles tiles_;
};

template <typename F, int Parts, typename Weights, typename Finish>
void multiply(const Packed& w, const Activations& a, const ConvertedLayout& at, int m, int u0, int u1,
              Weights&& weights, Finish&& finish) {
  Gemm<F, Parts, std::remove_reference_t<Weights>, std::remove_reference_t<Finish>>(w, a, at, m, u0, u1, weights,
                                                                                    finish)
      .run();
}

// At most the rows of one block.
template <typename F, typename Weights, typename Finish>
void multiply_few(const Packed& w, const Activations& a, const ConvertedLayout& at, int m, int p0, int p1,
                  Weights&& weights, Finish&& finish) {
  Tiles tiles;
  tiles.configure(m, F::kPlanes);
  alignas(64) float sums[kPair * NR];
  const int steps = (w.k + F::kStep - 1) / F::kStep;
  const char* x = a.converted + at.values_at;
  for (int p = p0; p < p1; p++) {
    if (F::kPlanes == 2) stream<F, 2>(x, (int64_t)a.stride, (int64_t)at.plane_bytes, weights(p), steps, (char*)sums);
    else if (m > kAmxRows)
      stream<F, 2>(x, (int64_t)a.stride, kAmxRows * (int64_t)a.stride, weights(p), steps, (char*)sums);
    else stream<F, 1>(x, (int64_t)a.stride, 0, weights(p), steps, (char*)sums);
    finish.begin(p);
    for (int r = 0; r < m; r++) finish.row(r, sums + r * NR);
  }
}

template <typename F, typename Row, typename Weights>
void multiply_plain(const Packed& w, const Activations& a, const ConvertedLayout& at, Row row, float* y, int ldy, int m,
                    int p0, int p1, Weights&& weights) {
  Plain<Row> finish{row, {w, y, ldy}};
  if (m <= kPair / F::kPlanes) multiply_few<F>(w, a, at, m, p0, p1, weights, finish);
  else multiply<F, 1>(w, a, at, m, p0, p1, weights, finish);
}

// Widens a panel of 4-bit weights in one group to bytes.
void widen(const char* w, int steps, char* out) {
  const __m512i mask = _mm512_set1_epi8(15);
  for (int i = 0; i < steps * 8 * NV; i++, w += 64) {  // W lanes of eight k
    const __m512i raw = _mm512_loadu_si512(w);
    prefetch_far(w + kPrefetch);
    char* to = out + (i / NV) * (2 * NR * 4) + (i % NV) * 64;
    _mm512_store_si512(to, _mm512_and_si512(raw, mask));
    _mm512_store_si512(to + NR * 4, _mm512_and_si512(_mm512_srli_epi16(raw, 4), mask));
  }
}

alignas(64) thread_local char widened[kWidenedBytes];
size_t widened_bytes(const Packed& w) { return (size_t)((w.k + 63) / 64) * kPanelStepBytes; }
// Whether 4-bit weights in one group are widened for m rows. VNNI reads them as stored, and is faster with fewer rows.
// Two planes double the products, which costs VNNI more, so tiles pay off earlier.
bool widens(const Packed& w, int m, int parts) {
  return m >= (w.planes == 2 ? 16 : 24) && widened_bytes(w) * parts <= kWidenedBytes;
}

// Calls multiply(u0, u1, weights) for units [u0, u1) of panels with their bytes: the stored ones or, of 4-bit weights,
// widened ones of as many units as stay in the second-level cache. parts: panels of a unit, w.panels() / 2 apart.
template <typename Multiply>
void with_bytes(const Packed& w, int u0, int u1, int parts, Multiply&& multiply) {
  if (bits_of(w.format) == 8) return multiply(u0, u1, [&](int p) { return w.weights(p, 0); });
  const int steps = (w.k + 63) / 64, half = w.panels() / 2;
  const size_t bytes = widened_bytes(w);
  const int most = (int)(kWidenedBytes / (bytes * parts));
  for (int first = u0; first < u1; first += most) {
    const int end = std::min(u1, first + most);
    auto place = [&](int u, int part) { return widened + ((size_t)(u - first) * parts + part) * bytes; };
    for (int u = first; u < end; u++)
      for (int part = 0; part < parts; part++) widen(w.weights(u + part * half, 0), steps, place(u, part));
    multiply(first, end, [&](int p) { return parts == 2 && p >= half ? place(p - half, 1) : place(p, 0); });
  }
}

// Calls work with w.planes as a constant.
template <typename Work>
AS_INLINE void with_planes(const Packed& w, Work&& work) {
  w.planes == 2 ? work(std::integral_constant<int, 2>{}) : work(std::integral_constant<int, 1>{});
}

}  // namespace

bool matmul_tiles(const Packed& w, const Activations& a, const float* bias, float* y, int ldy, int m, int p0, int p1) {
  constexpr int kFew = 8;  // with fewer rows, vector products keep up with memory
  if (w.pairs) {
    multiply_plain<TileBFloat>(w, a, {}, BFloatRow{w, bias, {}}, y, ldy, m, p0, p1,
                               [&](int p) { return w.data + p * w.panel_bytes; });
    return true;
  }
  if (!w.planes || m < kFew) return false;
  // With groups, a tile's sums are added to the totals every few steps, so tiles pay off later.
  if (w.groups() > 1) return matmul_tile_groups(w, a, bias, y, ldy, m, p0, p1);
  if (w.format == Format::e2m1a16) return false;
  if (bits_of(w.format) == 4 && !widens(w, m, 1)) return false;
  const ConvertedLayout at = converted_layout(w);
  with_planes(w, [&](auto planes) {
    with_bytes(w, p0, p1, 1, [&](int begin, int end, auto&& weights) {
      multiply_plain<TileBytes<planes>>(w, a, at, ChannelRow<planes>{w, bias, a, at}, y, ldy, m, begin, end, weights);
    });
  });
  return true;
}

bool matmul_gated_tiles(const Packed& w, const Activations& a, const float* bias, const GatedOutput& out, int m, int p0,
                        int p1) {
  const int half = w.panels() / 2;
  if (w.pairs) {
    const BFloatRow row{w, bias, {}};
    multiply<TileBFloat, 2>(
        w, a, {}, m, p0, p1, [&](int p) { return w.data + p * w.panel_bytes; }, Gated<BFloatRow>{row, row, out, half});
    return true;
  }
  if (!w.planes) return false;
  if (w.groups() > 1) return matmul_gated_tile_groups(w, a, bias, out, m, p0, p1);
  if (w.format == Format::e2m1a16) return false;
  if (bits_of(w.format) == 4 && !widens(w, m, 2)) return false;
  const ConvertedLayout at = converted_layout(w);
  with_planes(w, [&](auto planes) {
    const ChannelRow<planes> row{w, bias, a, at};
    with_bytes(w, p0, p1, 2, [&](int begin, int end, auto&& weights) {
      multiply<TileBytes<planes>, 2>(w, a, at, m, begin, end, weights, Gated<ChannelRow<planes>>{row, row, out, half});
    });
  });
  return true;
}

// Products of tiles in registers, with four accumulators and cleared operands: operands that hold values would take
// registers from the other thread of the core (amx.h). A product of zeros takes as long as any other. Returns the
// number of operations.
double multiply_tile_registers(int64_t rounds, bool integers) {
  Tiles tiles;
  tiles.configure(kPair);
  tile_zero<4>(), tile_zero<5>(), tile_zero<6>(), tile_zero<7>();
  tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
  for (int64_t i = 0; i < rounds; i++) {
    if (integers)
      TileBytes<1>::dot<0, 4, 6>(), TileBytes<1>::dot<1, 4, 7>(), TileBytes<1>::dot<2, 5, 6>(),
          TileBytes<1>::dot<3, 5, 7>();
    else TileBFloat::dot<0, 4, 6>(), TileBFloat::dot<1, 4, 7>(), TileBFloat::dot<2, 5, 6>(), TileBFloat::dot<3, 5, 7>();
  }
  return 2.0 * 4 * kAmxRows * kAmxRows * (integers ? TileBytes<1>::kStep : TileBFloat::kStep) * rounds;
}

}  // namespace AS_ISA
}  // namespace as
#endif
