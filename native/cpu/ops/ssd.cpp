// ssd: Mamba2's selective state space (docs/decisions/recurrent.md). B is the key, C the query, and a delta is dt x, so
// the rows of a chunk do not depend on one another. Heads of a group of B and C are computed in units of at most 8, so
// that models with one group keep all threads at work; each unit has a copy of B in its ring.
#include "cpu/ops/deferred_state.h"

namespace as {
namespace {

// The heads of a unit: those of a group, divided into the fewest equal parts of at most 8. Each part repeats 3 % of a
// prompt's products.
int heads_of_unit(int heads) {
  constexpr int kMost = 8;
  for (int parts = (heads + kMost - 1) / kMost;; parts++)
    if (heads % parts == 0) return heads / parts;
}

class Ssd : public DeferredState {
 public:
  explicit Ssd(const Binding& b)
      : Ssd(b, b.parts[0].in(), b.parts[0].out(), b.parts[0].op.integer("state_dim"),
            b.parts[0].op.integer("head_dim")) {}

 private:
  Ssd(const Binding& b, const Tensor& x, const Tensor& y, int state_dim, int head_dim)
      : Ssd(b, x, y, state_dim, head_dim, y.width / head_dim, (x.width - y.width) / (2 * state_dim)) {}

  Ssd(const Binding& b, const Tensor& x, const Tensor& y, int state_dim, int head_dim, int heads, int groups)
      : DeferredState(b, heads / heads_of_unit(heads / groups), heads_of_unit(heads / groups), state_dim, head_dim, 1),
        x_(x),
        steps_(b.parts[0].in(1)),
        y_(y),
        groups_(groups),
        dt_bias_(b.parts[0].vector(1)),
        d_(b.parts[0].vector(2)),
        least_(b.parts[0].op.number("least_step")),
        most_(b.parts[0].op.number("most_step")) {
    for (int h = 0; h < heads; h++) rates_.push_back(-exact::exp(b.parts[0].vector()[h]));
    rows_.resize(core_.pool.size(), {std::vector<float>(kChunk * key_), std::vector<float>(kChunk * kChunk),
                                     std::vector<float>(kChunk * kChunk)});
  }

  // Memory of a thread: decayed C; products of B and C, and these with decays, by row and earlier row.
  struct Rows {
    std::vector<float> c, products, weights;
  };

  void chunk(const Page& p, int at, int first, int count, const float* state, int row, int unit, int thread) override {
    const Kernels& k = core_.k;
    Rows& own = rows_[thread];
    const int ring = at % kRing, group = unit * groups_ / units_;
    float* keys = p.keys + (size_t)ring * key_;
    const auto b_of = [&](int r) { return x_.row(row + r) + y_.width + group * key_; };
    const auto c_of = [&](int r) { return b_of(r) + groups_ * key_; };
    for (int r = 0; r < count; r++) {
      std::copy_n(b_of(r), key_, keys + (first + r) * key_);
      for (int j = 0; j <= first + r; j++) own.products[r * kChunk + j] = k.dot(keys + j * key_, c_of(r), key_);
    }
    for (int g = 0; g < group_; g++) {
      const int head = unit * group_ + g;
      double* totals = p.totals + (size_t)g * kRing + ring;
      float* deltas = p.deltas + ((size_t)g * kRing + ring) * value_;
      for (int r = 0; r < count; r++) {
        const int i = first + r;
        const double dt = step(steps_.row(row + r)[head], head);
        totals[i] = (i ? totals[i - 1] : 0.0) + rates_[head] * dt;
        const float* x = x_.row(row + r) + head * value_;
        float *delta = deltas + i * value_, *y = y_.row(row + r) + head * value_;
        for (int d = 0; d < value_; d++) delta[d] = (float)dt * x[d], y[d] = d_[head] * x[d];
        decay(c_of(r), totals[i], &own.c[r * key_]);
        double now[kChunk];
        std::fill_n(now, i + 1, totals[i]);
        k.decay(&own.products[r * kChunk], now, totals, &own.weights[r * kChunk], i + 1);
      }
      float* y = y_.row(row) + head * value_;
      k.add_products(own.c.data(), key_, count, state + (size_t)g * key_ * value_, value_, key_, y, y_.width, value_);
      add_deltas(own.weights.data(), first, count, deltas, y);
    }
  }

  // Adds to each row of y the deltas of the rows up to its own, in ascending order. Four rows share the passes over the
  // deltas that all of them see.
  void add_deltas(const float* weights, int first, int count, const float* deltas, float* y) const {
    for (int r = 0; r < count; r += 4, weights += 4 * kChunk, y += 4 * (size_t)y_.width) {
      const int rows = std::min(4, count - r), shared = first + r + 1;
      core_.k.add_products(weights, kChunk, rows, deltas, value_, shared, y, y_.width, value_);
      for (int i = 1; i < rows; i++)
        core_.k.add_products(weights + i * kChunk + shared, 0, 1, deltas + shared * value_, value_, i,
                             y + i * (size_t)y_.width, 0, value_);
    }
  }

  // log(1 + exp(dt + dt_bias)), within its limits
  double step(float dt, int head) const {
    return std::clamp(exact::softplus((double)dt + dt_bias_[head]), least_, most_);
  }

  const Tensor x_, steps_, y_;
  const int groups_;
  const float *dt_bias_, *d_;
  const double least_, most_;  // limits of dt
  std::vector<double> rates_;
  std::vector<Rows> rows_;
};

}  // namespace

PageBytes ssd_bytes(int heads, int groups, int state_dim, int head_dim) {
  const int unit = heads_of_unit(heads / groups);
  const PageBytes bytes = deferred_state_bytes(unit, state_dim, head_dim, 1);
  return {heads / unit * bytes.state, heads / unit * bytes.recent};
}

const RegisterCpuOp kSsd({{Op::ssd}}, bind_op<Ssd>);

}  // namespace as
