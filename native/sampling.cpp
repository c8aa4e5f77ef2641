// The sample op: every rank turns its logits into candidates, rank 0 merges and draws (sampler.h).
#include <algorithm>
#include <stdexcept>

#include "executor.h"

namespace as {
namespace {

constexpr int kVerdict = -1;  // command kind within a step: which rows need the second round

}  // namespace

void Executor::sample(const Op& op, int thread) {
  const Tensor& logits = in(op);
  const int rows = (int)logit_rows_.size();
  pool_.guard([&] {
    if (want_logits_ && thread == 0) {
      output_.logits.assign(logits.data, logits.data + (size_t)rows * logits.width);
      output_.logit_width = logits.width;
    }
  });
  if (want_logits_ && !pool_.barrier()) return;
  pool_.guard([&] {
    for (int r = thread; r < rows; r += pool_.size()) {
      const Slot& slot = slots_[rows_[logit_rows_[r]].slot];
      blobs_[r].clear();
      const SampleInput input{&slot.sampling, slot.history.data(), (int)slot.history.size(), logits.data + (size_t)r * logits.width, nullptr};
      candidates(input, op.vocab_begin, logits.width, op.vocab_size, blobs_[r]);
    }
  });
  if (!pool_.barrier()) return;
  if (thread == 0) exchange_samples(op);
}

void Executor::exchange_samples(const Op& op) {
  const Tensor& logits = in(op);
  const int rows = (int)logit_rows_.size();
  auto slot_of = [&](int r) -> const Slot& { return slots_[rows_[logit_rows_[r]].slot]; };
  // One message a rank: the blobs of the given rows, one after the other. Calls `use` with each row's blobs in rank order.
  auto exchange = [&](const std::vector<int>& which, auto&& use) {
    std::string message;
    for (int r : which) message.append(reinterpret_cast<const char*>(blobs_[r].data()), blobs_[r].size());
    std::vector<std::string> all;
    if (window_) all = window_->gather(message);
    else all.push_back(std::move(message));
    if (rank_ != 0) return;
    std::vector<size_t> at(all.size(), 0);
    for (int r : which) {
      Blobs row;
      for (size_t i = 0; i < all.size(); i++) {
        const auto* blob = reinterpret_cast<const uint8_t*>(all[i].data()) + at[i];
        const size_t bytes = blob_bytes(blob);
        if (at[i] + bytes > all[i].size()) throw std::runtime_error("candidates of rank " + std::to_string(i) + " end early");
        row.emplace_back(blob, bytes);
        at[i] += bytes;
      }
      use(r, row);
    }
  };
  std::vector<int> every(rows), again;
  for (int r = 0; r < rows; r++) every[r] = r;
  if (rank_ == 0) output_.samples.resize(rows);
  exchange(every, [&](int r, const Blobs& blobs) {
    if (!merge(slot_of(r).sampling, (int)slot_of(r).history.size(), blobs, output_.samples[r])) again.push_back(r);
  });
  // A nucleus wider than the candidates: rank 0 says for which rows. Ranks know from the plan whether that can happen.
  const bool possible = std::any_of(every.begin(), every.end(), [&](int r) {
    const SamplingParams& p = slot_of(r).sampling;
    return !p.greedy() && (p.top_p < 1 || p.top_k > 0);
  });
  if (!possible) return;
  if (window_ && world_ > 1) {
    std::string payload(reinterpret_cast<const char*>(again.data()), again.size() * sizeof(int));
    if (rank_ == 0) window_->publish(kVerdict, payload);
    else {
      int kind = 0;
      if (!window_->wait_command(window_->timeout(), kind, payload) || kind != kVerdict) throw std::runtime_error("rank 0 sent no verdict on the nucleus");
      again.resize(payload.size() / sizeof(int));
      std::copy_n(payload.data(), payload.size(), reinterpret_cast<char*>(again.data()));
    }
  }
  if (again.empty()) return;
  for (int r : again) {
    const Slot& slot = slot_of(r);
    blobs_[r].clear();
    const SampleInput input{&slot.sampling, slot.history.data(), (int)slot.history.size(), logits.data + (size_t)r * logits.width, nullptr};
    full(input, op.vocab_begin, logits.width, op.vocab_size, blobs_[r]);
  }
  exchange(again, [&](int r, const Blobs& blobs) {
    merge_full(slot_of(r).sampling, (int)slot_of(r).history.size(), blobs, output_.samples[r]);
  });
}

}  // namespace as
