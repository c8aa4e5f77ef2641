// lora: y += scale * B (A x) for rows with an adapter, of all the adapter's targets among one linear's columns.
//
// Rows of one adapter are multiplied together: they are gathered first unless they are adjacent, or as they are
// prepared. Threads share out the products with A by adapter, target and rows; then, all of these being there, those
// with B by columns. A value is made by the matrices' recipe of its own row, then scaled, then added: so it depends on
// nothing else in the step, and rows without an adapter are not touched.
#include "cpu/ops/lora.h"

#include "cpu/ops/ops.h"
#include "cpu/ops/product.h"

namespace as {
namespace {

constexpr int kRowsTogether = 32, kPanelsTogether = 8;  // of B: what is added stays in the first-level cache

// Of a prepared row of A x; 0: it is taken as floats.
size_t inner_bytes(const Kernels& k, const AdapterLimits& limits) {
  return k.prepared(layout(1, limits.max_rank, k.rules, limits.format, 0)).bytes;
}

class Lora : public BoundOp {
 public:
  explicit Lora(const Binding& b)
      : core_(b.core),
        rows_(b.parts[0].in(1).of_outputs ? b.adapters->outputs : b.adapters->all),
        x_(b.parts[0].in(1)),
        y_(b.parts[0].in(0)),
        max_rank_(b.adapters->limits.max_rank),
        inner_width_((int)b.parts.size() * max_rank_),
        inner_stride_(inner_bytes(b.core.k, b.adapters->limits)),
        scratch_(b.scratch) {
    for (const Part& part : b.parts) targets_.push_back({part.op.integer("target"), part.op.integer("offset")});
    like_a_ = layout(1, x_.width, core_.k.rules, b.adapters->limits.format, 0);
  }

  bool needed(const Batch&) const override {
    for (const AdaptedRows::Group& group : rows_.groups)
      for (const Target& target : targets_)
        if (group.adapter->pair(target.number)) return true;
    return false;
  }

  void begin(const Batch&) override {
    products_.clear();
    gathered_ = core_.k.prepared(like_a_).bytes > 0;
    for (const AdaptedRows::Group& group : rows_.groups) {
      gathered_ |= !group.adjacent;
      for (int t = 0; t < (int)targets_.size(); t++)
        for (int r = 0; group.adapter->pair(targets_[t].number) && r < group.count; r += kRowsTogether)
          products_.push_back({&group, t, group.begin + r, std::min(kRowsTogether, group.count - r)});
    }
  }

  void run(const Batch&, int thread) override {
    const int threads = core_.pool.size();
    if (gathered_) {
      const auto [e0, e1] = part((long)rows_.rows.size(), thread, threads);
      for (int e = e0; e < e1; e++) gather(e);
      if (!core_.pool.barrier()) return;
    }
    const auto [u0, u1] = part((long)products_.size(), thread, threads);
    for (int u = u0; u < u1; u++) shrink(products_[u]);
    if (!core_.pool.barrier()) return;
    for (const AdaptedRows::Group& group : rows_.groups) expand(group, thread, threads);
  }

 private:
  struct Target {
    int number, offset;  // its first column of y
  };
  // Rows of one adapter by one target's A.
  struct Product {
    const AdaptedRows::Group* group;
    int target, begin, count;
  };

  size_t stride() const { return core_.k.prepared(like_a_).bytes; }
  float* floats(int entry) const { return scratch_.lora_rows.as<float>() + (size_t)entry * x_.width; }
  char* prepared(int entry) const { return scratch_.lora_rows.as() + entry * stride(); }
  float* inner(int entry, int target) const {
    return scratch_.lora_inner.as<float>() + (size_t)entry * inner_width_ + (size_t)target * max_rank_;
  }
  char* prepared_inner(int entry, int target) const {
    return scratch_.lora_prepared.as() + ((size_t)target * rows_.rows.size() + entry) * inner_stride_;
  }

