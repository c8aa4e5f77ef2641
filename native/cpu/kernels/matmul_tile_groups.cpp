// y = x w^T + bias on AMX tiles for integer weights in groups; also silu(gate) * up of a matrix that holds both.
//
// The recipe is that of matmul_integer.cpp: a group's sum is exact, and the totals' operations and their order are the
// same, so rows may be multiplied here or by vector instructions.
//
// The products of 64 k of 32 rows x 32 features take 42 cycles of the time-stamp counter. What surrounds them takes
// longer (docs/decisions/amx.md). Hence:
// - Weights are unpacked to signed bytes once for a block of rows. Sums then need no correction by the format's middle.
// - The activations' sums of the groups are stored as floats (ConvertedLayout::float_sums_at).
// - Folding keeps the totals of 8 rows in registers for all groups of a batch, and a group's scales for these 8 rows: 6
//   vector operations a row and group, 10 with two planes. A group's 32 x 32 sums take 82 cycles alone and 131 beside
//   products.
// - The sums of two batches fit the first-level cache. With four groups a batch they do not: everything together took
//   295 cycles a group instead of 185.
// - Folding runs between the products of the following block.
#include "cpu/kernels/tables.h"

#if defined(AS_ISA_AMX)
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "cpu/kernels/amx.h"
#include "cpu/kernels/finish_sums.h"
#include "cpu/kernels/integer_codes.h"
#include "cpu/kernels/tile.h"
#include "cpu/simd.h"

