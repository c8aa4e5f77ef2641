// causal_conv: each channel's weighted sum over its last rows. A slot's page has the last rows before the position of
// its state, and those since in a ring by position.
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
        pages_(b.slot_pages(causal_conv_bytes(x_.width, taps_))),
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
      const int state = pages_.position(item.slot), last = state_position(item.start + item.count - item.drafts);
      const auto row_in = [&](char* page, int row) {
        return reinterpret_cast<float*>(page) + (size_t)row * x_.width + c0;
      };
      const auto before = [&](int position, int at) {  // one of the rows before the state's position
        return row_in(pages_.state(item.slot), position - at + taps_ - 1);
      };
      const auto recent = [&](int position) { return row_in(pages_.recent(item.slot), position % rows_); };
      const auto row_of = [&](int position) -> const float* {
        if (position < 0) return zeros_.data();
        if (position >= item.start) return x_.row(item.row + position - item.start) + c0;
        return position < state ? before(position, state) : recent(position);
      };
      for (int i = 0; i < item.count; i++) {
        for (int t = 0; t < taps_; t++) rows[t] = row_of(item.start + i - (taps_ - 1 - t));
        core_.k.causal_conv(rows.data(), weights.data(), taps_, bias_ ? bias_ + c0 : nullptr, y_.row(item.row + i) + c0,
                            n, activated_);
      }
      if (last > state)
        for (int p = last - (taps_ - 1); p < last; p++) std::copy_n(row_of(p), n, before(p, last));
      for (int i = std::max(0, item.count - rows_); i < item.count; i++)
        std::copy_n(x_.row(item.row + i) + c0, n, recent(item.start + i));
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

PageBytes causal_conv_bytes(int channels, int taps) {
  const size_t row = sizeof(float) * channels;
  return {(taps - 1) * row, (taps - 1 + kMostDrafts) * row};
}

const RegisterCpuOp kCausalConv({{Op::causal_conv}}, bind_op<CausalConv>);

}  // namespace as
