#include "cuda/kernel_choice.h"

#include <algorithm>
#include <climits>
#include <stdexcept>
#include <tuple>

#include "cuda/kernels/attention/decode_plan.h"
#include "cuda/kernels/attention/latent_plan.h"
#include "cuda/kernels/comm/sum_ranks.h"
#include "cuda/kernels/gemm/gemv_plan.h"
#include "cuda/kernels/gemm/mma_prefill_plan.h"
#include "cuda/kernels/gemm/one_wave_plan.h"

namespace as::cuda {
namespace {

constexpr int kManyRows = 2048;    // all larger numbers of rows use the same kernel
constexpr int kLeastOneWave = 16;  // rows that gemm_stream_k() computes as fast as one CTA for each tile
constexpr int kShortK = 64;        // blocks of K

int ceil_div(int n, int by) { return (n + by - 1) / by; }

bool is_hopper(const Chip& chip) { return chip.capability == 90; }

// Whether gemv() can compute it: that takes a cluster with one CTA for each split-K part.
bool has_gemv(const Chip& chip, const Gemm& g, bool normed, bool pushed) {
  const Matrix& w = g.w;
  if (!is_hopper(chip) || pushed) return false;
  // Split-K parts with whole groups.
  const bool groups = w.has_float_groups() && SplitK(w.k, w.max_split_k).length % GemvPlan::kGroupBlocks == 0;
  const bool fits = w.kind == Kind::dtype16
                        ? !normed || w.k <= kNormedColumns
                        : w.quants.in_rows && (w.quants.groups == 1 || groups) && (!normed || w.k <= kNormedBytes);
  return fits && w.max_split_k > 1 && w.max_split_k <= kMaxSplitK && GemvPlan(w, 1, chip.sms).stages > 0;
}

// Whether gemm_prefill() is the fastest for a number of rows that other kernels usually serve.
bool prefill_is_best(const Chip& chip, const Matrix& w, int rows) {
  const SplitK k(w.k, w.max_split_k);
  if (k.count == 1) {
    // With one CTA for each tile. Bytes that gemm_stream_k() reads in a nanosecond, on an H200.
    const double rate = rows <= kBlock ? 4000 : std::min(3600.0, 3600.0 * 2 * kBlock / rows);
    const OneWavePlan plan(w, rows, chip.sms);
    if (rows > kLeastOneWave && plan.tile >= 0 && plan.nanoseconds < 2.0 * w.n * w.k / rate) return true;
    return rows > 128 && ceil_div(rows, 4 * kBlock) * ceil_div(w.n, 4 * kBlock) >= chip.prefill_clusters;
  }
  // It has narrow tiles, whose CTAs compute all split-K parts and exchange none.
  return rows > 128 && k.blocks <= kShortK;
}

// Bits of a value of 16-bit or quantized weights.
int bits_of(const Matrix& w) { return w.kind == Kind::quantized ? w.quants.bits : 16; }

// The expected nanoseconds of a GEMM by mma.sync in tiles of few columns.
double mma_time(const Chip& chip, const Matrix& w, int rows) {
  const int columns = w.kind == Kind::quantized ? 2 * kTileRows : kTileRows;
  const double ctas = (double)ceil_div(w.n, columns) * ceil_div(rows, kBlock);
  const double products = std::max(1.0, ctas / chip.sms) * blocks_of(w.k) * chip.costs.mma_of(bits_of(w));
  return std::max(products, (double)w.n * w.k * bits_of(w) / 8 / chip.costs.read);
}

// Whether gemm_mma_prefill() can compute it: it writes gated values in 16 bits, and pushes nothing.
bool has_mma_prefill(const Gemm& g, int rows) {
  return (!g.gated || g.writes_16_bytes) && !(g.pushed && rows <= kPushedRows);
}

// Whether gemm_mma_prefill() is expected to be the fastest by mma.sync. Quantized weights are dequantized first. Up to
// 32 rows, the other kernel is bound by the bandwidth of the weights.
bool prefill_is_best_by_mma(const Chip& chip, const Gemm& g, int rows) {
  const Matrix& w = g.w;
  const bool quantized = w.kind == Kind::quantized;
  if (!has_mma_prefill(g, rows) || rows <= (quantized ? kLeastWidened : kBlock / 2)) return false;
  double time = MmaPrefillPlan(chip.costs, chip.shared_bytes, chip.sms, w, rows, g.gated).nanoseconds;
  time = std::max(time, 2.0 * w.n * w.k / chip.costs.read);
  if (quantized)
    time += chip.costs.graph_node + (double)blocks_of(w.n) * blocks_of(w.k) * chip.costs.widen_of(w.quants.bits);
  return time < mma_time(chip, w, rows);
}

// Whether split-K parts are long.
bool is_long(const Matrix& w) { return SplitK(w.k, w.max_split_k).length >= 32; }

// The fastest kernel but gemv() for 16-bit weights on Hopper.
GemmAlgo fastest(const Chip& chip, const Matrix& w, int rows) {
  // A matrix with fewer values is read before clusters would start. The second limit is for long split-K parts.
  constexpr int64_t kSmall = 10 << 20, kSmallAndLong = 40 << 20;
  if (rows > 256 || prefill_is_best(chip, w, rows)) return GemmAlgo::prefill;
  if (w.max_split_k == 1) return GemmAlgo::stream_k;
  return rows <= 8 && (int64_t)w.n * w.k < (is_long(w) ? kSmallAndLong : kSmall) ? GemmAlgo::mma : GemmAlgo::split_k;
}

// The kernel that norms or quantizes the single row of a step itself; simt: there is none. These kernels do not push
// partial sums, for which the other GPU would wait.
GemmAlgo fused_algo(const Chip& chip, const Gemm& g) {
  const Matrix& w = g.w;
  if (!g.fuses || g.pushed || !is_hopper(chip)) return GemmAlgo::simt;
  if (w.takes_bytes())
    return has_gemv(chip, g, g.normed, false) ? GemmAlgo::gemv
           : g.normed && w.k <= kNormedBytes  ? GemmAlgo::stream_k
                                              : GemmAlgo::simt;
  const bool norms = w.kind == Kind::quantized
                         ? QuantizedGemvPlan(w, chip.sms, chip.shared_bytes).norms(w.k)
                         : fastest(chip, w, 1) == GemmAlgo::split_k && has_gemv(chip, g, true, false);
  return g.normed && norms ? GemmAlgo::gemv : GemmAlgo::simt;
}

GemmAlgo choose_dtype16(const Chip& chip, const Gemm& g, int rows, GemmAlgo algo) {
  if (!is_hopper(chip)) {
    const bool prefill = algo == GemmAlgo::mma_prefill ? has_mma_prefill(g, rows)
                                                       : algo != GemmAlgo::mma && prefill_is_best_by_mma(chip, g, rows);
    return prefill ? GemmAlgo::mma_prefill : GemmAlgo::mma;
  }
  if (algo == GemmAlgo::any) {
    algo = fastest(chip, g.w, rows);
    // Of matrices that mma.sync reads before clusters would start, the largest are faster by gemv().
    constexpr int64_t kSmallOfRow = 8 << 20;
    const bool clusters =
        algo == GemmAlgo::split_k || (algo == GemmAlgo::mma && !is_long(g.w) && (int64_t)g.w.n * g.w.k >= kSmallOfRow);
    if (rows == 1 && clusters && has_gemv(chip, g, false, g.pushed)) return GemmAlgo::gemv;
  }
  if (algo == GemmAlgo::prefill && !g.writes_16_bytes) algo = GemmAlgo::split_k;
  // Each split-K part needs a CTA of a cluster or a warp. Stream-K computes sums of a single part.
  if (algo == GemmAlgo::split_k || algo == GemmAlgo::stream_k)
    return g.w.max_split_k == 1 ? GemmAlgo::stream_k : GemmAlgo::split_k;
  return algo;
}

GemmAlgo choose_quantized(const Chip& chip, const Gemm& g, int rows, GemmAlgo algo) {
  if (algo == GemmAlgo::any) {
    if (is_hopper(chip) && rows == 1 && QuantizedGemvPlan(g.w, chip.sms, chip.shared_bytes).stages)
      return GemmAlgo::gemv;
    algo = (is_hopper(chip) ? rows > kMaxFused : prefill_is_best_by_mma(chip, g, rows)) ? GemmAlgo::prefill
                                                                                        : GemmAlgo::stream_k;
  }
  if (algo == GemmAlgo::prefill && (is_hopper(chip) ? g.writes_16_bytes : has_mma_prefill(g, rows)))
    return GemmAlgo::prefill;
  return algo == GemmAlgo::mma || !is_hopper(chip) ? GemmAlgo::mma : GemmAlgo::stream_k;
}

// The most rows of e4m3 in groups that stream_k computes faster than prefill, as measured on an H200. Prefill is early
// the best only where CTAs compute all split-K parts at once, in clusters, which run on ten of eleven SMs.
int most_streamed_groups(const Chip& chip, const Matrix& w) {
  constexpr int kPrefillColumns = 192;
  constexpr int64_t kSmall = 20 << 20;
  const SplitK k(w.k, w.max_split_k);
  if (k.count == 1) return 64;
  if (ceil_div(w.n, kPrefillColumns) * k.count > chip.sms * 10 / 11) return 112;
  return (int64_t)w.n * w.k <= kSmall ? 24 : 48;
}

GemmAlgo choose_bytes(const Chip& chip, const Gemm& g, int rows, GemmAlgo algo) {
  const Matrix& w = g.w;
  const bool any = algo == GemmAlgo::any, floats = w.kind == Kind::float8;
  if (!floats && (algo == GemmAlgo::mma || !is_hopper(chip))) return GemmAlgo::mma;
  if (any && rows <= kFewByteRows && w.quants.groups == 1 && has_gemv(chip, g, false, false) &&
      GemvPlan(w, GemvPlan::kRowTile, chip.sms).stages)
    return GemmAlgo::small_m;
  // gemm_8bit_prefill() has groups in whole steps.
  if (w.has_float_groups() && blocks_of(w.k) % 2) return GemmAlgo::stream_k;
  const int most_streamed = w.has_float_groups() ? most_streamed_groups(chip, w) : kMaxStreamedRows;
  const bool has_prefill = (floats || (w.quants.bits == 8 && w.quants.groups == 1)) && g.writes_16_bytes;
  return has_prefill && (algo == GemmAlgo::prefill || (any && rows > most_streamed)) ? GemmAlgo::prefill
                                                                                     : GemmAlgo::stream_k;
}

// Ranges of rows from 1 on that share a choice. The choice for most + 1 rows is used for all larger numbers.
template <typename Choice, typename Choose>
RowRanges<Choice> ranges_of(int most, const Choose& choose) {
  RowRanges<Choice> table;
  for (int rows = 1; rows <= most + 1; rows++) {
    const Choice choice = choose(rows);
    if (table.ranges.empty() || !(table.ranges.back().choice == choice)) table.ranges.push_back({rows, choice});
    table.ranges.back().last = rows;
  }
  table.ranges.back().last = INT_MAX;
  return table;
}

auto key_of(const Matrix& w) {
  return std::make_tuple(w.n, w.k, w.kind, w.dtype, w.quants.bits, w.quants.codes, w.quants.group, w.max_split_k,
                         w.experts);
}

auto key_of(const Gemm& g) {
  return std::tuple_cat(key_of(g.w), std::make_tuple(g.writes_16_bytes, g.gated, g.normed, g.fuses, g.pushed,
                                                     g.few_columns, g.long_rows));
}

template <typename Key, typename Table, typename Make>
const Table& find_or_make(std::list<std::pair<Key, Table>>& tables, const Key& key, const Make& make) {
  for (const auto& [other, table] : tables)
    if (key_of(other) == key_of(key)) return table;
  return tables.emplace_back(key, make()).second;
}

std::string shape_of(const Matrix& w) {
  return format_of(w) + " " + (w.experts > 1 ? std::to_string(w.experts) + " x " : "") + std::to_string(w.n) + " x " +
         std::to_string(w.k);
}

template <typename Choice, typename Name>
void add_rows(std::vector<KernelTable::Row>& rows, const char* op, const std::string& shape,
              const RowRanges<Choice>& table, const Name& name) {
  int first = 1;
  for (const auto& [last, choice] : table.ranges) {
    rows.push_back({op, shape, first, last == INT_MAX ? 0 : last, name(choice)});
    first = last == INT_MAX ? last : last + 1;
  }
}

constexpr const char* kGemmNames[] = {"any",  "simt",    "small_n", "long_k",   "mma",    "mma_prefill",
                                      "gemv", "small_m", "split_k", "stream_k", "prefill"};

}  // namespace

Gemm gemm_of(const GemmArgs& p) {
  Gemm g;
  g.w = p.w, g.gated = p.gated;
  g.writes_16_bytes = p.gated ? p.y.tiles != nullptr : p.y.width % 4 == 0 && p.w.n % 4 == 0;
  return g;
}

GemmChoice choose_gemm(const Chip& chip, const Gemm& g, int rows, GemmAlgo wanted) {
  if (g.w.kind == Kind::mxfp4) throw std::invalid_argument("weights of type mxfp4 are for experts only");
  if (g.w.kind == Kind::f32 && g.long_rows) return {GemmAlgo::long_k, g.normed};
  if (g.w.kind == Kind::f32) return {g.few_columns ? GemmAlgo::small_n : GemmAlgo::simt};
  if (wanted == GemmAlgo::any && rows == 1)
    if (const GemmAlgo algo = fused_algo(chip, g); algo != GemmAlgo::simt) return {algo, true};
  if (g.w.kind == Kind::dtype16) return {choose_dtype16(chip, g, rows, wanted)};
  if (g.w.kind == Kind::quantized) return {choose_quantized(chip, g, rows, wanted)};
  return {choose_bytes(chip, g, rows, wanted)};
}

ExpertChoice choose_expert_gemm(const Chip& chip, Kind kind, int entries, int experts, GemmAlgo wanted, int tile_rows) {
  if (kind == Kind::f32) return {GemmAlgo::simt, tile_rows ? tile_rows : kBlock};
  const bool eight = kind == Kind::integers || kind == Kind::float8;
  const bool few =
      kind == Kind::mxfp4 || eight;  // gemm_experts_prefill() and gemm_experts_8bit() have small tiles, too
  const bool has_prefill = (kind == Kind::dtype16 || few) && is_hopper(chip);
  if (!tile_rows) {  // small tiles, so that few experts have more than one
    const int each = entries / std::max(experts, 1);
    const bool mx = kind == Kind::mxfp4 && has_prefill;  // which also has tiles of 48
    // FP8 blocks are 6% faster with 64 entries each, bfloat16 is 14% slower, and MXFP4 is 7% faster.
    const int most_of_64 = eight ? 96 : mx ? 64 : 48, least_of_64 = mx ? 38 : 22;
    tile_rows = each > most_of_64 && has_prefill ? 128
                : each <= 4                      ? 8
                : each <= 10                     ? 16
                : each <= 22                     ? 32
                : each <= least_of_64            ? 48
                                                 : 64;
  }
  const bool prefill = has_prefill && (tile_rows >= 64 || few) && (eight || wanted != GemmAlgo::mma);
  return {prefill ? GemmAlgo::prefill : GemmAlgo::mma, tile_rows};
}

bool has_expert_gemv(const Chip& chip, const Matrix& up, const Matrix& down) {
  return is_hopper(chip) && up.takes_tiles() && down.takes_tiles() &&
         (up.kind == Kind::mxfp4) == (down.kind == Kind::mxfp4);
}

AttentionChoice choose_attention(const Chip& chip, CacheType type, int dim, bool biased) {
  const bool has_mma = type != CacheType::f32 && (dim == 64 || (dim == 80 && type == CacheType::dtype16) || dim == 96 ||
                                                  dim == 128 || (dim == 256 && kPrefillShared256 <= chip.shared_bytes));
  if (dim == kLargestHead && type == CacheType::dtype16 && kLargeShared <= chip.shared_bytes)
    return {AttentionAlgo::mma, AttentionAlgo::mma, false};
  const bool has_wgmma = is_hopper(chip) && !biased &&
                         (type == CacheType::dtype16 ? dim == 64 || dim == 128 || dim == 256
                                                     : type == CacheType::float8 && (dim == 64 || dim == 128));
  AttentionChoice choice;
  choice.prefill = has_wgmma ? AttentionAlgo::wgmma : has_mma ? AttentionAlgo::mma : AttentionAlgo::simt;
  const bool decodes = has_mma && decode_fits(type, dim, 0, chip.shared_bytes);
  choice.decode = decodes ? AttentionAlgo::mma : AttentionAlgo::simt;
  choice.stores = has_mma && decode_fits(type, dim, kOwnRows, chip.shared_bytes);
  return choice;
}

static AttentionAlgo choose_rows(const Chip& chip, CacheType type, bool known) {
  return known && type == CacheType::dtype16 && latent_fits(chip.shared_bytes, 1) ? AttentionAlgo::mma
                                                                                  : AttentionAlgo::simt;
}

AttentionAlgo choose_latent_attention(const Chip& chip, CacheType type, int latent_dim, int rope_dim) {
  return choose_rows(chip, type, latent_dim == kLatentDim && rope_dim == kLatentRope);
}

AttentionAlgo choose_compressed_attention(const Chip& chip, CacheType type, int head_dim) {
  return choose_rows(chip, type, head_dim == kLatentDim);
}

GemmTable gemm_table(const Chip& chip, const Gemm& gemm) {
  return ranges_of<GemmChoice>(kManyRows, [&](int rows) { return choose_gemm(chip, gemm, rows); });
}

ExpertTable expert_table(const Chip& chip, Kind kind, int experts) {
  constexpr int kManyEntries = 128;  // per expert
  return ranges_of<ExpertChoice>(kManyEntries * experts,
                                 [&](int entries) { return choose_expert_gemm(chip, kind, entries, experts); });
}

const GemmTable& KernelTable::gemm(const Gemm& gemm) {
  return find_or_make(gemms_, gemm, [&] { return gemm_table(chip, gemm); });
}

const ExpertTable& KernelTable::experts(const Matrix& stack) {
  return find_or_make(experts_, stack, [&] { return expert_table(chip, stack.kind, stack.experts); });
}

AttentionChoice KernelTable::attention(const LayerCache& cache, int group, bool biased) {
  constexpr const char* kTypes[] = {"float32", "16 bits", "int8", "uint4", "float8"};
  const std::string shape = std::string(kTypes[(int)cache.type]) + ", heads of " + std::to_string(cache.head_dim) +
                            ", " + std::to_string(group) + " to a KV head" + (biased ? ", biased" : "");
  for (const auto& [other, choice] : attentions_)
    if (other == shape) return choice;
  const AttentionChoice choice = choose_attention(chip, cache.type, cache.head_dim, biased);
  attentions_.emplace_back(shape, choice);
  return choice;
}

AttentionAlgo KernelTable::latent_attention(const LayerCache& cache, int group) {
  const AttentionAlgo algo = choose_latent_attention(chip, cache.type, cache.head_dim, cache.rope_dim);
  const std::string shape = std::string(cache.type == CacheType::f32 ? "float32" : "16 bits") + ", rows of " +
                            std::to_string(cache.head_dim) + " + " + std::to_string(cache.rope_dim) + ", tiles of " +
                            std::to_string(group) + " heads";
  for (const auto& [other, _] : latents_)
    if (other == shape) return algo;
  latents_.emplace_back(shape, algo);
  return algo;
}

AttentionAlgo KernelTable::compressed_attention(const LayerCache& cache, int group) {
  const AttentionAlgo algo = choose_compressed_attention(chip, cache.type, cache.head_dim);
  const std::string shape = std::string(cache.type == CacheType::f32 ? "float32" : "16 bits") + ", rows of " +
                            std::to_string(cache.head_dim) + ", tiles of " + std::to_string(group) + " heads";
  for (const auto& [other, _] : compressed_)
    if (other == shape) return algo;
  compressed_.emplace_back(shape, algo);
  return algo;
}

std::vector<KernelTable::Row> rows_of(const Gemm& g, const GemmTable& table) {
  std::vector<KernelTable::Row> rows;
  add_rows(rows, "linear", shape_of(g.w), table, [&](const GemmChoice& choice) {
    return std::string(name_of(choice.algo)) + (!choice.fused ? "" : g.normed ? ", norms" : ", quantizes");
  });
  return rows;
}

std::vector<KernelTable::Row> KernelTable::rows() const {
  std::vector<Row> all;
  for (const auto& [gemm, table] : gemms_)
    for (const Row& row : rows_of(gemm, table)) all.push_back(row);
  for (const auto& [stack, table] : experts_)
    add_rows(all, "expert_linear", shape_of(stack), table, [](const ExpertChoice& choice) {
      return std::string(name_of(choice.algo)) + ", tiles of " + std::to_string(choice.tile_rows);
    });
  for (const auto& [shape, choice] : attentions_) {
    all.push_back({"span_attention", shape + ", decode", 1, 0,
                   std::string(name_of(choice.decode)) + (choice.stores ? ", stores" : "")});
    all.push_back({"span_attention", shape + ", prefill", 1, 0, name_of(choice.prefill)});
  }
  for (const auto& [shape, algo] : latents_) all.push_back({"latent_attention", shape, 1, 0, name_of(algo)});
  for (const auto& [shape, algo] : compressed_) all.push_back({"compressed_attention", shape, 1, 0, name_of(algo)});
  return all;
}

const char* name_of(GemmAlgo algo) { return kGemmNames[(int)algo]; }

const char* name_of(AttentionAlgo algo) {
  constexpr const char* kNames[] = {"simt", "mma", "wgmma"};
  return kNames[(int)algo];
}

GemmAlgo gemm_algo_of(const std::string& name) {
  for (GemmAlgo algo :
       {GemmAlgo::any, GemmAlgo::mma, GemmAlgo::mma_prefill, GemmAlgo::split_k, GemmAlgo::stream_k, GemmAlgo::prefill})
    if (name == name_of(algo)) return algo;
  throw std::invalid_argument("algo must be any, mma, mma_prefill, split_k, stream_k or prefill, got " + name);
}

std::string format_of(const Matrix& w) {
  const auto groups = [&](const char* name) {
    return name + (w.quants.groups > 1 ? " in groups of " + std::to_string(w.quants.group) : std::string());
  };
  switch (w.kind) {
    case Kind::f32:
      return "float32";
    case Kind::dtype16:
      return w.dtype == DType16::f16 ? "float16" : "bfloat16";
    case Kind::quantized:
      if (is_e2m1(w.quants.codes)) return "e2m1 in groups of " + std::to_string(w.quants.half());
      return groups(w.quants.codes == Codes::nf4 ? "nf4" : w.quants.bits == 8 ? "int8" : "int4");
    case Kind::integers:
      return groups(w.quants.bits == 8 ? "w8a8" : "w4a8");
    case Kind::float8:
      return groups("float8");
    case Kind::mxfp4:
      return "mxfp4";
  }
  return "";
}

}  // namespace as::cuda
