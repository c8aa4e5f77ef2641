// linear: y = x w^T + bias. Threads divide panels of output features and, if there are many rows, also the rows.
//
// Fused with a preceding rms_norm, each row is normed into the GEMM's format. Every thread norms a single row, which
// takes less time than a barrier. Fused with a following silu_mul, a panel of gate and a panel of up give n columns
// instead of 2n, in the next linear's format if that is bfloat16. With few rows, a thread computes all its panels
// before the product. Fused with a following add, each thread adds the columns that it computed.
#include "cpu/ops/gemm.h"
#include "cpu/ops/ops.h"

namespace as {
namespace {

class Linear : public BoundOp {
 public:
  explicit Linear(const Binding& b)
      : core_(b.core), scratch_(b.scratch), m_(b.part(Op::linear)->matrix()), bias_(b.part(Op::linear)->vector(1)) {
    const Part& linear = *b.part(Op::linear);
    in_ = linear.in(), out_ = linear.out();
    if (const Part* norm = b.part(Op::rms_norm))
      norm_ = norm_weight(*norm), eps_ = (float)norm->op.number("eps"), x_ = norm->in();
    if (const Part* gate = b.part(Op::silu_mul)) gated_ = true, out_ = gate->out();
    if (const Part* add = b.part(Op::add)) residual_ = add->in();
  }

  void run(const Batch& batch, int thread) override {
    const int rows = in_.rows(batch), threads = core_.pool.size();
    Activations a;
    if (!(!norm_.empty() ? normed(thread, rows, a) : activations(core_, thread, m_, in_, rows, scratch_.converted, a)))
      return;
    const WorkUnit share = work_unit_of(thread, threads, gated_ ? m_.panels() / 2 : m_.panels(), rows);
    if (share.empty()) return;
    const auto [p0, p1, r0, r1] = share;
    a.x += (size_t)r0 * m_.inputs, a.converted += r0 * a.stride;
    if (gated_ && rows < kManyRows) return gate_few(a, share);
    if (gated_) {
      GatedOutput to{};
      if (out_.converted_for) to.rounded = out_.bytes(r0), to.rounded_stride = out_.converted;
      else to.y = out_.row(r0), to.ldy = out_.width;
      core_.k.matmul_gated(m_, a, bias_, to, r1 - r0, p0, p1);
      return;
    }
    core_.k.matmul(m_, a, bias_, out_.row(r0), m_.n, r1 - r0, p0, p1);
    if (!residual_.data) return;
    const int c0 = p0 * m_.panel, c1 = std::min(m_.n, p1 * m_.panel);
    for (int r = r0; r < r1; r++) core_.k.add(residual_.row(r) + c0, out_.row(r) + c0, c1 - c0);
  }

 private:
  // Computes a thread's panels of gate, then those of up, then their gated product.
  void gate_few(const Activations& a, const WorkUnit& share) {
    const int half = m_.panels() / 2, c0 = share.p0 * m_.panel, n = m_.n / 2;
    float* both = scratch_.gated.as<float>();
    const auto [p0, p1, r0, r1] = share;
    for (int first : {0, half})
      core_.k.matmul(m_, a, bias_, both + (size_t)r0 * m_.n, m_.n, r1 - r0, first + p0, first + p1);
    for (int r = r0; r < r1; r++) {
      const float* gate = both + (size_t)r * m_.n + c0;
      core_.k.silu_mul(gate, gate + n, out_.row(r) + c0, (p1 - p0) * m_.panel);
    }
  }

  // Norms the rows of x_ into the GEMM's format. Returns false if another thread has failed.
  bool normed(int thread, int rows, Activations& a) {
    const size_t stride = core_.k.converted_layout(m_).bytes;
    const auto norm = [&](int r, float* y) { core_.k.rms_norm(x_.row(r), norm_.data(), y, m_.inputs, eps_); };
    if (rows == 1) {
      float* own = scratch_.row(thread);
      norm(0, own);
      char* converted = scratch_.converted.as() + thread * stride;
      if (stride) core_.k.convert_row(m_, own, converted);
      a = {own, m_.inputs, converted, stride};
      return true;
    }
    const auto [r0, r1] = part(rows, thread, core_.pool.size());
    for (int r = r0; r < r1; r++) {
      float* y = stride ? scratch_.row(thread) : in_.row(r);
      norm(r, y);
      if (stride) core_.k.convert_row(m_, y, scratch_.converted.as() + r * stride);
    }
    a = {in_.data, m_.inputs, scratch_.converted.as(), stride};
    return core_.pool.barrier();
  }

  const Core& core_;
  const Scratch& scratch_;
  const Packed m_;
  const float* bias_;
  Tensor in_, out_;
  std::vector<float> norm_;
  float eps_ = 0;
  Tensor x_, residual_;  // input of the norm; what is added to
  bool gated_ = false;
};

}  // namespace

const RegisterCpuOp kLinear({{Op::linear},
                             {Op::linear, Op::add},
                             {Op::linear, Op::silu_mul},
                             {Op::rms_norm, Op::linear},
                             {Op::rms_norm, Op::linear, Op::silu_mul}},
                            bind_op<Linear>);

}  // namespace as
