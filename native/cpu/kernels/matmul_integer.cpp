// y = x w^T + bias with quantized weights and integer activations, scaled per token (format.h): 8 bits in w8a8 and
// w4a8, 16 bits in int8 and int4.
//
// The error of a 16-bit activation is 2^-16 of the row's largest value (rounding to bfloat16 would cost 2^-9 of each
// value), and weights need not be converted to float. Where the instruction set multiplies bytes (VNNI, sdot), an
// activation is two int8 planes, 256 * high + low with low in [-128, 127]; planes are more rows of the same GEMM.
// Elsewhere 16-bit products use it whole, at no more cost than 8 bits (integers_x86.h, integers_arm.h).
//
// Recipe: a group's sum of activation * (q - middle) is exact in integers, so kernels may sum in any order and tiling.
// Its float32 value is 256 * high + low of the planes' sums, each rounded to float32, or the whole sum rounded once.
// (The bits are the same while no plane's sum exceeds 2^24, as in groups of up to 1,032 k. In longer groups, sums may
// differ in the last place between instruction sets, but not within one.) The group's sum of activations is always 256
// * high + low. Groups are added in ascending order: total = scale * sum + total, then total = offset * (sum of the
// group's activations) + total, both fused. The result is total * the row's scale + bias. Nothing saturates:
// kExactWords k of 16-bit products fit 32 bits, and longer groups add up such sums exactly in float64.
#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "cpu/kernels/integers.h"
#include "cpu/kernels/kernels.h"
#include "cpu/kernels/scales.h"
#include "cpu/kernels/tables.h"
#include "cpu/kernels/tile.h"
#include "cpu/simd.h"

namespace as {
namespace AS_ISA {
namespace {

// The converted activations of rows from `first` on, in P planes.
template <int P>
struct Rows {
  const char* first;
  size_t stride, plane_sums;
  ConvertedLayout at;

  // groups: of the matrix. (An argument, because computing it takes a division.)
  Rows(const ConvertedLayout& at, const Activations& a, int groups, int row)
      : first(a.converted + row * a.stride), stride(a.stride), plane_sums(4 * (size_t)groups), at(at) {}
  AS_INLINE int32_t plane_sum(int r, int p, int g) const {
    return four_bytes(first + r * stride + p * plane_sums + 4 * g);
  }
  // A group's sum of activations: rounded as in the recipe, and exact.
  AS_INLINE float sum(int r, int g) const {
    const float low = (float)plane_sum(r, P - 1, g);
    return P == 1 ? low : std::fma(256.0f, (float)plane_sum(r, 0, g), low);
  }
  AS_INLINE int64_t exact_sum(int r, int g) const {
    return P == 1 ? plane_sum(r, 0, g) : 256 * (int64_t)plane_sum(r, 0, g) + plane_sum(r, 1, g);
  }
  AS_INLINE float scale(int r) const {
    float scale;
    std::memcpy(&scale, first + r * stride + at.scale_at, 4);
    return scale;
  }
};

// Where a group's scales come from: its head or, if not null, load_scales()'s conversion of it.
struct GroupScales {
  const char* head;
  const float* loaded;
  bool lone;       // scales without offsets, otherwise bfloat16 scales and offsets
  ScaleType type;  // of lone scales

  AS_INLINE void load(vf (&scale)[NV], vf (&offset)[NV]) const {
    if (loaded) {
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) scale[v] = vload(loaded + v * W), offset[v] = vload(loaded + NR + v * W);
    } else if (lone) {
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) {
        scale[v] = type == ScaleType::float16    ? Float16s::load(head, v)
                   : type == ScaleType::bfloat16 ? BFloat16s::load(head, v)
                                                 : Float32s::load(head, v);
        offset[v] = vzero();
      }
    } else {
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++)
        scale[v] = BFloat16s::load(head, v), offset[v] = BFloat16s::load(head + NR * BFloat16s::kBytes, v);
    }
  }
};

// total [R][NV] += a group's scale * chain(r, v) + offset * sum of activations
template <int R, int P, typename Chain>
AS_INLINE void add_group(const GroupScales& scales, const Rows<P>& rows, int g, Chain&& chain, vf* total) {
  vf scale[NV], offset[NV];
  scales.load(scale, offset);
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    const vf sum = vset(rows.sum(r, g));
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++)
      total[r * NV + v] = vfma(offset[v], sum, vfma(scale[v], chain(r, v), total[r * NV + v]));
  }
}

