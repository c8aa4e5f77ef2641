// causal_conv: each channel's weighted sum over its last rows. A slot's page has the last rows of its sequence.
#include "cpu/ops/ops.h"

namespace as {
namespace {

constexpr int kChannels = 64;  // of a thread's unit of work: whole vectors of every instruction set

class CausalConv : public BoundOp {
 public:
  explicit CausalConv(const Binding& b)
      : core_(b.core),
        x_(b.parts[0].in()),
        y_(b.parts[0].out()),
        taps_(b.parts[0].op.integer("taps")),
        rows_(taps_ - 1 + kMostDrafts),
        activated_(b.parts[0].op.flag("activated")),
        bias_(b.parts[0].vector(1)),
        pages_(b.slot_pages(sizeof(float) * rows_ * x_.width)),
        zeros_(x_.width) {
    const float* w = b.parts[0].vector();  // [channels, taps]
    weights_.resize((size_t)taps_ * x_.width);
    for (int c = 0; c < x_.width; c++)
      for (int t = 0; t < taps_; t++) weights_[(size_t)t * x_.width + c] = w[(size_t)c * taps_ + t];
  }

  void begin(const Batch& batch) override { pages_.begin(batch); }

  // Each thread computes all rows of its channels.
  void run(const Batch& batch, int thread) override {
    const auto [u0, u1] = part((x_.width + kChannels - 1) / kChannels, thread, core_.pool.size());
    const int c0 = u0 * kChannels, n = std::min(u1 * kChannels, x_.width) - c0;
    if (n <= 0) return;
    std::vector<const float*> rows(taps_), weights(taps_);
    for (int t = 0; t < taps_; t++) weights[t] = weights_.data() + (size_t)t * x_.width + c0;
    for (const Item& item : batch.items) {
      const auto kept = [&](int position) {
        return reinterpret_cast<float*>(pages_.page(item.slot)) + (size_t)(position % rows_) * x_.width + c0;
      };
      for (int i = 0; i < item.count; i++) {
        for (int t = 0; t < taps_; t++) {
          const int before = taps_ - 1 - t, position = item.start + i - before;
          rows[t] = position < 0 ? zeros_.data() : i < before ? kept(position) : x_.row(item.row + i - before) + c0;
        }
        core_.k.causal_conv(rows.data(), weights.data(), taps_, bias_ ? bias_ + c0 : nullptr, y_.row(item.row + i) + c0,
                            n, activated_);
      }
      for (int i = std::max(0, item.count - rows_); i < item.count; i++)
        std::copy_n(x_.row(item.row + i) + c0, n, kept(item.start + i));
    }
  }

 private:
  const Core& core_;
  const Tensor x_, y_;
  const int taps_, rows_;  // rows_: that a page holds, by position
  const bool activated_;
  const float* bias_;
  SlotPages& pages_;
  std::vector<float> weights_;  // [taps, channels]
  const std::vector<float> zeros_;
};

}  // namespace

const RegisterCpuOp kCausalConv({{Op::causal_conv}}, bind_op<CausalConv>);

}  // namespace as
