// A state that advances only at multiples of kStateStep positions (docs/decisions/recurrent.md): each row sees the
// state at the last multiple and the rows since. So a row's sums are the same whether its chunk is computed at once or
// row by row.
//
// A unit of work is a group of heads with the same keys. A slot's page has, for each unit, the state of each of its
// heads [key dim, value dim], and a ring of the rows of two chunks by position: the key, and for each head the decay
// since the chunk's begin and the delta, the value that the row adds to the state for its key. A second chunk has rows
// before the state has advanced to it only if drafts reach beyond a multiple: then these rows see a temporary state.
// With a decay for each channel a row has two floats in place of the decay since the chunk's begin: its own decay and
// e^decay.
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

    // Of a head with a decay for each of its key's channels, [ring, channels] each.
    float* decays(int head, int channels) const {
      return reinterpret_cast<float*>(totals + (size_t)head * kRing * channels);
    }
    float* factors(int head, int channels) const { return decays(head, channels) + (size_t)kRing * channels; }
  };

  // Memory of a thread.
  struct Own {
    std::vector<float> factors, whole, state;
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
          {std::vector<float>(key * kChunk), std::vector<float>(key), std::vector<float>((size_t)group * key * value)});
  }

  // Computes rows [first, first + count) of the chunk that begins at position `at`; `row` is the first one's row of the
  // step.
  virtual void chunk(const Page& p, int at, int first, int count, const float* state, int row, int unit,
                     int thread) = 0;

  // Of head g of a full chunk, which begins at row `ring`: each key times its decay until the chunk's end, keys[channel
  // * kChunk + row], and the decay of the whole chunk, whole[channel].
  virtual void decay_chunk(const Page& p, int ring, int g, int thread, float* keys, float* whole) {
    const double *totals = p.totals + (size_t)g * kRing + ring, last = totals[kChunk - 1];
    for (int j = 0; j < kChunk; j++) {
      const float factor = (float)exact::exp(last - totals[j]);
      for (int c = 0; c < key_; c++) keys[c * kChunk + j] = p.keys[(size_t)(ring + j) * key_ + c] * factor;
    }
    std::fill_n(whole, key_, (float)exact::exp(last));
  }

  // y = x * e^decay
  void decay(const float* x, double decay, float* y) const {
    const float factor = (float)exact::exp(decay);
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
        advance(p, at, state, thread);
      }
      const int rows = std::min(end, at + kChunk) - position;
      chunk(p, at, position - at, rows, state, item.row + position - item.start, unit, thread);
      position += rows;
    }
    for (; at < kept; at += kChunk) advance(p, at, p.state, thread);
  }

  // Advances the state over the full chunk that begins at position `at`.
  void advance(const Page& p, int at, float* state, int thread) {
    const int ring = at % kRing;
    Own& own = own_[thread];
    for (int g = 0; g < group_; g++) {
      decay_chunk(p, ring, g, thread, own.factors.data(), own.whole.data());
      float* s = state + (size_t)g * key_ * value_;
      for (int c = 0; c < key_; c++) core_.k.scale(s + (size_t)c * value_, own.whole[c], value_);
      core_.k.add_products(own.factors.data(), kChunk, key_, p.deltas + ((size_t)g * kRing + ring) * value_, value_,
                           kChunk, s, value_, value_);
    }
  }

  const PageBytes bytes_;  // of a unit
  SlotPages& pages_;
};

}  // namespace as