// y [columns] = total [NR] * scale (+ bias)
AS_INLINE void write_row(const vf* total, float scale, const float* bias, float* y, int columns) {
  alignas(64) float edge[NR];
  for (int v = 0; v < NV; v++) vstore(edge + v * W, vmul(total[v], vset(scale)));
  if (columns >= NR) {
    for (int v = 0; v < NV; v++)
      vstore(y + v * W, bias ? vadd(vload(edge + v * W), vload(bias + v * W)) : vload(edge + v * W));
  } else {
    for (int j = 0; j < columns; j++) y[j] = bias ? edge[j] + bias[j] : edge[j];
  }
}

constexpr int kShortGroup = 256;       // k of groups whose heads are a considerable part of what is read
constexpr size_t kGroupsAhead = 4096;  // bytes, at least, that short groups are prefetched ahead

constexpr int kTurn = 4;  // units of a longer group that are read of one of several panels in its turn

// R rows of P planes, from `row` on, against S panels: `panel` and each `apart`-th after it, in turn (tile.h:
// kStreams). Not inlined, because it would share the caller's registers.
template <typename F, int R, int P, int S>
__attribute__((noinline)) void multiply_rows(const Packed& w, const ConvertedLayout& at, const Activations& a, int row,
                                             int panel, int apart, const float* bias, float* y, int ldy) {
  constexpr int L = kWords ? 1 : P;  // GEMM rows for each row of activations
  const int groups = w.groups();
  const Rows<P> rows(at, a, groups, row);
  vf total[S][R * NV];
  for (auto& panel_total : total)
    for (vf& t : panel_total) t = vzero();
  alignas(64) float own_scales[S][kLoadedGroups * 2 * NR];
  const bool direct = w.plain_scales || w.lone_scales;
  const int group = w.group, k = w.k;
  // Cached, because computing a group's address takes as long as the smallest products.
  const size_t head_bytes = w.head_bytes, group_bytes = w.group_bytes(group), stream = apart * w.panel_bytes;
  // Short groups are prefetched whole groups ahead. At another distance, lines as far ahead of weights as a head is
  // long would be left out.
  const bool short_groups = group < kShortGroup;
  const size_t bytes_ahead = S > 1 ? kStreamsAhead + group_bytes / 2 : kGroupsAhead + group_bytes - 1;
  const size_t groups_ahead = std::max<size_t>(direct ? 1 : kLoadedGroups, bytes_ahead / group_bytes);
  const size_t ahead = short_groups ? groups_ahead * group_bytes : S > 1 ? kStreamsAhead : F::kAhead;
  const char *first = w.head(panel, 0), *values = rows.first + at.values_at;
  for (int g = 0; g < groups; g++, first += group_bytes, values += group * sizeof(typename F::Value)) {
    const int length = std::min(group, k - g * group);
    auto line = [&](int r)
                    __attribute__((always_inline)) { return values + r / L * a.stride + r % L * at.plane_bytes; };
    const auto begin = [&](int s) __attribute__((always_inline)) {  // returns the group's weights
      if (!direct && g % kLoadedGroups == 0)
        load_scales(w, panel + s * apart, g, std::min(kLoadedGroups, groups - g), own_scales[s]);
      const char* head = first + s * stream;
      if (R * L <= 2 && short_groups) {  // products prefetch only weights
        const char* later = head + ahead + (g + (int)groups_ahead < groups ? 0 : w.first_group);
        for (size_t line = 0; line < head_bytes; line += 64) prefetch_far(later + line);
      }
      return head + head_bytes;
    };
    const auto end = [&](int s, auto&& chain) __attribute__((always_inline)) {
      add_group<R>({first + s * stream, direct ? nullptr : own_scales[s] + g % kLoadedGroups * 2 * NR, w.lone_scales,
                    w.scaling.scales},
                   rows, g, chain, total[s]);
    };
#if defined(AS_WORDS)
    if (P == 2 && length > kExactWords) {
      alignas(64) double wide[S][R * NR] = {};
      for (int k1 = 0; k1 < length; k1 += kUncentredWords)
        for (int s = 0; s < S; s++) {
          const char* weights = k1 ? first + s * stream + head_bytes : begin(s);
          vi acc[R][NV], part[R * NV];
          for (int r = 0; r < R; r++)
            for (int v = 0; v < NV; v++) acc[r][v] = iset(0);
          F::template group<R>(
              weights + w.weight_bytes(k1), std::min(kUncentredWords, length - k1),
              [&](int r) __attribute__((always_inline)) { return line(r) + k1 * sizeof(typename F::Value); }, acc,
              ahead);
          spill(acc, part);
          for (int i = 0; i < R * NV; i++) add_doubles(wide[s] + i * W, part[i]);
        }
      for (int s = 0; s < S; s++)
        end(s, [&](int r, int v) {
          return round_doubles(wide[s] + (r * NV + v) * W, F::kMiddle * (double)rows.exact_sum(r, g));
        });
      continue;
    }
#endif
    vi chains[S][R * L * NV];
    const int turn = S == 1 || short_groups ? length : kTurn * F::kUnit;
    for (int k1 = 0; k1 < length; k1 += turn)
      for (int s = 0; s < S; s++) {
        const char* weights = k1 ? first + s * stream + head_bytes + w.weight_bytes(k1) : begin(s);
        vi acc[R * L][NV];
        for (int r = 0; r < R * L; r++) {
          const vi start =
              iset(-F::kMiddle * (L == P ? rows.plane_sum(r / L, r % L, g) : (int32_t)rows.exact_sum(r, g)));
          for (int v = 0; v < NV; v++) acc[r][v] = S > 1 && k1 ? chains[s][r * NV + v] : start;
        }
        F::template group<R * L>(
            weights, std::min(turn, length - k1),
            [&](int r) __attribute__((always_inline)) { return line(r) + k1 * sizeof(typename F::Value); }, acc, ahead);
        spill(acc, chains[s]);
      }
    for (int s = 0; s < S; s++)
      end(s, [&](int r, int v) __attribute__((always_inline)) {
        const vf low = to_float(chains[s][(r * L + L - 1) * NV + v]);
        return L == 1 ? low : vfma(vset(256.0f), to_float(chains[s][r * L * NV + v]), low);
      });
  }
  for (int s = 0; s < S; s++) {
    const int column = (panel + s * apart) * NR;
    for (int r = 0; r < R; r++)
      write_row(total[s] + r * NV, rows.scale(r), bias ? bias + column : nullptr, y + (size_t)(row + r) * ldy + column,
                w.n - column);
  }
}

