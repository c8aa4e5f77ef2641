// sample: every rank turns its logits into candidates; rank 0 merges them, samples (sampler.h) and sends the tokens to
// all ranks. If rows sample under masks, rank 0 waits for these and sends them to the other ranks.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "cpu/ops/ops.h"

namespace as {
namespace {

constexpr double kMaskSeconds = 30;  // longer than computing a mask takes

class Sample : public BoundOp {
 public:
  explicit Sample(const Binding& b)
      : core_(b.core),
        vocab_begin_(b.parts[0].op.integer("vocab_begin")),
        vocab_size_(b.parts[0].op.integer("vocab_size")),
        logits_(b.parts[0].in()),
        output_(b.output),
        masks_(b.masks),
        own_(b.limits.max_outputs),
        shard_samplers_(std::min(b.limits.max_outputs, b.core.pool.size())) {}

  void begin(const Batch& batch) override {
    round_.clear();
    first_ = true, may_narrow_ = masked_ = false;
    for (size_t r = 0; r < batch.outputs.size(); r++) {
      const Output& out = batch.outputs[r];
      if (out.wanted == Wanted::nothing) continue;
      round_.push_back({(int)r, {}});
      // The plan tells every rank whether a set may be wider than the candidates. Rank 0 then says whether any is.
      may_narrow_ |= out.wanted == Wanted::sample && as::may_narrow(batch.slot(out.slot).sampling);
      masked_ |= out.mask > 0;
    }
  }

  void run(const Batch& batch, int thread) override {
    if (masked_) {
      if (thread == 0) core_.pool.guard([&] { await_masks(batch); });
      if (!core_.pool.barrier()) return;
    }
    do {
      if (!scan(batch, thread)) return;
      if (thread == 0) core_.pool.guard([&] { receive(); });
      if (!core_.pool.barrier()) return;
      if (core_.rank == 0 && !every(thread, round_.size(), [&](int i) { merge_row(batch, i); })) return;
      if (thread == 0) core_.pool.guard([&] { tell(); });
      if (!may_narrow_) return;
    } while (core_.pool.barrier() && !round_.empty());  // between barriers no thread changes round_
  }

 private:
  // A row of a round. The first round has all rows; later rounds have those whose set is wider than the candidates.
  struct RoundRow {
    int row;
    Search search;
  };

  template <typename Work>
  bool every(int thread, size_t count, Work&& work) {
    core_.pool.guard([&] {
      for (size_t i = thread; i < count; i += core_.pool.size()) work((int)i);
    });
    return core_.pool.barrier();
  }

  SampleInput input(const Batch& batch, int r) const {
    const Output& out = batch.outputs[r];
    const Slot& slot = batch.slot(out.slot);
    if (out.wanted == Wanted::score)
      return {&scoring_params(), nullptr, 0, logits_.row(r), nullptr, slot.history[out.history]};
    return {&slot.sampling, slot.history.data(), out.history, logits_.row(r), out.mask ? mask_of_[r] : nullptr};
  }

  void await_masks(const Batch& batch);
  bool scan(const Batch& batch, int thread);
  void receive();
  void merge_row(const Batch& batch, int index);
  void tell();

