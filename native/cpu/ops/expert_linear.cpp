// expert_linear: multiplies each entry of a row set with its expert's matrix. Entries are sorted by expert, so that an
// expert's rows form one GEMM. Threads take parts of the experts' panels as they become free; with few rows each first
// reads panels of its own as one stream. Entries of experts on other ranks are not written, because nothing reads them.
//
// Fused with silu_mul, a panel of gate and a panel of up give n columns instead of 2n (linear.cpp).
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "cpu/ops/gemm.h"
#include "cpu/ops/ops.h"
#include "cpu/ops/routing.h"

namespace as {
namespace {

class ExpertLinear : public BoundOp {
 public:
  explicit ExpertLinear(const Binding& b)
      : core_(b.core),
        scratch_(b.scratch),
        linear_(b.parts[0]),
        in_(linear_.in()),
        out_(b.parts.back().out()),
        routing_(b.routing(out_.row_set)),
        gated_(b.parts.size() > 1),
        m_(linear_.matrix()),
        bias_(linear_.vector(1)),
        begin_(linear_.op.integer("expert_begin")),
        end_(begin_ + linear_.op.integer("experts")),
        counter_(b.core.pool.size()) {
    if (end_ > routing_.end && !routing_.divided)
      throw std::invalid_argument("op expert_linear: experts " + std::to_string(begin_) + "..." +
                                  std::to_string(end_ - 1) + ", the router has " + std::to_string(routing_.end));
    if (routing_.divided && (routing_.begin != begin_ || routing_.end != end_))
      throw std::invalid_argument("the CPU backend has no expert_linear of other experts than those before");
    routing_.begin = begin_, routing_.end = end_, routing_.divided = true;
  }

  void begin(const Batch&) override { counter_.reset(); }

  void run(const Batch& batch, int thread) override {
    Activations a;
    if (!rows(batch, thread, a)) return;
    const bool one = a.ldx == 0;
    // Multiplying a panel with this many rows takes as long as reading it.
    const int streaming = core_.k.multiply_tiles ? 96 : 8, panels = gated_ ? m_.panels() / 2 : m_.panels();
    const int threads = core_.pool.size(), entries = out_.rows(batch);
    const auto work = [&](int expert, int entry, int count, int p0, int p1) {
      Activations own = a;
      if (!one) own.x += (size_t)entry * a.ldx, own.converted += entry * a.stride;
      else own.ldx = m_.inputs;
      multiply(expert - begin_, own, entry, count, p0, p1, thread, out_.is_converted(entries));
    };
    if (threads > 1 && entries >= kTakenRows * routing_.top)
      routing_.take(begin_, end_, panels, streaming, thread, threads, counter_, work);
    else routing_.share(begin_, end_, panels, streaming, thread, threads, counter_, work);
  }

 private:
  void multiply(int expert, const Activations& a, int entry, int count, int p0, int p1, int thread, bool converted) {
    const Packed w = linear_.weights.matrix(linear_.op.weights[0], expert);
    const float* bias = bias_ ? bias_ + (size_t)expert * w.n : nullptr;
    if (!gated_) return core_.k.matmul(w, a, bias, out_.row(entry), w.n, count, p0, p1);
    if (converted) {
      const GatedOutput to{nullptr, 0, out_.bytes(entry), out_.converted};
      return core_.k.matmul_gated(w, a, bias, to, count, p0, p1);
    }
    if (count >= kManyRows) {
      const GatedOutput to{out_.row(entry), out_.width, nullptr, 0};
      return core_.k.matmul_gated(w, a, bias, to, count, p0, p1);
    }
    // With few rows, reads panels of gate as one stream, then those of up.
    const int half = w.panels() / 2, ld = 2 * kGatedPanels * w.panel;
    float* both = scratch_.gated.as<float>() + (size_t)thread * (kManyRows - 1) * ld;
    for (; p0 < p1; p0 += kGatedPanels) {
      const int panels = std::min(kGatedPanels, p1 - p0), columns = panels * w.panel;
      for (int i : {0, 1}) {
        Packed part = w;
        const int first = p0 + i * half;
        part.data += first * w.panel_bytes, part.n = columns;
        core_.k.matmul(part, a, bias ? bias + first * w.panel : nullptr, both + i * columns, ld, count, 0, panels);
      }
      for (int r = 0; r < count; r++)
        core_.k.silu_mul(both + (size_t)r * ld, both + (size_t)r * ld + columns, out_.row(entry + r) + p0 * w.panel,
                         columns);
    }
  }

  // The entries' rows in the kernels' format. If all entries share a single row, ldx is 0. Returns false if another
  // thread has failed.
  bool rows(const Batch& batch, int thread, Activations& a) {
    const size_t stride = core_.k.converted_layout(m_).bytes;
    const int threads = core_.pool.size(), rows = in_.rows(batch);
    char* scratch = scratch_.converted.as();
    a = {in_.data, m_.inputs, scratch, stride};
    if (in_.row_set == out_.row_set) {
      if (in_.is_converted(rows)) {
        a.converted = in_.bytes(0);
        return true;
      }
      if (!stride) return true;
      const int first = routing_.first[begin_];
      const auto [e0, e1] = part(routing_.first[end_] - first, thread, threads);
      for (int e = first + e0; e < first + e1; e++) core_.k.convert_row(m_, in_.row(e), scratch + e * stride);
      return core_.pool.barrier();
    }
    if (rows == 1) {  // each thread converts it, which takes less time than a barrier
      a.ldx = 0;
      if (stride) core_.k.convert_row(m_, in_.data, scratch + thread * stride), a.converted = scratch + thread * stride;
      return true;
    }
    const size_t bytes = stride ? stride : m_.inputs * sizeof(float);
    const auto [r0, r1] = part(rows, thread, threads);
    for (int r = r0; r < r1; r++) {
      const char* made = stride ? nullptr : reinterpret_cast<const char*>(in_.row(r));
      for (int i = r * routing_.top; i < (r + 1) * routing_.top; i++) {
        if (routing_.chosen[i] < begin_ || routing_.chosen[i] >= end_) continue;
        char* to = scratch + routing_.entry_of[i] * bytes;
        if (made) std::memcpy(to, made, bytes);
        else core_.k.convert_row(m_, in_.row(r), to);
        made = to;
      }
    }
    if (!stride) a.x = reinterpret_cast<const float*>(scratch);
    return core_.pool.barrier();
  }

  const Core& core_;
  const Scratch& scratch_;
  const Part linear_;
  const Tensor in_, out_;
  Routing& routing_;
  const bool gated_;
  const Packed m_;  // of the first expert
  const float* bias_;
  const int begin_, end_;
  WorkCounter counter_;
};

}  // namespace

const RegisterCpuOp kExpertLinear({{Op::expert_linear}, {Op::expert_linear, Op::silu_mul}}, bind_op<ExpertLinear>);

}  // namespace as