#if defined(AS_WIDENED_BLOCKS)
constexpr int kBlockRows = (MB + kPairRows - 1) / kPairRows * kPairRows;

// `count` <= kBlockRows rows, from `row` on, against one panel. A block of weights, of several whole groups or part of
// one, is widened once for all rows.
template <typename F, int P>
void many_rows(const Packed& w, const ConvertedLayout& at, const Activations& a, int row, int count, int panel,
               const float* bias, float* y, int ldy) {
  alignas(64) typename F::Wide block[kBlockK * NR];
  alignas(64) vi kept[kBlockRows * NV];                   // a group's sums over several blocks
  alignas(64) double wide[P == 2 ? kBlockRows * NR : 1];  // the same in float64, for 16-bit activations
  alignas(64) vf totals[kBlockRows * NV];
  alignas(64) float own_scales[kBlockK / kSmallestGroup * 2 * NR];  // of a block's groups, converted, unless `direct`
  std::fill_n(totals, count * NV, vzero());
  const bool cut = w.group > kBlockK, direct = w.plain_scales || w.lone_scales;
  const int groups = w.groups(), tiles = (count + kPairRows - 1) / kPairRows,
            most = cut ? kBlockK : kBlockK / w.group * w.group;
  const size_t group_bytes = w.group_bytes(w.group), ahead = w.weight_bytes(most) / tiles;
  for (int first = 0, end; first < w.k; first = end) {
    const int g0 = first / w.group, begin = g0 * w.group;
    end = cut ? std::min(begin + w.group_k(g0), first + most) : std::min(w.k, first + most);
    const bool begins = first == begin, ends = !cut || end == begin + w.group_k(g0);
    const char* data = w.weights(panel, g0) + w.weight_bytes(first - begin);
    for (int k0 = first; k0 < end; k0 += w.group, data += group_bytes)
      F::widen(data, std::min(w.group, end - k0), block + (k0 - first) * NR);
    if (!direct) load_scales(w, panel, g0, (end - g0 * w.group + w.group - 1) / w.group, own_scales);
    const char* next = cut ? data - group_bytes + w.weight_bytes(most) : data;
    if (P == 2 && cut && begins) std::fill_n(wide, count * NR, 0.0);
    for (int r0 = 0; r0 < count; r0 += kPairRows) {
      for (size_t line = 0; line < ahead + 64; line += 64) prefetch_far(next + line);
      next += ahead;
      with_constant<kPairRows>(std::min(kPairRows, count - r0), [&](auto constant) {
        constexpr int R = decltype(constant)::value;
        const Rows<P> rows(at, a, groups, row + r0);
        vi* sums = kept + r0 * NV;
        double* wide_sums = wide + r0 * NR;
        const char* scales = w.head(panel, g0);
        const float* converted = direct ? nullptr : own_scales;
        const size_t converted_step = direct ? 0 : 2 * NR;
        for (int g = g0, k0 = first; k0 < end; g++, k0 += w.group, scales += group_bytes, converted += converted_step) {
          const char* values = rows.first + at.values_at + k0 * sizeof(typename F::Value);
          F::template multiply<R>(
              block + (k0 - first) * NR, std::min(w.group, end - k0),
              [&](int r) __attribute__((always_inline)) { return values + r * a.stride; }, sums, P == 1 && !begins);
          if (P == 2 && cut)
            for (int i = 0; i < R * NV; i++) add_doubles(wide_sums + i * W, sums[i]);
          if (!ends) return;
          if (P == 2 && cut) {
            add_group<R>(
                {scales, converted, w.lone_scales, w.scaling.scales}, rows, g,
                [&](int r, int v) { return round_doubles(wide_sums + (r * NV + v) * W, 0); }, totals + r0 * NV);
          } else {
            add_group<R>(
                {scales, converted, w.lone_scales, w.scaling.scales}, rows, g,
                [&](int r, int v) __attribute__((always_inline)) {
                  const vi sum = sums[r * NV + v];
                  return to_float(F::kWideMiddle ? iadd(sum, iset(-F::kWideMiddle * rows.plane_sum(r, 0, g))) : sum);
                },
                totals + r0 * NV);
          }
        }
      });
    }
  }
  const int column = panel * NR;
  const Rows<P> rows(at, a, groups, row);
  for (int r = 0; r < count; r++)
    write_row(totals + r * NV, rows.scale(r), bias ? bias + column : nullptr, y + (size_t)(row + r) * ldy + column,
              w.n - column);
}
#endif

