// gated_delta: the gated delta rule (docs/decisions/recurrent.md). The state advances only at multiples of kChunk
// positions; each row sees the state at the last multiple and the rows since. So a row's sums are the same whether its
// chunk is computed at once or row by row.
//
// A slot's page has, for each key head, the state of each of its value heads [key dim, value dim], and a ring of the
// rows of two chunks by position: the normalized key, and for each value head the decay since the chunk's begin and the
// solved delta. A second chunk has rows before the state has advanced to it only if drafts reach beyond a multiple:
// then these rows see a temporary state.
#include <cmath>
#include <cstring>

#include "common/exact.h"
#include "cpu/ops/ops.h"

namespace as {
namespace {

constexpr int kChunk = kStateStep, kRing = 2 * kChunk;
static_assert(kMostDrafts <= kChunk);
constexpr double kLengthEps = 1e-6;  // added to the squared length of query and key heads

class GatedDelta : public BoundOp {
 public:
  explicit GatedDelta(const Binding& b)
      : core_(b.core),
        x_(b.parts[0].in()),
        gates_(b.parts[0].in(1)),
        y_(b.parts[0].out()),
        key_(b.parts[0].op.integer("key_dim")),
        value_(b.parts[0].op.integer("value_dim")),
        heads_(y_.width / value_),
        key_heads_((x_.width - y_.width) / (2 * key_)),
        group_(heads_ / key_heads_),
        channels_(b.parts[0].op.flag("channels")),
        decays_(channels_ ? key_ : 1),
        dt_bias_(b.parts[0].vector(1)),
        bytes_(gated_delta_bytes(group_, key_, value_, decays_)),
        pages_(b.slot_pages({key_heads_ * bytes_.state, key_heads_ * bytes_.recent})) {
    for (int h = 0; h < heads_; h++) rates_.push_back(-exact::exp(b.parts[0].vector()[h]));
    for (int i = 0; i < core_.pool.size(); i++) own_.emplace_back(*this);
  }

  void begin(const Batch& batch) override { pages_.begin(batch); }

  void run(const Batch& batch, int thread) override {
    const auto [t0, t1] = part((int)batch.items.size() * key_heads_, thread, core_.pool.size());
    for (int t = t0; t < t1; t++) compute(batch.items[t / key_heads_], t % key_heads_, own_[thread]);
  }

 private:
  // Memory of a thread.
  struct Own {
    std::vector<float> q, x, products, kk, kq, k_weights, q_weights, decayed, factors, state;
    explicit Own(const GatedDelta& op)
        : q(kChunk * op.key_),
          x(2 * kChunk * op.key_),
          products(2 * kChunk * op.value_),
          kk(kChunk * kChunk),
          kq(kChunk * kChunk),
          k_weights(kChunk),
          q_weights(kChunk),
          decayed(op.key_),
          factors(op.key_ * kChunk),
          state((size_t)op.group_ * op.key_ * op.value_) {}
  };

  // A key head's part of a page.
  struct Page {
    float* state;
    double* totals;  // [value heads of the key head, ring, decays]
    float *keys, *deltas;
  };

  Page page(int slot, int key_head) const {
    Page p{};
    p.state = reinterpret_cast<float*>(pages_.state(slot) + bytes_.state * key_head);
    p.totals = reinterpret_cast<double*>(pages_.recent(slot) + bytes_.recent * key_head);
    p.keys = reinterpret_cast<float*>(p.totals + (size_t)kRing * group_ * decays_);
    p.deltas = p.keys + (size_t)kRing * key_;
    return p;
  }

  void compute(const Item& item, int key_head, Own& own) {
    const Page p = page(item.slot, key_head);
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
      chunk(p, at, position - at, rows, state, item.row + position - item.start, key_head, own);
      position += rows;
    }
    for (; at < kept; at += kChunk) advance(p, at, p.state, own);
  }

