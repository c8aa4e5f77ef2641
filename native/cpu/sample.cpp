// The sample op: every rank turns its logits into candidates, rank 0 merges and draws (sampler.h).
#include <algorithm>
#include <stdexcept>

#include "cpu/executor.h"

namespace as {
namespace {

constexpr int kVerdict = -1;  // command kind within a step: which rows need another round

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
      const SampleInput input{&slot.sampling, slot.history.data(), (int)slot.history.size(),
                              logits.data + (size_t)r * logits.width, nullptr};
      candidates(input, op.vocab_begin, logits.width, op.vocab_size, blobs_[r]);
    }
  });
  if (!pool_.barrier()) return;
  // Ranks know from the plan whether a set may be wider than the candidates; rank 0 then says whether any is.
  bool possible = false;
  for (int r = 0; r < rows && !possible; r++) possible = may_narrow(slots_[rows_[logit_rows_[r]].slot].sampling);
  if (!possible) {
    if (thread == 0) exchange_samples(false);
    return;
  }
  for (;;) {
    pool_.guard([&] {
      if (thread == 0) exchange_samples(true);
    });
    if (!pool_.barrier() || wide_.empty()) return;  // between these two barriers nobody changes wide_
    pool_.guard([&] {
      for (int i = thread; i < (int)wide_.size(); i += pool_.size()) {
        const int r = wide_[i].row;
        const Slot& slot = slots_[rows_[logit_rows_[r]].slot];
        blobs_[r].clear();
        const SampleInput input{&slot.sampling, slot.history.data(), (int)slot.history.size(),
                                logits.data + (size_t)r * logits.width, nullptr};
        narrow(input, op.vocab_begin, logits.width, op.vocab_size, wide_[i].search, blobs_[r]);
      }
    });
    if (!pool_.barrier()) return;
  }
}

// Brings a round's blobs to rank 0, which draws. may_narrow: then it tells the others which rows need another round
// (wide_).
void Executor::exchange_samples(bool may_narrow) {
  const int rows = (int)logit_rows_.size();
  auto slot_of = [&](int r) -> const Slot& { return slots_[rows_[logit_rows_[r]].slot]; };
  // One message a rank: the blobs of the given rows, one after the other. Calls `use` with each row's blobs in rank
  // order.
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
        if (at[i] + bytes > all[i].size())
          throw std::runtime_error("candidates of rank " + std::to_string(i) + " end early");
        row.emplace_back(blob, bytes);
        at[i] += bytes;
      }
      use(r, row);
    }
  };
  if (rank_ == 0 && wide_.empty()) output_.samples.resize(rows);
  std::vector<WideRow> again;
  if (wide_.empty()) {
    std::vector<int> every(rows);
    for (int r = 0; r < rows; r++) every[r] = r;
    exchange(every, [&](int r, const Blobs& blobs) {
      WideRow row{r, {}};
      if (!merge(slot_of(r).sampling, (int)slot_of(r).history.size(), blobs, row.search, output_.samples[r]))
        again.push_back(row);
    });
  } else {
    std::vector<int> which;
    for (const WideRow& row : wide_) which.push_back(row.row);
    auto next = wide_.begin();
    exchange(which, [&](int r, const Blobs& blobs) {
      WideRow row = *next++;
      if (!merge_narrowed(slot_of(r).sampling, blobs, row.search, output_.samples[r])) again.push_back(row);
    });
  }
  if (may_narrow && window_ && world_ > 1) {
    std::string payload(reinterpret_cast<const char*>(again.data()), again.size() * sizeof(WideRow));
    if (rank_ == 0) window_->publish(kVerdict, payload);
    else {
      int kind = 0;
      if (!window_->wait_command(window_->timeout(), kind, payload) || kind != kVerdict)
        throw std::runtime_error("rank 0 sent no verdict on the nucleus");
      again.resize(payload.size() / sizeof(WideRow));
      std::copy_n(payload.data(), payload.size(), reinterpret_cast<char*>(again.data()));
    }
  }
  wide_ = std::move(again);
}

}  // namespace as
