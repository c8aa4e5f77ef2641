#include "cuda/memory/expert_memory.h"

#include <cstddef>
#include <stdexcept>
#include <string>

namespace as::cuda {
namespace {

struct Told {  // by the GPU, as of ExpertMemory
  int failed = 0;
  uint64_t waited = 0;
};

}  // namespace

ExpertRanks::ExpertRanks(const Device& device, std::shared_ptr<ExpertExchange> exchange, ExpertStream* stream,
                         HotExperts* hot)
    : device_(device), exchange_(std::move(exchange)), stream_(stream), hot_(hot) {
  exchange_->check_connected();
  const int ranks = exchange_->expert_ranks();
  if (exchange_->holds_experts() || ranks > kMostExpertRanks)
    throw std::invalid_argument("a GPU has up to " + std::to_string(kMostExpertRanks) + " ranks of experts, not " +
                                std::to_string(ranks));
  device_.use();
  const auto map = [&](int rank) {
    blocks_.emplace_back(exchange_->block(rank), exchange_->block_bytes(rank));
    return blocks_.back().on_gpu();
  };
  const ExpertShape& shape = exchange_->shape();
  char* own = map(0);
  memory_.sent = reinterpret_cast<uint32_t*>(own + offsetof(ExpertExchange::Dispatch, sent));
  memory_.latest = reinterpret_cast<int*>(own + offsetof(ExpertExchange::Dispatch, layer));
  memory_.rows = reinterpret_cast<float*>(own + ExpertExchange::kHeader);
  memory_.chosen = reinterpret_cast<int*>(memory_.rows + (size_t)shape.rows * shape.width);
  memory_.shares = reinterpret_cast<float*>(memory_.chosen + (size_t)shape.rows * shape.top);
  memory_.ranks = ranks;
  for (int n = 0; n < ranks; n++) {
    const char* block = map(1 + n);
    memory_.returned[n] = reinterpret_cast<const uint32_t*>(block);  // the value of Returned::sent
    memory_.sums[n] = reinterpret_cast<const float*>(block + ExpertExchange::kHeader);
  }
  local_ = Memory(sizeof(MessageState), "a message's state");
  told_ = Memory(sizeof(Told), "a flag", Memory::Where::host);
  Told* const told = told_.as<Told>();
  *told = {};
  memory_.local = local_.as<MessageState>(), memory_.failed = &told->failed, memory_.waited = &told->waited;
  memory_.limit = (uint64_t)(exchange_->timeout() * 1e9);
}

ExpertRanks::~ExpertRanks() {
  try {
    device_.use(), device_.wait();        // kernels use the host's memory
  } catch (const std::runtime_error&) {}  // the device is no longer usable
}

std::pair<int64_t, int64_t> ExpertRanks::waited() const {
  return {exchange_->sent_messages(), (int64_t)const_cast<const volatile Told*>(told_.as<Told>())->waited};
}

void ExpertRanks::check_waits() const {
  const int failed = const_cast<const volatile Told*>(told_.as<Told>())->failed;
  if (failed)
    throw std::runtime_error("rank 0 waited " + std::to_string((int)exchange_->timeout()) + " s on its GPU for rank " +
                             std::to_string(exchange_->number_of(failed)) +
                             " in routed experts: its process has ended, is stopped, or did not run the step; the "
                             "group is given up");
}

}  // namespace as::cuda
