// indexer: writes the keys of a step's rows, scores the positions that each row sees, and selects the best. A row that
// sees no more positions than are selected sees all of them, without scores.
//
// With few rows, threads divide rows and positions, and select when all scores are there. With many, a thread scores
// and selects for kIndexRows rows at a time. A score depends only on its row and position (kernels.h), and ties are
// broken by position, so results do not depend on the division.
//
// With a rate, entries take the place of positions. They lie in rows, of which a thread packs a block for the kernels.
// Selected entries may be output as their positions, with those behind the last entry.
#include "cpu/ops/indexer.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "cpu/ops/entries.h"
#include "cpu/ops/ops.h"

namespace as {
namespace {

constexpr int kUnitBlocks = 4;  // blocks of context that a thread takes at a time when threads divide positions

int head_tiles(int heads) { return (heads + kTileRows - 1) / kTileRows; }
size_t row_query_bytes(int heads, int dim) {
  SpanLayout layout;
  layout.head_dim = dim;
  return head_tiles(heads) * query_bytes(layout);
}

// A block of entries, packed, and its rows.
size_t block_bytes(const SpanLayout& entries) {
  const size_t bytes = packed_layout(entries, kBlockTokens, 0).bytes + kBlockTokens * entries.row_bytes;
  return (bytes + 63) / 64 * 64;
}

// The order of floats as that of unsigned integers.
uint32_t ordered(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

// Adjacent rows of one sequence: row `row + i` is at `position + i` and has scores number `scores + i`. blocks: of what
// the last one sees.
struct RowGroup {
  int slot, row, position, count, scores, blocks;
};
// Blocks [begin, end) of a group's context.
struct Unit {
  int group, begin, end;
};

class Indexer : public BoundOp {
 public:
  explicit Indexer(const Binding& b)
      : core_(b.core),
        cache_(b.cache.layer(b.parts[0].op.integer("cache_group"), b.parts[0].op.integer("layer"))),
        cache_group_(b.parts[0].op.integer("cache_group")),
        queries_(b.parts[0].in(0)),
        weights_(b.parts[0].in(1)),
        out_(b.parts[0].out()),
        rate_(b.parts[0].op.integer("rate")),
        positions_(b.parts[0].op.flag("positions")),
        count_(positions_ ? out_.width / rate_ : out_.width),
        entries_{cache_, cache_group_, rate_, b.cache.span_size()},
        layout_(rate_ ? packed_layout(cache_.layout, kBlockTokens, 0) : cache_.layout),
        stride_((size_t)context_blocks(seen(b.limits.max_length)) * kBlockTokens),
        scratch_(b.scratch.indexed) {
    if (!rate_) keys_ = b.parts[0].in(2);
  }

  void begin(const Batch& batch) override {
    groups_.clear(), units_.clear();
    int rows = 0;
    for (const Item& item : batch.items) {
      // The first row that sees more than it selects.
      const long sees = (count_ + 1L) * std::max(1, rate_) - 1;  // at this position
      const int first = (int)std::clamp(sees - item.start, 0L, (long)item.count);
      for (int i = first; i < item.count; i += kIndexRows) {
        const int count = std::min(kIndexRows, item.count - i);
        groups_.push_back(
            {item.slot, item.row + i, item.start + i, count, rows, context_blocks(seen(item.start + i + count))});
        rows += count;
      }
    }
    shared_ = rows <= kIndexRows * core_.pool.size();
    for (int g = 0; shared_ && g < (int)groups_.size(); g++)
      for (int b = 0; b < groups_[g].blocks; b += kUnitBlocks)
        units_.push_back({g, b, std::min(groups_[g].blocks, b + kUnitBlocks)});
    taken_.store(0, std::memory_order_relaxed);
  }

  void run(const Batch& batch, int thread) override {
    core_.pool.guard([&] { write_keys(batch, thread); });
    if (groups_.empty() || !core_.pool.barrier()) return;
    core_.pool.guard([&] {
      const AttentionScope scope(core_.k);
      if (shared_) return score_units(batch, thread);
      for (int g; (g = take()) < (int)groups_.size();) {
        score(batch, {g, 0, groups_[g].blocks}, thread, scores(thread * kIndexRows));
        for (int i = 0; i < groups_[g].count; i++) select(groups_[g], i, thread, scores(thread * kIndexRows + i));
      }
    });
    if (shared_ && core_.pool.barrier()) select_shared(thread);
  }

 private:
  int take() { return taken_.fetch_add(1, std::memory_order_relaxed); }
  // How much a row sees that is the last of so many positions.
  int seen(int positions) const { return rate_ ? entries_seen(positions, rate_) : positions; }
  // The scratch memory: scores of all threads, then their queries, then their blocks of entries.
  float* scores(int number) const { return scratch_.as<float>() + number * stride_; }
  char* converted(int thread) const {
    return reinterpret_cast<char*>(scores((kIndexRows + 1) * core_.pool.size())) + thread * queries_bytes();
  }
  char* block_of(int thread) const { return converted(core_.pool.size()) + thread * block_bytes(cache_.layout); }
  size_t queries_bytes() const { return kIndexRows * row_query_bytes(weights_.width, layout_.head_dim); }

  // Writes the keys of a thread's rows. Rows that see few positions select all of them.
  void write_keys(const Batch& batch, int thread) const {
    const auto [r0, r1] = part((int)batch.rows.size(), thread, core_.pool.size());
    for (int r = r0; r < r1; r++) {
      const Row& row = batch.rows[r];
      if (const int all = seen(row.position + 1); all <= count_)
        for (int i = 0, n = positions_ ? row.position + 1 : all; i < out_.width; i++)
          out_.row(r)[i] = i < n ? (float)i : -1.0f;
      if (rate_) continue;
      const int span = batch.slot(row.slot).spans[cache_group_][row.position / cache_.layout.span_size];
      write_token(cache_.layout, cache_.span(span, 0), row.position % cache_.layout.span_size, keys_.row(r), nullptr);
    }
  }

  void score_units(const Batch& batch, int thread) {
    for (int u; (u = take()) < (int)units_.size();)
      score(batch, units_[u], thread, scores(groups_[units_[u].group].scores));
  }

  void score(const Batch& batch, const Unit& unit, int thread, float* out) {
    const RowGroup& group = groups_[unit.group];
    const SpanLayout& layout = layout_;
    const int heads = weights_.width, count = head_tiles(heads);
    std::vector<AttentionTile> tiles((size_t)group.count * count);
    char* query = converted(thread);
    for (int i = 0; i < group.count; i++) {
      for (int t = 0; t < count; t++, query += query_bytes(layout)) {
        AttentionTile& a = tiles[i * count + t];
        a.rows = std::min(kTileRows, heads - t * kTileRows), a.scale = 1, a.layout = &layout;
        for (int h = 0; h < a.rows; h++)
          a.q[h] = queries_.row(group.row + i) + (size_t)(t * kTileRows + h) * layout.head_dim;
        core_.k.convert_queries(a, query);
        a.converted = query;
      }
    }
    const void *spans[kBlockTokens / kKeyGroup], *next[kBlockTokens / kKeyGroup];
    for (int b = unit.begin; b < unit.end; b++) {
      if (rate_) spans[0] = next[0] = pack(batch, group, b, thread);
      else find_spans(batch, group, b, spans), find_spans(batch, group, std::min(b + 1, unit.end - 1), next);
      const int begin = b * kBlockTokens;
      for (int i = 0; i < group.count; i++) {
        const int tokens = std::min(kBlockTokens, seen(group.position + i + 1) - begin);
        if (tokens <= 0) continue;
        for (int t = 0; t < count; t++) {
          AttentionTile& a = tiles[i * count + t];
          a.begin = begin, a.tokens = tokens, a.spans = spans;
          a.cold = i + 1 == group.count && t == 0, a.next = a.cold ? next : spans;
        }
        core_.k.index_scores(&tiles[i * count], count, weights_.row(group.row + i), out + i * stride_ + begin);
      }
    }
  }

  // Packs a block of entries.
  const char* pack(const Batch& batch, const RowGroup& group, int block, int thread) {
    char *packed = block_of(thread), *rows = packed + layout_.bytes;
    const size_t bytes = cache_.layout.row_bytes;
    const int begin = block * kBlockTokens, count = std::min(kBlockTokens, seen(group.position + group.count) - begin);
    for (int i = 0; i < count; i++)
      std::memcpy(rows + i * bytes, entries_.row(batch.slot(group.slot), begin + i), bytes);
    const void* gathered = rows;
    core_.k.pack_latent(layout_, &gathered, &gathered, kBlockTokens, count, packed);
    return packed;
  }

  // The spans of a block of a group's context. After the last one, the last again.
  void find_spans(const Batch& batch, const RowGroup& group, int block, const void** found) const {
    const std::vector<int32_t>& spans = batch.slot(group.slot).spans[cache_group_];
    const int size = cache_.layout.span_size, last = (group.position + group.count - 1) / size;
    for (int i = 0; i < kBlockTokens / size; i++)
      found[i] = cache_.span(spans[std::min(last, block * (kBlockTokens / size) + i)], 0);
  }

  void select(const RowGroup& group, int i, int thread, const float* row_scores) const {
    float* out = out_.row(group.row + i);
    const int positions = group.position + i + 1, entries = seen(positions);
    select_largest(row_scores, entries, count_,
                   reinterpret_cast<uint32_t*>(scores(kIndexRows * core_.pool.size() + thread)), out);
    if (!positions_) return;
    for (int e = count_ - 1; e >= 0; e--)  // from the last one on, which is not written over before it is read
      for (int first = (int)out[e] * rate_, p = rate_ - 1; p >= 0; p--) out[e * rate_ + p] = (float)(first + p);
    for (int p = 0; p < rate_ - 1; p++)
      out[count_ * rate_ + p] = entries * rate_ + p < positions ? (float)(entries * rate_ + p) : -1.0f;
  }

  void select_shared(int thread) const {
    const auto [r0, r1] = part(groups_.back().scores + groups_.back().count, thread, core_.pool.size());
    for (const RowGroup& group : groups_)
      for (int i = std::max(0, r0 - group.scores); i < std::min(group.count, r1 - group.scores); i++)
        select(group, i, thread, scores(group.scores + i));
  }

  const Core& core_;
  const LayerCache cache_;
  const int cache_group_;
  const Tensor queries_, weights_, out_;
  Tensor keys_;               // without a rate
  const int rate_;            // 0: no entries
  const bool positions_;      // what is output: the positions of selected entries
  const int count_;           // how many are selected
  const EntryCache entries_;  // with a rate
  const SpanLayout layout_;   // of what is scored
  const size_t stride_;       // scores of a row
  const Buffer& scratch_;     // also values of select_largest, behind the scores of all threads
  std::vector<RowGroup> groups_;
  std::vector<Unit> units_;  // if threads share groups
  bool shared_ = false;
  std::atomic<int> taken_{0};
};

}  // namespace

size_t indexer_bytes(int threads, int max_length, int heads, int dim, const SpanLayout* entries) {
  const size_t row = (size_t)context_blocks(max_length) * kBlockTokens * sizeof(float);
  return threads *
         ((kIndexRows + 1) * row + kIndexRows * row_query_bytes(heads, dim) + (entries ? block_bytes(*entries) : 0));
}

void select_largest(const float* scores, int n, int count, uint32_t* scratch, float* out) {
  // Finds the smallest selected value by its first 11 bits, then by the next 11 and the last 10 among those candidates.
  for (int i = 0; i < n; i++) scratch[i] = ordered(scores[i]);
  constexpr int kShifts[] = {21, 10, 0}, kBuckets = 1 << 11;
  int candidates = n, left = count;  // of the candidates, so many are selected
  for (const int shift : kShifts) {
    int counts[kBuckets] = {}, bucket = kBuckets - 1;
    const auto bucket_of = [&](uint32_t x) { return (int)(x >> shift & (shift ? kBuckets - 1 : kBuckets / 2 - 1)); };
    for (int i = 0; i < candidates; i++) counts[bucket_of(scratch[i])]++;
    for (; counts[bucket] < left; bucket--) left -= counts[bucket];
    int kept = 0;
    for (int i = 0; i < candidates; i++)
      if (bucket_of(scratch[i]) == bucket) scratch[kept++] = scratch[i];
    candidates = kept;
  }
  const uint32_t bound = scratch[0];  // all candidates are equal
  for (int i = 0; i < n && count; i++) {
    const uint32_t x = ordered(scores[i]);
    if (x < bound || (x == bound && left == 0)) continue;
    left -= x == bound, count--;
    *out++ = (float)i;
  }
}

const RegisterCpuOp kIndexer({{Op::indexer}}, bind_op<Indexer>);

}  // namespace as
