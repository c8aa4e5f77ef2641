// A state that advances only at multiples of kStateStep positions (docs/decisions/recurrent.md): each row sees the
// state at the last multiple and the rows since. So a row's sums are the same whether its chunk is computed at once or
// row by row.
//
// A unit of work is a group of heads with the same keys. A slot's page has, for each unit, the state of each of its
// heads [key dim, value dim], and a ring of the rows of two chunks by position: the key, and for each head the decay
// since the chunk's begin and the delta, the value that the row adds to the state for its key. A second chunk has rows
// before the state has advanced to it only if drafts reach beyond a multiple: then these rows see a temporary state.
#pragma once
#include "common/exact.h"
#include "cpu/ops/ops.h"

namespace as {

class DeferredState : public BoundOp {
 public:
  static constexpr int kChunk = kStateStep, kRing = 2 * kChunk;
  static_assert(kMostDrafts <= kChunk);

  void begin(const Batch& batch) override { pages_.begin(batch); }

  void run(const Batch& batch, int thread) override {
    const auto [t0, t1] = part((int)batch.items.size() * units_, thread, core_.pool.size());
    for (int t = t0; t < t1; t++) compute(batch.items[t / units_], t % units_, thread);
  }

 protected:
  // A unit's part of a page.
  struct Page {
    float* state;
    double* totals;  // [heads, ring, decays]
    float *keys, *deltas;
  };

  // Memory of a thread.
  struct Own {
    std::vector<float> decayed, factors, state;
  };

  // group: heads of a unit. decays: of a row and head, 1 or the key dim.
  DeferredState(const Binding& b, int units, int group, int key, int value, int decays)
      : core_(b.core),
        units_(units),
        group_(group),
        key_(key),
        value_(value),
        decays_(decays),
        bytes_(deferred_state_bytes(group, key, value, decays)),
        pages_(b.slot_pages({units * bytes_.state, units * bytes_.recent})) {
    for (int i = 0; i < core_.pool.size(); i++)
      own_.push_back(
          {std::vector<float>(key), std::vector<float>(key * kChunk), std::vector<float>((size_t)group * key * value)});
  }

  // Computes rows [first, first + count) of the chunk that begins at position `at`; `row` is the first one's row of the
  // step.
  virtual void chunk(const Page& p, int at, int first, int count, const float* state, int row, int unit,
                     int thread) = 0;

  // y = x * e^(later - earlier), for each channel or all
  void decay(const float* x, const double* later, const double* earlier, float* y) const {
    if (decays_ > 1) return core_.k.decay(x, later, earlier, y, key_);
    const float factor = (float)exact::exp(*later - (earlier ? *earlier : 0.0));
    for (int c = 0; c < key_; c++) y[c] = x[c] * factor;
  }

  const Core& core_;
  const int units_, group_, key_, value_, decays_;
  std::vector<Own> own_;

 private:
  Page page(int slot, int unit) const {
    Page p{};
    p.state = reinterpret_cast<float*>(pages_.state(slot) + bytes_.state * unit);
    p.totals = reinterpret_cast<double*>(pages_.recent(slot) + bytes_.recent * unit);
    p.keys = reinterpret_cast<float*>(p.totals + (size_t)kRing * group_ * decays_);
    p.deltas = p.keys + (size_t)kRing * key_;
    return p;
  }

  void compute(const Item& item, int unit, int thread) {
    const Page p = page(item.slot, unit);
    Own& own = own_[thread];
    if (item.start == 0) std::fill_n(p.state, own.state.size(), 0.0f);
    const int end = item.start + item.count, kept = state_position(end - item.drafts);
    float* state = p.state;
    int at = pages_.position(item.slot);  // position of `state`
    for (int position = item.start; position < end;) {
      for (const int begin = state_position(position); at < begin; at += kChunk) {
        if (at == kept) {  // drafts beyond a multiple
          std::copy_n(state, own.state.size(), own.state.data());
          state = own.state.data();
        }
        advance(p, at, state, own);
      }
      const int rows = std::min(end, at + kChunk) - position;
      chunk(p, at, position - at, rows, state, item.row + position - item.start, unit, thread);
      position += rows;
    }
    for (; at < kept; at += kChunk) advance(p, at, p.state, own);
  }

  // Advances the state over the full chunk that begins at position `at`.
  void advance(const Page& p, int at, float* state, Own& own) const {
    const int ring = at % kRing;
    const float* keys = p.keys + (size_t)ring * key_;
    for (int g = 0; g < group_; g++) {
      const double *totals = p.totals + ((size_t)g * kRing + ring) * decays_, *last = totals + (kChunk - 1) * decays_;
      for (int j = 0; j < kChunk; j++) {
        decay(keys + j * key_, last, totals + j * decays_, own.decayed.data());
        for (int c = 0; c < key_; c++) own.factors[c * kChunk + j] = own.decayed[c];
      }
      float* s = state + (size_t)g * key_ * value_;
      for (int c = 0; c < key_; c++)
        core_.k.scale(s + (size_t)c * value_, (float)exact::exp(last[decays_ > 1 ? c : 0]), value_);
      core_.k.add_products(own.factors.data(), kChunk, key_, p.deltas + ((size_t)g * kRing + ring) * value_, value_,
                           kChunk, s, value_, value_);
    }
  }

  const PageBytes bytes_;  // of a unit
  SlotPages& pages_;
};

}  // namespace as
