// qk_square_sums, qk_norm: RMS norm over all queries and over all keys, whose heads are divided among ranks. Each rank
// sums its squares, all_reduce adds the sums in rank order, and each rank scales its heads.
#include <cmath>

#include "cpu/ops/ops.h"

namespace as {
namespace {

class QkSquareSums : public BoundOp {
 public:
  explicit QkSquareSums(const Binding& b)
      : core_(b.core),
        x_(b.parts[0].in()),
        sums_(b.parts[0].out()),
        q_columns_(b.parts[0].op.integer("q_columns")),
        k_offset_(b.parts[0].op.integer("k_offset")),
        k_columns_(b.parts[0].op.integer("k_columns")) {}

  void run(const Batch& batch, int thread) override {
    const auto [r0, r1] = my_rows(core_, x_, batch, thread);
    for (int r = r0; r < r1; r++) {
      sums_.row(r)[0] = core_.k.square_sum(x_.row(r), q_columns_);
      sums_.row(r)[1] = core_.k.square_sum(x_.row(r) + k_offset_, k_columns_);
    }
  }

 private:
  const Core& core_;
  const Tensor x_, sums_;
  const int q_columns_, k_offset_, k_columns_;
};

class QkNorm : public BoundOp {
 public:
  explicit QkNorm(const Binding& b)
      : core_(b.core),
        x_(b.parts[0].in()),
        sums_(b.parts[0].in(1)),
        q_(b.parts[0], 0, "q_columns", "q_width"),
        k_(b.parts[0], 1, "k_columns", "k_width"),
        eps_((float)b.parts[0].op.number("eps")) {}

  void run(const Batch& batch, int thread) override {
    const auto [r0, r1] = my_rows(core_, x_, batch, thread);
    for (int r = r0; r < r1; r++) {
      const float* sums = sums_.row(r);
      norm(q_, x_.row(r), sums[0]);
      if (k_.columns) norm(k_, x_.row(r) + q_.columns, sums[1]);
    }
  }

 private:
  // The rank's part of a vector that is `width` values wide over all ranks.
  struct Heads {
    const float* weight;
    int columns;
    float width;

    Heads(const Part& part, int i, const char* columns, const char* width)
        : weight(part.vector(i)), columns(part.op.integer(columns)), width((float)part.op.integer(width)) {}
  };

  void norm(const Heads& heads, float* x, float sum) const {
    core_.k.multiply(x, heads.weight, 1.0f / std::sqrt(sum / heads.width + eps_), heads.columns);
  }

  const Core& core_;
  const Tensor x_, sums_;
  const Heads q_, k_;
  const float eps_;
};

}  // namespace

const RegisterCpuOp kQkSquareSums({{Op::qk_square_sums}}, bind_op<QkSquareSums>);
const RegisterCpuOp kQkNorm({{Op::qk_norm}}, bind_op<QkNorm>);

}  // namespace as