namespace as {
namespace AS_ISA {
namespace {

constexpr int kPair = 2 * kAmxRows;          // tile rows of a block
constexpr int64_t kLine = NR * 4;            // bytes of a row of a panel or of sums
constexpr int kBlockBytes = kPair * NR * 4;  // of a group's sums of a block
constexpr int kLongestGroup = 512;           // k: both planes' sum fits 32 bits
constexpr int kMostGroups = 2;               // of a batch
constexpr int kMostRows = 384;               // that are multiplied with an unpacked batch,
constexpr size_t kStayBytes = 384 << 10;     // whose activations stay in the second-level cache
constexpr int kMostPanels = 6;               // whose totals stay there, if the activations of all k do not
constexpr int kFoldedRows = 8;               // whose totals are in registers
static_assert(NR == 2 * kAmxRows);

alignas(64) thread_local float kept_totals[kMostPanels * kMostRows * NR];

// How groups are divided into tile products: `steps` of `bytes` k each.
struct Steps {
  int steps, bytes;
};
// steps: 0 if there is none. Unpacking needs multiples of 8 k.
Steps steps_of(int group) {
  for (int steps = (group + 63) / 64; steps <= group / 8; steps++)
    if (group % (8 * steps) == 0) return {steps, group / steps};
  return {0, 0};
}

// Unpacks `units` of 8 k (4-bit weights) to signed bytes.
template <typename Codes>
void unpack_nibbles(const char* w, int units, size_t ahead, char* out) {
  const __m512i mask = _mm512_set1_epi8(15), middle = _mm512_set1_epi8(Codes::kMiddle);
  for (int i = 0; i < units; i++, w += NR * 4, out += 2 * NR * 4)
    for (int v = 0; v < NV; v++) {
      prefetch_far(w + ahead + v * 64);
      const __m512i raw = _mm512_loadu_si512(w + v * 64);
      _mm512_store_si512(out + v * 64, _mm512_sub_epi8(Codes::of(_mm512_and_si512(raw, mask)), middle));
      _mm512_store_si512(out + NR * 4 + v * 64,
                         _mm512_sub_epi8(Codes::of(_mm512_and_si512(_mm512_srli_epi16(raw, 4), mask)), middle));
    }
}
// The same for 8-bit weights.
void unpack_bytes(const char* w, int units, size_t ahead, char* out) {
  const __m512i middle = _mm512_set1_epi8((char)0x80);
  for (int i = 0; i < 2 * units * NV; i++, w += 64, out += 64) {
    prefetch_far(w + ahead);
    _mm512_store_si512(out, _mm512_xor_si512(_mm512_loadu_si512(w), middle));
  }
}

// Sums of a block of rows and a batch of groups that wait to be folded.
struct Waiting {
  const char* sums;         // [groups][kPair][NR] int32
  const float* scales;      // [groups][2 * NR]
  const char* activations;  // float32 sums of the first row's groups
  float* totals;            // [rows][NR] of the first row
  int groups, rows;
  bool first, last;  // batch of K
  int panel, row;    // index of the first row
};

// Adds the sums of R rows, from r on, to `totals`.
template <int Planes, int R>
__attribute__((noinline)) void fold(const Waiting& at, int r, size_t stride) {
  float* kept = at.totals + r * NR;
  vf total[R * NV];
#pragma GCC unroll 16
  for (int i = 0; i < R * NV; i++) total[i] = at.first ? vzero() : vload(kept + i * W);
  const char *sums = at.sums + r * NR * 4, *activations = at.activations + r * stride;
  const float* scales = at.scales;
  for (int g = 0; g < at.groups; g++, sums += kBlockBytes, activations += 4, scales += 2 * NR) {
    vf scale[NV], offset[NV];
#pragma GCC unroll 2
    for (int v = 0; v < NV; v++) scale[v] = vload(scales + v * W), offset[v] = vload(scales + NR + v * W);
#pragma GCC unroll 16
    for (int i = 0; i < R; i++) {
      float sum;
      std::memcpy(&sum, activations + i * stride, 4);
#pragma GCC unroll 2
      for (int v = 0; v < NV; v++) {
        __m512i value = _mm512_loadu_si512(sums + (i * NV + v) * 64);
        if (Planes == 2)
          value =
              _mm512_add_epi32(_mm512_slli_epi32(value, 8), _mm512_loadu_si512(sums + ((kAmxRows + i) * NV + v) * 64));
        vf& sum_of_row = total[i * NV + v];
        sum_of_row = vfma(offset[v], vset(sum), vfma(scale[v], _mm512_cvtepi32_ps(value), sum_of_row));
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < R * NV; i++) vstore(kept + i * W, total[i]);
}

// Multiplies rows with panels panel_of(0), ..., panel_of(count - 1). Calls sink(panel, row, totals) with a row's
// totals [NR] of one of these panels. The previous panel's totals of the row are still at totals - kMostRows * NR.
template <int Planes, typename PanelOf, typename Sink>
class GroupGemm {
 public:
  static constexpr int kHeight = kPair / Planes;  // most rows of a block
  GroupGemm(const Packed& w, const Activations& a, int m, int count, PanelOf panel_of, Sink& sink)
      : w_(w), a_(a), at_(converted_layout(w)), m_(m), count_(count), panel_of_(panel_of), sink_(sink) {
    const Steps split = steps_of(w.group);
    steps_ = split.steps, step_ = split.bytes;
    batch_ = std::min({kMostGroups, std::max(1, kLongestGroup / w.group), w.groups()});
    second_ = Planes == 2 ? (int64_t)at_.plane_bytes : kAmxRows * (int64_t)a.stride;
  }
  ~GroupGemm() { tile_release(); }

  // panels: as many of a chunk of K are multiplied before the next chunk.
  void run(int panels) {
    const int parts = (m_ + kMostRows - 1) / kMostRows, groups = w_.groups();
    const int batches = (groups + batch_ - 1) / batch_;
    for (int part = 0; part < parts; part++) {
      const int m0 = (int)((int64_t)m_ * part / parts), m1 = (int)((int64_t)m_ * (part + 1) / parts);
      const int blocks = (m1 - m0 + kHeight - 1) / kHeight;
      height_ = (m1 - m0 + blocks - 1) / blocks;
      configure();
      const int stay = std::max<int>(1, kStayBytes / ((size_t)(m1 - m0) * Planes * w_.group * batch_));
      for (int c0 = 0; c0 < count_; c0 += panels)
        for (int b0 = 0; b0 < batches; b0 += stay)
          for (int c = c0; c < std::min(count_, c0 + panels); c++)
            for (int b = b0; b < std::min(batches, b0 + stay); b++) multiply(m0, m1, c, c - c0, b);
      store_pending();
      for (int r = 0; r < waiting_.rows; r += kFoldedRows) fold_from(r);
      waiting_.rows = 0;
    }
  }

 private:
  void configure() {
    TileConfig config;
    const int first = std::min(height_, kAmxRows), second = Planes == 2 ? first : height_ - first;
    const int rows[8] = {first, first, second, second, first, second, step_ / 4, step_ / 4};
    for (int t = 0; t < 8; t++) {
      config.rows[t] = (uint8_t)rows[t];
      config.row_bytes[t] = rows[t] ? t == 4 || t == 5 ? step_ : 64 : 0;
    }
    tile_configure(config);
    two_ = second > 0;
  }

  // Rows [m0, m1) with batch b of panel c, whose totals are in place `place`.
  void multiply(int m0, int m1, int c, int place, int b) {
    const int panel = panel_of_(c), g0 = b * batch_, groups = std::min(batch_, w_.groups() - g0);
    float* scales = scales_[turn_ ^= 1];
    if (w_.plain_scales)
      for (int g = 0; g < groups; g++)
        for (int i = 0; i < 2 * NR; i += W) vstore(scales + g * 2 * NR + i, vload_bf16(w_.scales(panel, g0 + g) + i));
    else load_scales(w_, panel, g0, groups, scales);
    const size_t group_bytes = (size_t)w_.group * NR, ahead = batch_ * w_.group_bytes(w_.group);
    for (int g = 0; g < groups; g++) {
      const char* later = w_.head(panel, g0 + g) + ahead;
      for (size_t line = 0; line < w_.head_bytes; line += 64) prefetch_far(later + line);
      const int k = w_.group_k(g0 + g), units = (k + 7) / 8;
      char* to = unpacked_ + g * group_bytes;
      if (w_.format == Format::e2m1a16) unpack_nibbles<E2M1Codes>(w_.weights(panel, g0 + g), units, ahead, to);
      else if (bits_of(w_.format) == 4) unpack_nibbles<PlainCodes>(w_.weights(panel, g0 + g), units, ahead, to);
      else unpack_bytes(w_.weights(panel, g0 + g), units, ahead, to);
      last_steps_ = (k + step_ - 1) / step_;
      if (k < w_.group) std::memset(to + units * 8 * NR, 0, (size_t)(last_steps_ * step_ - units * 8) * NR);
    }
    for (int r = m0; r < m1; r += height_) {
      // The last block multiplies some rows of the previous one again, so that all have the same height.
      const int from = std::min(r, m1 - height_), skipped = r - from;
      const char* row = a_.converted + from * a_.stride;
      char* sums = sums_[parity_ ^= 1];
      const char* x = row + at_.values_at + (size_t)g0 * w_.group;
      if (two_) block<2>(x, groups, sums);
      else block<1>(x, groups, sums);
      waiting_ = {sums + skipped * NR * 4,
                  scales,
                  row + skipped * a_.stride + at_.float_sums_at + 4 * (size_t)g0,
                  kept_totals + ((size_t)place * kMostRows + (r - m0)) * NR,
                  groups,
                  height_ - skipped,
                  g0 == 0,
                  g0 + groups == w_.groups(),
                  c,
                  r};
      if (waiting_.last)
        for (int i = 0; i < waiting_.rows; i++) sink_.fetch(panel, r + i);
    }
  }

  // The sums of one block of rows: R tiles of rows. An accumulator that is stored at once makes the next group's
  // products wait. It is stored before its next product instead, when other products have hidden the latency;
  // store_pending() stores the last ones.
  template <int R>
  AS_INLINE void block(const char* x, int groups, char* sums) {
    const int64_t lda = (int64_t)a_.stride, second = second_;
    const char* b = unpacked_;
    const int step = step_;
    for (int g = 0, folded = 0; g < groups; g++, sums += kBlockBytes) {
      const int steps = g + 1 < groups ? steps_ : last_steps_;
      tile_load<6>(b, kLine), tile_load_far<4>(x, lda);
      store<0>(), tile_zero<0>(), tile_dot_s8s8<0, 4, 6>();
      tile_load<7>(b + 64, kLine);
      store<1>(), tile_zero<1>(), tile_dot_s8s8<1, 4, 7>();
      tile_zero<4>();  // operands are cleared after their last use (amx.h)
      if (R == 2) {
        tile_load_far<5>(x + second, lda);
        store<2>(), tile_zero<2>(), tile_dot_s8s8<2, 5, 6>();
      }
      tile_zero<6>();
      if (R == 2) {
        store<3>(), tile_zero<3>(), tile_dot_s8s8<3, 5, 7>();
        tile_zero<5>();
      }
      tile_zero<7>();
      x += step, b += step * NR;
      for (int s = 1; s < steps; s++, x += step, b += step * NR) {
        tile_load<6>(b, kLine), tile_load_far<4>(x, lda);
        tile_dot_s8s8<0, 4, 6>();
        tile_load<7>(b + 64, kLine);
        tile_dot_s8s8<1, 4, 7>();
        tile_zero<4>();
        if (R == 2) {
          tile_load_far<5>(x + second, lda), tile_dot_s8s8<2, 5, 6>(), tile_dot_s8s8<3, 5, 7>();
          tile_zero<5>();
        }
        tile_zero<6>(), tile_zero<7>();
      }
      pending_ = sums;
      for (const int end = g + 1 < groups ? waiting_.rows * (g + 1) / groups : waiting_.rows; folded < end;
           folded += kFoldedRows)
        fold_from(folded);
    }
  }

  // Stores accumulator T of the last group.
  template <int T>
  AS_INLINE void store() {
    tile_store<T>(pending_ + (T / 2) * kAmxRows * kLine + T % 2 * 64, kLine);
  }
  void store_pending() {
    store<0>(), store<1>();
    if (two_) store<2>(), store<3>();
  }

  // Up to kFoldedRows rows.
  void fold_from(int r) {
    const int rows = std::min(kFoldedRows, waiting_.rows - r);
    with_constant<kFoldedRows>(rows, [&](auto count) { fold<Planes, count>(waiting_, r, a_.stride); });
    if (!waiting_.last) return;
    const int panel = panel_of_(waiting_.panel);
    for (int i = r; i < r + rows; i++) sink_(panel, waiting_.row + i, waiting_.totals + i * NR);
  }

  const Packed& w_;
  const Activations& a_;
  const ConvertedLayout at_;
  const int m_, count_;
  PanelOf panel_of_;
  Sink& sink_;
  int steps_, step_, last_steps_ = 0, batch_, height_ = 0, turn_ = 0, parity_ = 0;
  int64_t second_;
  bool two_ = false;
  char* pending_ = sums_[0];  // where the accumulators of the last group go
  Waiting waiting_ = {};
  alignas(64) float scales_[2][kMostGroups * 2 * NR];
  alignas(64) char unpacked_[kLongestGroup * NR];
  alignas(64) char sums_[2][kMostGroups * kBlockBytes];
};

struct PlainSink {
  const ConvertedLayout at;
  const Activations& a;
  const float* bias;
  Results results;
  Bias add = {};
  int panel_of_bias = -1;
  AS_INLINE void fetch(int panel, int row) const { results.fetch(panel, row); }
  AS_INLINE void operator()(int panel, int row, const float* totals) {
    if (bias && panel != panel_of_bias) add.set(bias, panel_of_bias = panel, results.w.n);
    vf total[NV];
    for (int v = 0; v < NV; v++) total[v] = vload(totals + v * W);
    scale_row(a.converted + row * a.stride, at, bias ? add.values : nullptr, total);
    results.write(panel, row, total);
  }
};

// Panels of gate and up in turn.
struct GatedSink {
  const ConvertedLayout at;
  const Activations& a;
  const float* bias;
  const GatedOutput& out;
  int half, n;
  Bias gate_add = {}, up_add = {};
  int panel_of_bias = -1;
  AS_INLINE void fetch(int panel, int row) const {
    if (panel < half) fetch_gated(out, panel, row);
  }
  AS_INLINE void operator()(int panel, int row, const float* totals) {
    if (panel < half) return;
    const int p = panel - half;
    if (bias && p != panel_of_bias) gate_add.set(bias, panel_of_bias = p, n), up_add.set(bias, panel, n);
    const float* gates = totals - kMostRows * NR;
    vf gate[NV], up[NV];
    for (int v = 0; v < NV; v++) gate[v] = vload(gates + v * W), up[v] = vload(totals + v * W);
    const char* activations = a.converted + row * a.stride;
    scale_row(activations, at, bias ? gate_add.values : nullptr, gate);
    scale_row(activations, at, bias ? up_add.values : nullptr, up);
    write_gated(out, p, row, gate, up);
  }
};

// Whether tiles take these groups, for m rows.
bool takes_groups(const Packed& w, int m) {
  constexpr int kShortest = 16;
  // Two planes double the products, which costs VNNI more, so tiles pay off earlier.
  const int fewest = w.planes == 2 ? 8 : 16;
  if (m < fewest || w.group < kShortest || w.group > kLongestGroup) return false;
  const Steps split = steps_of(w.group);
  if (!split.steps) return false;
  // The last group's last step must not reach past the activations' padding.
  const int last = w.groups() - 1, used = (w.group_k(last) + split.bytes - 1) / split.bytes * split.bytes;
  return (size_t)last * w.group + used <= converted_layout(w).plane_bytes;
}

template <typename PanelOf, typename Sink>
void multiply_groups(const Packed& w, const Activations& a, int m, int count, int panels, PanelOf panel_of,
                     Sink&& sink) {
  using S = std::remove_reference_t<Sink>;
  if (w.planes == 2) GroupGemm<2, PanelOf, S>(w, a, m, count, panel_of, sink).run(panels);
  else GroupGemm<1, PanelOf, S>(w, a, m, count, panel_of, sink).run(panels);
}

}  // namespace

bool matmul_tile_groups(const Packed& w, const Activations& a, const float* bias, float* y, int ldy, int m, int p0,
                        int p1) {
  if (!takes_groups(w, m)) return false;
  multiply_groups(
      w, a, m, p1 - p0, kMostPanels, [&](int c) { return p0 + c; },
      PlainSink{converted_layout(w), a, bias, {w, y, ldy}});
  return true;
}

bool matmul_gated_tile_groups(const Packed& w, const Activations& a, const float* bias, const GatedOutput& out, int m,
                              int p0, int p1) {
  if (!takes_groups(w, m)) return false;
  static_assert(kMostPanels % 2 == 0);
  const int half = w.panels() / 2;
  multiply_groups(
      w, a, m, 2 * (p1 - p0), kMostPanels, [&](int c) { return p0 + c / 2 + c % 2 * half; },
      GatedSink{converted_layout(w), a, bias, out, half, w.n});
  return true;
}

}  // namespace AS_ISA
}  // namespace as
#endif
