// gated_delta: the gated delta rule (docs/decisions/recurrent.md). A unit is a key head with its value heads; its keys
// are normalized, and a delta is the solution for its row.
//
// With a decay for each channel, no exponential is taken for a pair of rows: what is left of a key at a later row is
// the key times the factors e^decay of the rows between, multiplied from the later row backwards. So it depends on no
// other row, and nothing can overflow. Over whole chunks decays are summed in double instead: rounding does not add up.
#include <cmath>

#include "cpu/ops/deferred_state.h"

namespace as {
namespace {

constexpr double kLengthEps = 1e-6;  // added to the squared length of query and key heads

class GatedDelta : public DeferredState {
 public:
  explicit GatedDelta(const Binding& b)
      : GatedDelta(b, b.parts[0].in(), b.parts[0].out(), b.parts[0].op.integer("key_dim"),
                   b.parts[0].op.integer("value_dim")) {}

 private:
  GatedDelta(const Binding& b, const Tensor& x, const Tensor& y, int key, int value)
      : DeferredState(b, (x.width - y.width) / (2 * key), y.width / value / ((x.width - y.width) / (2 * key)), key,
                      value, b.parts[0].op.flag("channels") ? key : 1),
        x_(x),
        gates_(b.parts[0].in(1)),
        y_(y),
        heads_(units_ * group_),
        channels_(b.parts[0].op.flag("channels")),
        bound_(b.parts[0].op.number("lower_bound")),
        dt_bias_(b.parts[0].vector(1)) {
    for (int h = 0; h < heads_; h++) rates_.push_back(-exact::exp(b.parts[0].vector()[h]));
    for (int i = 0; i < core_.pool.size(); i++) rows_.emplace_back(*this);
  }

  // Memory of a thread.
  struct Rows {
    std::vector<float> q, x, decayed, whole;
    std::vector<double> sums;
    std::vector<float> products, kk, kq, factors, k_weights, q_weights;
    explicit Rows(const GatedDelta& op)
        : q(kChunk * op.key_),
          x(2 * kChunk * op.key_),
          decayed(op.channels_ ? kChunk * op.key_ : 0),
          whole(op.key_),
          sums(op.key_),
          products(2 * kChunk * op.value_),
          kk(kChunk * kChunk),
          kq(kChunk * kChunk),
          factors(kChunk),
          k_weights(kChunk),
          q_weights(kChunk) {}
  };

  void chunk(const Page& p, int at, int first, int count, const float* state, int row, int key_head,
             int thread) override {
    Rows& own = rows_[thread];
    const Kernels& k = core_.k;
    const int ring = at % kRing;
    float* keys = p.keys + (size_t)ring * key_;
    for (int r = 0; r < count; r++) {
      const float* q = x_.row(row + r) + key_head * key_;
      normalize(q + units_ * key_, 1.0, keys + (first + r) * key_);
      normalize(q, 1 / std::sqrt((double)key_), &own.q[r * key_]);
      if (channels_) continue;
      k.dots(keys, key_, first + r + 1, keys + (first + r) * key_, &own.q[r * key_], key_, &own.kk[r * kChunk],
             &own.kq[r * kChunk]);
    }
    for (int g = 0; g < group_; g++) {
      const int head = key_head * group_ + g;
      double* totals = p.totals + (size_t)g * kRing + ring;  // of a decay for the head
      float* deltas = p.deltas + ((size_t)g * kRing + ring) * value_;
      for (int r = 0; r < count; r++) {
        const int i = first + r;
        if (channels_) {
          see_channels(p, ring, i, r, g, head, gates_.row(row + r), own);
          continue;
        }
        const double a = (double)gates_.row(row + r)[head] + dt_bias_[head];
        totals[i] = (i ? totals[i - 1] : 0.0) +
                    (bound_ ? bound_ * exact::sigmoid(-rates_[head] * a) : rates_[head] * exact::softplus(a));
        decay(keys + i * key_, totals[i], &own.x[2 * r * key_]);
        decay(&own.q[r * key_], totals[i], &own.x[(2 * r + 1) * key_]);
      }
      // What the state answers to each row's key and query.
      std::fill_n(own.products.data(), 2 * count * value_, 0.0f);
      k.add_products(own.x.data(), key_, 2 * count, state + (size_t)g * key_ * value_, value_, key_,
                     own.products.data(), value_, value_);
      for (int r = 0; r < count; r++) {
        const int i = first + r;
        if (!channels_) weigh(totals, i, r, own);
        const float *k_weights = channels_ ? &own.kk[r * kChunk] : own.k_weights.data(),
                    *q_weights = channels_ ? &own.kq[r * kChunk] : own.q_weights.data();
        float *known = &own.products[2 * r * value_], *out = known + value_, *delta = deltas + i * value_;
        k.add_products(k_weights, 0, 1, deltas, value_, i, known, 0, value_);
        const float* v = x_.row(row + r) + 2 * units_ * key_ + head * value_;
        const double b = gates_.row(row + r)[heads_ * decays_ + head];
        const float beta = (float)exact::sigmoid(b);
        for (int d = 0; d < value_; d++) delta[d] = beta * (v[d] - known[d]);
        k.add_products(q_weights, 0, 1, deltas, value_, i + 1, out, 0, value_);
        std::copy_n(out, value_, y_.row(row + r) + head * value_);
      }
    }
  }

