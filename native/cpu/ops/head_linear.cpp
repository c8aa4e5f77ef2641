// head_linear: multiplies each head with a matrix of its own from a stack. Threads divide the heads' panels equally,
// and convert the rows of their heads.
#include "cpu/ops/gemm.h"
#include "cpu/ops/ops.h"

namespace as {
namespace {

class HeadLinear : public BoundOp {
 public:
  explicit HeadLinear(const Binding& b)
      : core_(b.core),
        scratch_(b.scratch),
        part_(b.parts[0]),
        in_(part_.in()),
        out_(part_.out()),
        m_(part_.matrix()),
        heads_(part_.op.integer("heads")),
        offset_(part_.op.integer("offset")) {}

  void run(const Batch& batch, int thread) override {
    const int rows = in_.rows(batch), panels = m_.panels(), threads = core_.pool.size();
    const size_t stride = core_.k.converted_layout(m_).bytes;
    char* converted = scratch_.converted.as() + head_linear_bytes(core_, m_, rows) / threads * thread;
    const auto [begin, end] = part(heads_ * panels, thread, threads);
    for (int at = begin; at < end;) {
      const int head = at / panels, p0 = at % panels, p1 = std::min(panels, p0 + end - at);
      const float* x = in_.row(0) + offset_ + (size_t)head * m_.inputs;
      if (stride)
        for (int r = 0; r < rows; r++) core_.k.convert_row(m_, x + (size_t)r * in_.width, converted + r * stride);
      const Activations a{x, in_.width, converted, stride};
      const Packed w = part_.weights.matrix(part_.op.weights[0], head);
      core_.k.matmul(w, a, nullptr, out_.row(0) + (size_t)head * w.n, out_.width, rows, p0, p1);
      at += p1 - p0;
    }
  }

 private:
  const Core& core_;
  const Scratch& scratch_;
  const Part part_;
  const Tensor in_, out_;
  const Packed m_;  // of the first head
  const int heads_, offset_;
};

}  // namespace

size_t head_linear_bytes(const Core& core, const Packed& m, int rows) {
  return core.k.converted_layout(m).bytes * rows * core.pool.size();
}

const RegisterCpuOp kHeadLinear({{Op::head_linear}}, bind_op<HeadLinear>);

}  // namespace as