template <typename F, int P>
void matmul_format(const Packed& w, const Activations& a, const float* bias, float* y, int ldy, int m, int p0, int p1) {
  const ConvertedLayout at = converted_layout(w);
  constexpr int kHeight = rows_of_tile(P);
#if defined(AS_WIDENED_BLOCKS)
  if constexpr (F::kWidens)
    if (m > F::kFewRows) {
      const int blocks = (m + kBlockRows - 1) / kBlockRows,
                most = ((m + blocks - 1) / blocks + kHeight - 1) / kHeight * kHeight;
      for (int m0 = 0; m0 < m; m0 += most)
        for (int p = p0; p < p1; p++) many_rows<F, P>(w, at, a, m0, std::min(most, m - m0), p, bias, y, ldy);
      return;
    }
#endif
  if constexpr (kStreams > 1 && (P == 1 || F::kUnit == 8))  // int8 gained nothing
    if (m == 1 && uses_streams())
      return for_streams(p0, p1, [&](auto streams, int panel, int apart) {
        multiply_rows<F, 1, P, decltype(streams)::value>(w, at, a, 0, panel, apart, bias, y, ldy);
      });
  for (int m0 = 0, most = block_rows(m); m0 < m; m0 += most)
    for (int p = p0, end = std::min(m, m0 + most); p < p1; p++)
      for (int r0 = m0; r0 < end; r0 += kHeight)
        with_constant<kHeight>(std::min(kHeight, end - r0), [&](auto count) {
          multiply_rows<F, decltype(count)::value, P, 1>(w, at, a, r0, p, 1, bias, y, ldy);
        });
}

}  // namespace

void matmul_integer(const Packed& w, const Activations& a, const float* bias, float* y, int ldy, int m, int p0,
                    int p1) {
  with_format(
      w, [&](auto format, auto planes) { matmul_format<decltype(format), planes>(w, a, bias, y, ldy, m, p0, p1); });
}

}  // namespace AS_ISA
}  // namespace as