  void gather(int entry) const {
    const float* x = x_.row(rows_.rows[entry]);
    if (stride()) core_.k.prepare(like_a_, x, prepared(entry));
    else std::copy_n(x, x_.width, floats(entry));
  }

  // A x, scaled.
  void shrink(const Product& p) const {
    const Adapter::Pair& pair = *p.group->adapter->pair(targets_[p.target].number);
    const bool copied = gathered_ && !stride();
    const Activations a{copied ? floats(p.begin) : x_.row(rows_.rows[p.begin]), x_.width, prepared(p.begin), stride()};
    core_.k.matmul(pair.a, a, nullptr, inner(p.begin, p.target), inner_width_, p.count, 0, pair.a.panels());
    for (int e = p.begin; e < p.begin + p.count; e++) {
      core_.k.scale(inner(e, p.target), pair.scale, pair.rank());
      if (inner_stride_) core_.k.prepare(pair.b, inner(e, p.target), prepared_inner(e, p.target));
    }
  }

  // B of that, added: this thread's columns.
  void expand(const AdaptedRows::Group& group, int thread, int threads) const {
    long panels = 0, before = 0;
    for (const Target& target : targets_)
      if (const Adapter::Pair* pair = group.adapter->pair(target.number)) panels += pair->b.panels();
    const auto [begin, end] = part(panels, thread, threads);
    for (int t = 0; t < (int)targets_.size(); t++) {
      const Adapter::Pair* pair = group.adapter->pair(targets_[t].number);
      if (!pair) continue;
      const long first = std::max<long>(0, begin - before), last = std::min<long>(pair->b.panels(), end - before);
      before += pair->b.panels();
      for (long p = first; p < last; p += kPanelsTogether)
        for (int r = 0; r < group.count; r += kRowsTogether)
          add(*pair, t, thread, (int)p, (int)std::min<long>(kPanelsTogether, last - p), group.begin + r,
              std::min(kRowsTogether, group.count - r));
    }
  }

  void add(const Adapter::Pair& pair, int t, int thread, int panel, int panels, int entry, int count) const {
    Packed part = pair.b;
    const int column = panel * part.panel;
    part.data += (size_t)panel * part.panel_bytes, part.n = std::min(part.n - column, panels * part.panel);
    const int ld = kPanelsTogether * part.panel;
    float* sums = scratch_.lora_added.as<float>() + (size_t)thread * kRowsTogether * ld;
    const Activations a{inner(entry, t), inner_width_, inner_stride_ ? prepared_inner(entry, t) : nullptr,
                        inner_stride_};
    core_.k.matmul(part, a, nullptr, sums, ld, count, 0, part.panels());
    for (int i = 0; i < count; i++)
      core_.k.add(y_.row(rows_.rows[entry + i]) + targets_[t].offset + column, sums + (size_t)i * ld, part.n);
  }

  const Core& core_;
  const AdaptedRows& rows_;
  const Tensor x_, y_;
  const int max_rank_, inner_width_;
  const size_t inner_stride_;  // of prepared rows of A x
  const Scratch& scratch_;
  std::vector<Target> targets_;
  Packed like_a_{};  // a matrix that takes the same rows as every A
  std::vector<Product> products_;
  bool gathered_ = false;
};

}  // namespace

void LoraBytes::reserve(const Kernels& k, int threads, const AdapterLimits& limits, int count, int width, int targets) {
  const size_t row = k.prepared(layout(1, width, k.rules, limits.format, 0)).bytes;
  rows = std::max(rows, count * (row ? row : width * sizeof(float)));
  inner = std::max(inner, (size_t)count * targets * limits.max_rank * sizeof(float));
  prepared = std::max(prepared, (size_t)count * targets * inner_bytes(k, limits));
  added = (size_t)threads * kRowsTogether * kPanelsTogether * k.rules.panel * sizeof(float);
}

std::unique_ptr<BoundOp> bind_lora(const Binding& b) { return std::make_unique<Lora>(b); }

}  // namespace as