  void normalize(const float* x, double scale, float* y) const {
    const float factor = (float)(scale / std::sqrt(core_.k.square_sum(x, key_) + kLengthEps));
    for (int c = 0; c < key_; c++) y[c] = x[c] * factor;
  }

  // With a decay for each channel: keeps the decays of row i of the chunk, the call's r-th; forms what it takes of the
  // deltas of rows [0, i], and its key and query for the state.
  void see_channels(const Page& p, int ring, int i, int r, int g, int head, const float* gates, Rows& own) const {
    const Kernels& k = core_.k;
    const float *keys = p.keys + (size_t)ring * key_, *key = keys + i * key_, *query = &own.q[r * key_];
    const size_t begin = (size_t)ring * key_;
    float *decays = p.decays(g, key_) + begin, *factors = p.factors(g, key_) + begin, *x = &own.x[2 * r * key_];
    const float *gate = gates + head * key_, *bias = dt_bias_ + head * key_;
    if (bound_) k.bounded_decays(gate, bias, rates_[head], bound_, key_, decays + i * key_, factors + i * key_);
    else k.channel_decays(gate, bias, rates_[head], key_, decays + i * key_, factors + i * key_);
    k.decay_rows(keys, factors, i + 1, key_, own.decayed.data(), own.whole.data());
    k.dots(own.decayed.data(), key_, i + 1, key, query, key_, &own.kk[r * kChunk], &own.kq[r * kChunk]);
    for (int c = 0; c < key_; c++) x[c] = key[c] * own.whole[c], x[key_ + c] = query[c] * own.whole[c];
  }

  void decay_chunk(const Page& p, int ring, int g, int thread, float* keys, float* whole) override {
    if (!channels_) return DeferredState::decay_chunk(p, ring, g, thread, keys, whole);
    Rows& own = rows_[thread];
    const size_t begin = (size_t)ring * key_;
    const float* decays = p.decays(g, key_) + begin;
    core_.k.decay_rows(p.keys + begin, p.factors(g, key_) + begin, kChunk, key_, own.decayed.data(), whole);
    std::fill(own.sums.begin(), own.sums.end(), 0.0);
    for (int j = 0; j < kChunk; j++)
      for (int c = 0; c < key_; c++) {
        keys[c * kChunk + j] = own.decayed[j * key_ + c];
        own.sums[c] -= decays[j * key_ + c];
      }
    core_.k.decay_factors(0.0, own.sums.data(), key_, whole);
  }

  // What row i of the chunk, the call's r-th, takes of the deltas of rows [0, i] for its key and its query.
  void weigh(const double* totals, int i, int r, Rows& own) const {
    core_.k.decay_factors(totals[i], totals, i + 1, own.factors.data());
    for (int j = 0; j <= i; j++) {
      own.k_weights[j] = own.factors[j] * own.kk[r * kChunk + j];
      own.q_weights[j] = own.factors[j] * own.kq[r * kChunk + j];
    }
  }

  const Tensor x_, gates_, y_;
  const int heads_;
  const bool channels_;
  const double bound_;  // 0: none
  const float* dt_bias_;
  std::vector<double> rates_;
  std::vector<Rows> rows_;
};

}  // namespace

PageBytes deferred_state_bytes(int group, int key_dim, int value_dim, int decays) {
  const size_t row = sizeof(double) * group * decays + sizeof(float) * ((size_t)key_dim + (size_t)group * value_dim);
  return {SlotPages::rounded(sizeof(float) * group * key_dim * value_dim),
          SlotPages::rounded(DeferredState::kRing * row)};
}

const RegisterCpuOp kGatedDelta({{Op::gated_delta}}, bind_op<GatedDelta>);

}  // namespace as