  const Core& core_;
  const int vocab_begin_, vocab_size_;
  const Tensor logits_;
  RunOutput& output_;
  Masks* const masks_;
  std::vector<const uint32_t*> mask_of_;  // of each output
  std::string masks_sent_;                // on rank 0: the message with masks
  std::vector<RoundRow> round_;
  bool first_ = true, may_narrow_ = false, masked_ = false;
  std::vector<std::vector<uint8_t>> own_;     // this rank's blob of each row
  std::vector<ShardSampler> shard_samplers_;  // of rows that threads share
  std::vector<std::string> messages_;         // of each rank
  std::vector<Blobs> blobs_;                  // in messages_: of each row of the round
  std::vector<char> done_;
};

// Finds each output's mask. Rank 0 waits until it is written; the other ranks receive it.
void Sample::await_masks(const Batch& batch) {
  const size_t words = ((size_t)vocab_size_ + 31) / 32, bytes = words * sizeof(uint32_t);
  mask_of_.assign(batch.outputs.size(), nullptr);
  size_t masked = 0;
  for (const Output& out : batch.outputs) masked += out.mask > 0;
  const bool sends = core_.peers != nullptr;
  masks_sent_.clear();
  if (core_.rank == 0) {
    if (!masks_) throw std::logic_error("a row samples under a mask, but there are no masks");
    for (size_t r = 0; r < batch.outputs.size(); r++) {
      if (!batch.outputs[r].mask) continue;
      mask_of_[r] = masks_->wait(batch.outputs[r].mask - 1, kMaskSeconds);
      if (sends) masks_sent_.append(reinterpret_cast<const char*>(mask_of_[r]), bytes);
    }
  }
  if (!sends) return;
  core_.peers->broadcast(masks_sent_);
  if (core_.rank == 0) return;
  if (masks_sent_.size() != masked * bytes) throw std::runtime_error("rank 0 sent masks of another batch");
  const char* from = masks_sent_.data();
  for (size_t r = 0; r < batch.outputs.size(); r++)
    if (batch.outputs[r].mask) mask_of_[r] = reinterpret_cast<const uint32_t*>(from), from += bytes;
}

// Computes this rank's blobs of the round's rows. With many rows, each belongs to one thread. With few, threads share
// each row.
bool Sample::scan(const Batch& batch, int thread) {
  const int rows = (int)round_.size(), parts = core_.pool.size() / std::max(rows, 1);
  const auto search_of = [&](int i) { return first_ ? nullptr : &round_[i].search; };
  if (parts < 2)
    return every(thread, rows, [&](int i) {
      auto& blob = own_[round_[i].row];
      blob.clear();
      if (first_) candidates(input(batch, round_[i].row), vocab_begin_, logits_.width, vocab_size_, blob);
      else narrow(input(batch, round_[i].row), vocab_begin_, logits_.width, vocab_size_, round_[i].search, blob);
    });
  return every(thread, rows,
               [&](int i) {
                 shard_samplers_[i].begin(input(batch, round_[i].row), vocab_begin_, logits_.width, vocab_size_, parts,
                                          search_of(i));
               }) &&
         every(thread, (size_t)rows * parts, [&](int i) { shard_samplers_[i / parts].scan(i % parts); }) &&
         every(thread, rows, [&](int i) {
           auto& blob = own_[round_[i].row];
           blob.clear();
           shard_samplers_[i].finish(blob);
         });
}

// Reads a message of each rank: the blobs of the round's rows, one after the other.
void Sample::receive() {
  std::string message;
  for (const RoundRow& r : round_)
    message.append(reinterpret_cast<const char*>(own_[r.row].data()), own_[r.row].size());
  if (core_.peers) messages_ = core_.peers->gather(message);
  else messages_.assign(1, std::move(message));
  done_.assign(round_.size(), 0);
  if (core_.rank == 0) blobs_ = blobs_of(messages_, round_.size());
}

void Sample::merge_row(const Batch& batch, int index) {
  RoundRow& r = round_[index];
  const Output& out = batch.outputs[r.row];
  if (out.wanted == Wanted::score) {
    score(batch.slot(out.slot).history[out.history], blobs_[index], output_.samples[r.row]);
    done_[index] = true;
    return;
  }
  const SamplingParams& params = batch.slot(out.slot).sampling;
  SampleOutput& sample = output_.samples[r.row];
  done_[index] = first_ ? merge(params, out.history, blobs_[index], r.search, sample)
                        : merge_narrowed(params, blobs_[index], r.search, sample);
}

// Sends rank 0's result of a round: the rows that need another round or, if none does, all tokens.
void Sample::tell() {
  std::vector<RoundRow> again;
  for (size_t i = 0; i < round_.size(); i++)
    if (core_.rank == 0 && !done_[i]) again.push_back(round_[i]);
  if (core_.peers) {
    std::string message;
    const auto put = [&](const void* data, size_t bytes) { message.append(static_cast<const char*>(data), bytes); };
    uint32_t count = (uint32_t)again.size();
    if (core_.rank == 0) {
      put(&count, sizeof count);
      if (count) put(again.data(), count * sizeof(RoundRow));
      else
        for (const SampleOutput& sample : output_.samples) put(&sample.token, sizeof sample.token);
    }
    core_.peers->broadcast(message);
    if (core_.rank != 0) {
      if (message.size() < sizeof count) throw std::runtime_error("rank 0 sent no samples");
      std::memcpy(&count, message.data(), sizeof count);
      const char* rest = message.data() + sizeof count;
      const size_t bytes = count ? count * sizeof(RoundRow) : output_.samples.size() * sizeof(int32_t);
      if (message.size() != sizeof count + bytes) throw std::runtime_error("rank 0 sent the samples of another batch");
      again.resize(count);
      if (count) std::memcpy(static_cast<void*>(again.data()), rest, bytes);
      else
        for (SampleOutput& sample : output_.samples) std::memcpy(&sample.token, rest, 4), rest += 4;
    }
  }
  round_ = std::move(again);
  first_ = false;
}

}  // namespace

const RegisterCpuOp kSampleOp({{Op::sample}}, bind_op<Sample>);

}  // namespace as