  // Rows [first, first + count) of the chunk that begins at position `at`; `row` is the first one's row of the step.
  void chunk(const Page& p, int at, int first, int count, const float* state, int row, int key_head, Own& own) {
    const Kernels& k = core_.k;
    const int ring = at % kRing;
    float* keys = p.keys + (size_t)ring * key_;
    for (int r = 0; r < count; r++) {
      const float* q = x_.row(row + r) + key_head * key_;
      normalize(q + key_heads_ * key_, 1.0, keys + (first + r) * key_);
      normalize(q, 1 / std::sqrt((double)key_), &own.q[r * key_]);
      if (channels_) continue;
      for (int j = 0; j <= first + r; j++) {
        own.kk[r * kChunk + j] = k.dot(keys + j * key_, keys + (first + r) * key_, key_);
        own.kq[r * kChunk + j] = k.dot(keys + j * key_, &own.q[r * key_], key_);
      }
    }
    for (int g = 0; g < group_; g++) {
      const int head = key_head * group_ + g;
      double* totals = p.totals + ((size_t)g * kRing + ring) * decays_;
      float* deltas = p.deltas + ((size_t)g * kRing + ring) * value_;
      for (int r = 0; r < count; r++) {
        double* total = totals + (first + r) * decays_;
        add_decays(gates_.row(row + r), head, first + r ? total - decays_ : nullptr, total);
        decay(keys + (first + r) * key_, total, nullptr, &own.x[2 * r * key_]);
        decay(&own.q[r * key_], total, nullptr, &own.x[(2 * r + 1) * key_]);
      }
      // What the state answers to each row's key and query.
      std::fill_n(own.products.data(), 2 * count * value_, 0.0f);
      k.add_products(own.x.data(), key_, 2 * count, state + (size_t)g * key_ * value_, value_, key_,
                     own.products.data(), value_, value_);
      for (int r = 0; r < count; r++) {
        const int i = first + r;
        weigh(keys, totals, i, r, own);
        float *known = &own.products[2 * r * value_], *out = known + value_, *delta = deltas + i * value_;
        k.add_products(own.k_weights.data(), 0, 1, deltas, value_, i, known, 0, value_);
        const float* v = x_.row(row + r) + 2 * key_heads_ * key_ + head * value_;
        const double b = gates_.row(row + r)[heads_ * decays_ + head];
        const float beta = (float)(1 / (1 + exact::exp(-b)));
        for (int d = 0; d < value_; d++) delta[d] = beta * (v[d] - known[d]);
        k.add_products(own.q_weights.data(), 0, 1, deltas, value_, i + 1, out, 0, value_);
        std::copy_n(out, value_, y_.row(row + r) + head * value_);
      }
    }
  }

  void normalize(const float* x, double scale, float* y) const {
    const float factor = (float)(scale / std::sqrt(core_.k.square_sum(x, key_) + kLengthEps));
    for (int c = 0; c < key_; c++) y[c] = x[c] * factor;
  }

  // total = before - exp(A_log) log(1 + exp(a + dt_bias)), of a row's head
  void add_decays(const float* gates, int head, const double* before, double* total) const {
    for (int c = 0; c < decays_; c++) {
      const double a = (double)gates[head * decays_ + c] + dt_bias_[head * decays_ + c];
      const double softplus = std::max(a, 0.0) + exact::log(1 + exact::exp(-std::fabs(a)));
      total[c] = (before ? before[c] : 0.0) + rates_[head] * softplus;
    }
  }

  // y = x * e^(later - earlier), for each channel or all
  void decay(const float* x, const double* later, const double* earlier, float* y) const {
    if (channels_) return core_.k.decay(x, later, earlier, y, key_);
    const float factor = (float)exact::exp(*later - (earlier ? *earlier : 0.0));
    for (int c = 0; c < key_; c++) y[c] = x[c] * factor;
  }

  // What row i of the chunk, the call's r-th, takes of the deltas of rows [0, i] for its key and its query.
  void weigh(const float* keys, const double* totals, int i, int r, Own& own) const {
    const double* total = totals + i * decays_;
    for (int j = 0; j <= i; j++) {
      if (channels_) {
        decay(keys + j * key_, total, totals + j * decays_, own.decayed.data());
        own.k_weights[j] = core_.k.dot(own.decayed.data(), keys + i * key_, key_);
        own.q_weights[j] = core_.k.dot(own.decayed.data(), &own.q[r * key_], key_);
      } else {
        const float factor = (float)exact::exp(*total - totals[j]);
        own.k_weights[j] = factor * own.kk[r * kChunk + j];
        own.q_weights[j] = factor * own.kq[r * kChunk + j];
      }
    }
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
        core_.k.scale(s + (size_t)c * value_, (float)exact::exp(last[channels_ ? c : 0]), value_);
      core_.k.add_products(own.factors.data(), kChunk, key_, p.deltas + ((size_t)g * kRing + ring) * value_, value_,
                           kChunk, s, value_, value_);
    }
  }

  const Core& core_;
  const Tensor x_, gates_, y_;
  const int key_, value_, heads_, key_heads_, group_;  // group_: value heads of a key head
  const bool channels_;
  const int decays_;  // of a row and head
  const float* dt_bias_;
  const PageBytes bytes_;  // of a key head
  SlotPages& pages_;
  std::vector<double> rates_;
  std::vector<Own> own_;
};

}  // namespace

PageBytes gated_delta_bytes(int group, int key_dim, int value_dim, int decays) {
  const size_t row = sizeof(double) * group * decays + sizeof(float) * ((size_t)key_dim + (size_t)group * value_dim);
  return {SlotPages::rounded(sizeof(float) * group * key_dim * value_dim), SlotPages::rounded(kRing * row)};
}

const RegisterCpuOp kGatedDelta({{Op::gated_delta}}, bind_op<GatedDelta>);

}  // namespace as
