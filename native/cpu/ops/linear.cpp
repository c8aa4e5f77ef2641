// linear: y = x w^T + bias. Threads divide panels of output features and, if there are many rows, also the rows.
//
// Fused with a preceding rms_norm, each row is normed into the GEMM's format. Every thread norms a single row, which
// takes less time than a barrier. Fused with a following silu_mul, a panel of gate and a panel of up give n columns
// instead of 2n, in the next linear's format if that is bfloat16. With few rows, a thread computes all its panels
// before the product. Fused with a following add, each thread adds the columns that it computed.
//
// On tiles, threads take units of panels and rows as they become free. With few rows, elsewhere too, each first reads
// panels of its own as one stream, two thirds of an equal part, and they take the rest in up to four units a thread.
#include "cpu/isa.h"
#include "cpu/ops/gemm.h"
#include "cpu/ops/ops.h"

namespace as {
namespace {

// With fewer rows, integers are multiplied by vector instructions.
constexpr int kFewRows = 8;

class Linear : public RowOp {
 public:
  explicit Linear(const Binding& b)
      : core_(b.core),
        scratch_(b.scratch),
        m_(b.part(Op::linear)->matrix()),
        bias_(b.part(Op::linear)->vector(1)),
        counter_(b.core.pool.size()) {
    const Part& linear = *b.part(Op::linear);
    in_ = linear.in(), out_ = linear.out();
    if (const Part* norm = b.part(Op::rms_norm))
      norm_ = norm_weight(*norm), eps_ = (float)norm->op.number("eps"), x_ = norm->in();
    if (const Part* gate = b.part(Op::silu_mul)) gated_ = true, out_ = gate->out();
    if (const Part* add = b.part(Op::add)) residual_ = add->in();
  }

  void begin(const Batch&) override { counter_.reset(); }

  int rows(const Batch& batch) const override { return in_.rows(batch); }

  void run_rows(const Batch& batch, const RowRange& range, int thread) override {
    const int all = in_.rows(batch);
    Activations a;
    if (!(!norm_.empty() ? normed(thread, range, a)
                         : activations(core_, thread, m_, in_, all, range, scratch_.converted, a)))
      return;
    const int panels = gated_ ? m_.panels() / 2 : m_.panels(), threads = core_.pool.size();
    const int rows = range.size();
    const bool tiles = core_.k.multiply_tiles && (m_.pairs || m_.planes) && threads > 1;
    // Not float32 matrices, such as a router's, which are small, and not where a thread reads several panels in turn
    // (tile.h: kStreams).
    const bool few = m_.format != Format::f32 && rows < kManyRows && threads >= kTakingThreads && !uses_streams();
    if (tiles && rows >= kTakenRows) {
      const WorkUnits units(threads, panels, rows);
      counter_.share(thread, units.size(), [&](int i) { multiply(a, units[i], range.begin, all); });
    } else if (few || (tiles && (m_.pairs || rows >= kFewRows))) {
      counter_.share_last(thread, panels, 4,
                          [&](int64_t p0, int64_t p1) { multiply(a, {(int)p0, (int)p1, 0, rows}, range.begin, all); });
    } else {
      multiply(a, work_unit_of(thread, threads, panels, rows), range.begin, all);
    }
  }

 private:
  // A unit of the rows from `begin` on. all: rows of the step.
  void multiply(Activations a, const WorkUnit& unit, int begin, int all) {
    if (unit.empty()) return;
    const auto [p0, p1, r0, r1] = unit;
    const int first = begin + r0, end = begin + r1;
    a.x += (size_t)r0 * m_.inputs, a.converted += r0 * a.stride;
    if (gated_ && all < kManyRows) return gate_few(a, unit, begin);
    if (gated_) {
      GatedOutput to{};
      if (out_.converted_for) to.rounded = out_.bytes(first), to.rounded_stride = out_.converted;
      else to.y = out_.row(first), to.ldy = out_.width;
      core_.k.matmul_gated(m_, a, bias_, to, r1 - r0, p0, p1);
      return;
    }
    core_.k.matmul(m_, a, bias_, out_.row(first), m_.n, r1 - r0, p0, p1);
    if (!residual_.data) return;
    const int c0 = p0 * m_.panel, c1 = std::min(m_.n, p1 * m_.panel);
    for (int r = first; r < end; r++) core_.k.add(residual_.row(r) + c0, out_.row(r) + c0, c1 - c0);
  }

  // Computes a thread's panels of gate, then those of up, then their gated product, of rows from `begin` on.
  void gate_few(const Activations& a, const WorkUnit& own, int begin) {
    const int half = m_.panels() / 2, c0 = own.p0 * m_.panel, n = m_.n / 2;
    float* both = scratch_.gated.as<float>();
    const auto [p0, p1, r0, r1] = own;
    for (int first : {0, half})
      core_.k.matmul(m_, a, bias_, both + (size_t)r0 * m_.n, m_.n, r1 - r0, first + p0, first + p1);
    for (int r = r0; r < r1; r++) {
      const float* gate = both + (size_t)r * m_.n + c0;
      core_.k.silu_mul(gate, gate + n, out_.row(begin + r) + c0, (p1 - p0) * m_.panel);
    }
  }

  // Norms rows of x_ into the GEMM's format. Returns false if another thread has failed.
  bool normed(int thread, const RowRange& range, Activations& a) {
    const size_t stride = core_.k.converted_layout(m_).bytes;
    const auto norm = [&](int r, float* y) { core_.k.rms_norm(x_.row(r), norm_.data(), y, m_.inputs, eps_); };
    if (range.size() == 1) {
      float* own = scratch_.row(thread);
      norm(range.begin, own);
      char* converted = scratch_.converted.as() + thread * stride;
      if (stride) core_.k.convert_row(m_, own, converted);
      a = {own, m_.inputs, converted, stride};
      return true;
    }
    const auto [r0, r1] = range.of(thread, core_.pool.size());
    for (int r = r0; r < r1; r++) {
      float* y = stride ? scratch_.row(thread) : in_.row(r);
      norm(r, y);
      if (stride) core_.k.convert_row(m_, y, scratch_.converted.as() + (r - range.begin) * stride);
    }
    a = {in_.row(range.begin), m_.inputs, scratch_.converted.as(), stride};
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
  WorkCounter counter_;
};

}  // namespace

const RegisterCpuOp kLinear({{Op::linear},
                             {Op::linear, Op::add},
                             {Op::linear, Op::silu_mul},
                             {Op::rms_norm, Op::linear},
                             {Op::rms_norm, Op::linear, Op::silu_mul}},
                            bind_op<Linear>);

}  // namespace as
