// sample: every rank turns its logits into candidates, rank 0 merges and draws (sampler.h), and tells all what it drew.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "cpu/ops/ops.h"

namespace as {
namespace {

constexpr int kVerdict = -1;  // command kind within a step: which rows need another round, or else what was drawn

class Sample : public BoundOp {
 public:
  explicit Sample(const Binding& b)
      : core_(b.core),
        vocab_begin_(b.parts[0].op.integer("vocab_begin")),
        vocab_size_(b.parts[0].op.integer("vocab_size")),
        logits_(b.parts[0].in()),
        drawn_(b.drawn),
        blobs_(b.limits.max_outputs) {}

  void run(const Batch& batch, int thread) override {
    const int rows = (int)batch.outputs.size();
    if (thread == 0) {
      core_.pool.guard([&] { drawn_.samples.resize(rows), wide_.clear(); });
    }
    const auto every = [&](int count, auto&& work) {
      core_.pool.guard([&] {
        for (int i = thread; i < count; i += core_.pool.size()) work(i);
      });
      return core_.pool.barrier();
    };
    const bool ready = every(rows, [&](int r) {
      blobs_[r].clear();
      candidates(input(batch, r), vocab_begin_, logits_.width, vocab_size_, blobs_[r]);
    });
    if (!ready) return;
    // Ranks know from the plan whether a set may be wider than the candidates; rank 0 then says whether any is.
    const bool possible = std::any_of(batch.outputs.begin(), batch.outputs.end(),
                                      [&](const Output& out) { return may_narrow(batch.slot(out.slot).sampling); });
    if (!possible) {
      if (thread == 0) exchange(batch);
      return;
    }
    for (;;) {
      core_.pool.guard([&] {
        if (thread == 0) exchange(batch);
      });
      if (!core_.pool.barrier() || wide_.empty()) return;  // between these two barriers nobody changes wide_
      const bool narrowed = every((int)wide_.size(), [&](int i) {
        const int r = wide_[i].row;
        blobs_[r].clear();
        narrow(input(batch, r), vocab_begin_, logits_.width, vocab_size_, wide_[i].search, blobs_[r]);
      });
      if (!narrowed) return;
    }
  }

 private:
  struct WideRow {
    int row;
    Search search;
  };

  SampleInput input(const Batch& batch, int r) const {
    const Output& out = batch.outputs[r];
    const Slot& slot = batch.slot(out.slot);
    return {&slot.sampling, slot.history.data(), out.history, logits_.row(r), nullptr};
  }
  void exchange(const Batch& batch);
  void tell(std::vector<WideRow>& again);

  const Core& core_;
  const int vocab_begin_, vocab_size_;
  const Tensor logits_;
  Drawn& drawn_;
  std::vector<std::vector<uint8_t>> blobs_;
  std::vector<WideRow> wide_;  // rows whose set is wider than the candidates
};

// Brings a round's blobs to rank 0, which draws and tells the others.
void Sample::exchange(const Batch& batch) {
  std::vector<int> which;  // rows of this round
  if (wide_.empty())
    for (int r = 0; r < (int)batch.outputs.size(); r++) which.push_back(r);
  else
    for (const WideRow& row : wide_) which.push_back(row.row);
  // One message a rank: the blobs of these rows, one after the other.
  std::string message;
  for (int r : which) message.append(reinterpret_cast<const char*>(blobs_[r].data()), blobs_[r].size());
  std::vector<std::string> all;
  if (core_.window) all = core_.window->gather(message);
  else all.push_back(std::move(message));
  std::vector<WideRow> again;
  if (core_.rank == 0) {
    std::vector<size_t> at(all.size(), 0);
    for (size_t w = 0; w < which.size(); w++) {
      const int r = which[w];
      Blobs blobs;  // in rank order
      for (size_t i = 0; i < all.size(); i++) {
        const auto* blob = reinterpret_cast<const uint8_t*>(all[i].data()) + at[i];
        const size_t bytes = blob_bytes(blob);
        if (at[i] + bytes > all[i].size())
          throw std::runtime_error("candidates of rank " + std::to_string(i) + " end early");
        blobs.emplace_back(blob, bytes);
        at[i] += bytes;
      }
      const Output& out = batch.outputs[r];
      const SamplingParams& params = batch.slot(out.slot).sampling;
      WideRow row = wide_.empty() ? WideRow{r, {}} : wide_[w];
      const bool done = wide_.empty() ? merge(params, out.history, blobs, row.search, drawn_.samples[r])
                                      : merge_narrowed(params, blobs, row.search, drawn_.samples[r]);
      if (!done) again.push_back(row);
    }
  }
  if (core_.world > 1) tell(again);
  wide_ = std::move(again);
}

// Rank 0's verdict on a round: the rows that need another one, or if none does, all tokens.
void Sample::tell(std::vector<WideRow>& again) {
  std::string payload;
  const auto put = [&](const void* data, size_t bytes) { payload.append(static_cast<const char*>(data), bytes); };
  if (core_.rank == 0) {
    const uint32_t count = (uint32_t)again.size();
    put(&count, sizeof count);
    if (count) put(again.data(), count * sizeof(WideRow));
    else
      for (const SampleOutput& sample : drawn_.samples) put(&sample.token, sizeof sample.token);
    core_.window->publish(kVerdict, payload);
    return;
  }
  int kind = 0;
  uint32_t count = 0;
  if (!core_.window->wait_command(core_.window->timeout(), kind, payload) || kind != kVerdict ||
      payload.size() < sizeof count)
    throw std::runtime_error("rank 0 did not say what it drew");
  std::memcpy(&count, payload.data(), sizeof count);
  const char* rest = payload.data() + sizeof count;
  const size_t bytes = count ? count * sizeof(WideRow) : drawn_.samples.size() * sizeof(int32_t);
  if (payload.size() != sizeof count + bytes) throw std::runtime_error("rank 0 says what it drew for another batch");
  again.resize(count);
  if (count) std::memcpy(static_cast<void*>(again.data()), rest, bytes);
  else
    for (SampleOutput& sample : drawn_.samples) std::memcpy(&sample.token, rest, 4), rest += 4;
}

}  // namespace

std::unique_ptr<BoundOp> bind_sample(const Binding& b) { return std::make_unique<Sample>(b); }

}  // namespace as
