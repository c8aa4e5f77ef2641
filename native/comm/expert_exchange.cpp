#include "comm/expert_exchange.h"

#include <algorithm>
#include <cstring>

namespace as {
namespace {

constexpr char kMagic[8] = "as-expt";
constexpr const char* kPurpose = "what ranks of experts exchange";
constexpr int64_t kWoken = 50'000'000;  // ns: the longest sleep of a waiter that is woken
constexpr int64_t kNotWoken = 50'000;   // ns: the same where a GPU sends

}  // namespace

// How other ranks open a rank's memory.
struct ExpertExchange::Address {
  char magic[8];
  int32_t rank, size;
  ExpertShape shape;
  SharedBlock::Name block;
};

size_t ExpertExchange::bytes_needed(const ExpertShape& shape, bool holds_experts) {
  const size_t rows = shape.rows,
               sums = std::max(rows * shape.sum_width, (size_t)shape.entry_rows * shape.top * shape.sum_width),
               values = holds_experts ? sums : rows * ((size_t)shape.width + 2 * shape.top);
  return kHeader + (values * sizeof(float) + kHeader - 1) / kHeader * kHeader;
}

ExpertExchange::ExpertExchange(std::shared_ptr<SharedMemory> ranks, const ExpertShape& shape, bool by_gpu,
                               int model_ranks)
    : ranks_(std::move(ranks)),
      others_(model_ranks - 1),
      rank_(!ranks_ || !ranks_->rank() ? 0 : ranks_->rank() - others_),
      size_(ranks_ ? ranks_->size() - others_ : 0),
      shape_(shape),
      by_gpu_(by_gpu) {
  if (size_ < 2 || others_ < 0 || (ranks_->rank() && rank_ < 1))
    throw std::invalid_argument("a mixed group has a rank of the model and at least one of experts");
  if (shape.rows < 1 || shape.width < 1 || shape.top < 1 || shape.sum_width < 1 || shape.entry_rows < 0)
    throw std::invalid_argument("an exchange with ranks of experts: sizes must be positive");
  blocks_.resize(size_);
  blocks_[rank_] = SharedBlock(bytes_needed(shape_, holds_experts()), kPurpose);
}

std::string ExpertExchange::address() const {
  Address own{};
  std::memcpy(own.magic, kMagic, sizeof kMagic);
  own.rank = rank_, own.size = size_, own.shape = shape_;
  own.block = blocks_[rank_].name();
  return std::string(reinterpret_cast<const char*>(&own), sizeof own);
}

void ExpertExchange::connect(const std::vector<std::string>& addresses) {
  if (connected_ || (int)addresses.size() != size_)
    throw std::invalid_argument("ranks connect once, with an address of each");
  for (int r = 0; r < size_; r++) {
    Address other;
    if (addresses[r].size() != sizeof other) throw std::invalid_argument("the address of a rank is incomplete");
    std::memcpy(&other, addresses[r].data(), sizeof other);
    if (std::memcmp(other.magic, kMagic, sizeof kMagic) || other.rank != r || other.size != size_ ||
        std::memcmp(&other.shape, &shape_, sizeof shape_))
      throw std::invalid_argument("the address of rank " + std::to_string(number_of(r)) +
                                  " is of another build, group or model");
    if (r != rank_) blocks_[r] = SharedBlock(other.block, bytes_needed(shape_, r > 0), kPurpose);
  }
  connected_ = true;
}

void ExpertExchange::send(int layer, int rows, int outputs) {
  count(rows);
  Dispatch& d = dispatch();
  d.layer = layer, d.rows = rows, d.outputs = outputs, d.entries = 0;
  d.sent.store(++sent_, std::memory_order_seq_cst);
  d.changed.publish(d.changed.value.load(std::memory_order_relaxed) + 1);
}

void ExpertExchange::await_sums() {
  for (int r = 1; r < size_; r++) {
    Signal& signal = returned(r).sent;
    uint32_t seen = 0;
    ranks_->wait_until(
        number_of(r), "routed experts", kWoken,
        [&] { return reached(seen = signal.value.load(std::memory_order_acquire), sent_); },
        [&](int64_t ns) { signal.sleep(seen, ns); });
  }
}

bool ExpertExchange::await(bool or_end) {
  Dispatch& d = dispatch();
  uint32_t seen = 0;
  bool message = false;
  ranks_->wait_until(
      0, "rows for its experts", by_gpu_ ? kNotWoken : kWoken,
      [&] {
        seen = d.changed.value.load(std::memory_order_acquire);
        // In this order: all messages of a step that has ended are seen.
        const bool ended = or_end && reached(d.ended.load(std::memory_order_acquire), step_);
        message = reached(d.sent.load(std::memory_order_acquire), received_ + 1);
        return message || ended;
      },
      [&](int64_t ns) { d.changed.sleep(seen, ns); });
  return message;
}

void ExpertExchange::send_sums() {
  Returned& own = returned(rank_);
  const auto add = [](std::atomic<int64_t>& to, int64_t value) {  // this thread alone writes
    to.store(to.load(std::memory_order_relaxed) + value, std::memory_order_relaxed);
  };
  const std::chrono::nanoseconds took = std::chrono::steady_clock::now() - taken_;
  add(own.nanoseconds, took.count());
  if (wants_entries()) add(own.nanoseconds_of_entries, took.count()), add(own.entries, 1);
  own.sent.publish(received_);
}

}  // namespace as
