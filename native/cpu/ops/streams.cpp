// stream_weights, merge_streams, mix_streams: hyper-connections (mHC) over several residual streams.
#include <algorithm>
#include <cmath>

#include "common/exact.h"
#include "cpu/ops/ops.h"

namespace as {
namespace {

class StreamWeights : public RowOp {
 public:
  explicit StreamWeights(const Binding& b)
      : core_(b.core),
        streams_(b.parts[0].op.integer("streams")),
        iterations_(b.parts[0].op.integer("iterations")),
        eps_((float)b.parts[0].op.number("eps")),
        factors_(b.parts[0].vector(0)),
        base_(b.parts[0].vector(1)),
        x_(b.parts[0].in()) {}

  int rows(const Batch& batch) const override { return x_.rows(batch); }

  void run_rows(const Batch&, const RowRange& range, int thread) override {
    const auto [r0, r1] = range.of(thread, core_.pool.size());
    std::vector<float> sums(streams_);
    for (int r = r0; r < r1; r++) {
      float* x = x_.row(r);
      for (int i = 0; i < x_.width; i++) x[i] = x[i] * factors_[std::min(i / streams_, 2)] + base_[i];
      for (int i = 0; i < streams_; i++) x[i] = (float)exact::sigmoid(x[i]) + eps_;
      if (x_.width == streams_) continue;
      for (int i = streams_; i < 2 * streams_; i++) x[i] = 2 * (float)exact::sigmoid(x[i]);
      mix(x + 2 * streams_, sums.data());
    }
  }

 private:
  // Sinkhorn and Knopp: nearly a doubly stochastic matrix.
  void mix(float* m, float* sums) const {
    const int n = streams_;
    for (int j = 0; j < n; j++) {
      float *row = m + j * n, most = *std::max_element(row, row + n), sum = 0;
      for (int k = 0; k < n; k++) sum += row[k] = (float)exact::exp((double)row[k] - most);
      for (int k = 0; k < n; k++) row[k] = row[k] / sum + eps_;
    }
    for (int i = 0; i < iterations_; i++) {
      if (i > 0)
        for (int j = 0; j < n; j++) {
          float *row = m + j * n, sum = eps_;
          for (int k = 0; k < n; k++) sum += row[k];
          for (int k = 0; k < n; k++) row[k] /= sum;
        }
      std::fill_n(sums, n, eps_);
      for (int j = 0; j < n; j++)
        for (int k = 0; k < n; k++) sums[k] += m[j * n + k];
      for (int j = 0; j < n; j++)
        for (int k = 0; k < n; k++) m[j * n + k] /= sums[k];
    }
  }

  const Core& core_;
  const int streams_, iterations_;
  const float eps_;
  const float *const factors_, *const base_;
  const Tensor x_;
};

// Calls work(row, first column, end) for a thread's part of rows of `width` columns: whole rows or, of a single row,
// some columns.
template <typename Work>
void divide(const Core& core, const RowRange& range, int width, int thread, Work work) {
  const bool one = range.size() == 1;
  const auto [c0, c1] = one ? part(width, thread, core.pool.size()) : std::pair<int, int>(0, width);
  const auto [r0, r1] = one ? range : range.of(thread, core.pool.size());
  for (int r = r0; r < r1; r++) work(r, c0, c1);
}

class MergeStreams : public RowOp {
 public:
  explicit MergeStreams(const Binding& b)
      : core_(b.core), x_(b.parts[0].in()), out_(b.parts[0].out()), equal_(x_.width / out_.width) {
    if (b.parts[0].inputs.size() > 1) weights_ = b.parts[0].in(1);
    std::fill(equal_.begin(), equal_.end(), 1.0f / equal_.size());
  }

  int rows(const Batch& batch) const override { return x_.rows(batch); }

  void run_rows(const Batch&, const RowRange& range, int thread) override {
    std::vector<const float*> streams(equal_.size());
    divide(core_, range, out_.width, thread, [&](int r, int c0, int c1) {
      for (size_t i = 0; i < streams.size(); i++) streams[i] = x_.row(r) + i * out_.width + c0;
      const float* weights = weights_.width ? weights_.row(r) : equal_.data();
      core_.k.weighted_sum(streams.data(), weights, (int)streams.size(), out_.row(r) + c0, c1 - c0);
    });
  }

 private:
  const Core& core_;
  const Tensor x_, out_;
  Tensor weights_;            // of each row, if they are given
  std::vector<float> equal_;  // otherwise
};

class MixStreams : public RowOp {
 public:
  explicit MixStreams(const Binding& b)
      : core_(b.core), x_(b.parts[0].in()), y_(b.parts[0].in(1)), weights_(b.parts[0].in(2)) {}

  int rows(const Batch& batch) const override { return x_.rows(batch); }

  void run_rows(const Batch&, const RowRange& range, int thread) override {
    constexpr int kColumns = 256;  // of all streams at a time, which stay in the first-level cache
    const int n = x_.width / y_.width;
    std::vector<const float*> rows(1 + n);
    std::vector<float> weights(1 + n), mixed((size_t)n * kColumns);
    divide(core_, range, y_.width, thread, [&](int r, int c0, int c1) {
      const float *post = weights_.row(r) + n, *mix = post + n;
      for (int c = c0; c < c1; c += kColumns) {
        const int count = std::min(kColumns, c1 - c);
        rows[0] = y_.row(r) + c;
        for (int j = 0; j < n; j++) rows[1 + j] = x_.row(r) + (size_t)j * y_.width + c;
        for (int k = 0; k < n; k++) {
          weights[0] = post[k];
          for (int j = 0; j < n; j++) weights[1 + j] = mix[j * n + k];
          core_.k.weighted_sum(rows.data(), weights.data(), 1 + n, &mixed[(size_t)k * kColumns], count);
        }
        for (int k = 0; k < n; k++)
          std::copy_n(&mixed[(size_t)k * kColumns], count, x_.row(r) + (size_t)k * y_.width + c);
      }
    });
  }

 private:
  const Core& core_;
  const Tensor x_, y_, weights_;
};

}  // namespace

const RegisterCpuOp kStreamWeights({{Op::stream_weights}}, bind_op<StreamWeights>);
const RegisterCpuOp kMergeStreams({{Op::merge_streams}}, bind_op<MergeStreams>);
const RegisterCpuOp kMixStreams({{Op::mix_streams}}, bind_op<MixStreams>);

}  // namespace as
